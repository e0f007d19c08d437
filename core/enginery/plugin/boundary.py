"""Where the core runs a plugin's code: what goes wrong there names the plugin."""

from __future__ import annotations

import functools
import logging
import math
from asyncio import CancelledError
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import BoundArguments, getattr_static, isfunction, signature
from typing import ParamSpec, TypeVar

from enginery.contracts.drafting import DrafterSpec, DraftModelOptions
from enginery.contracts.grammars import Grammar
from enginery.contracts.model import ModelFacts, ModelSpec
from enginery.contracts.parsers import ParserEvent, ParserSetup, ParserSpec
from enginery.contracts.schedule import QueuedFacts, SchedulePolicySpec, StepReport
from enginery.errors import FAULTS, EnginError, PluginError
from enginery.plugin.loading import explain
from enginery.plugin.records import Offer

ToldT = TypeVar("ToldT")
P = ParamSpec("P")
_log = logging.getLogger(__name__)


def guarded_policy(offer: Offer[SchedulePolicySpec], options: object = None) -> SchedulePolicySpec:
    """The policy, with a key that is numbers, that is given its options, and whose failure names the plugin."""

    def key(request: QueuedFacts) -> tuple[float, ...]:
        with inside(offer, "give a request its place"):
            told = offer.spec.key(replace(request, options=options))
        try:
            numbers = tuple(map(float, told))
        except (TypeError, ValueError):
            numbers = (math.nan,)
        if any(map(math.isnan, numbers)):
            raise PluginError(f"{offer.source} gave a request the place {told!r:.100}; a key is a tuple of numbers")
        return numbers

    return replace(offer.spec, key=key)


def guarded_parser(offer: Offer[ParserSpec]) -> ParserSpec:
    """The parser, whose failures, and what it returns that it must not, name the plugin."""

    def guarded(run: Callable[P, ToldT], doing: str, then: Callable[[ToldT], ToldT] = lambda told: told) -> Callable[P, ToldT]:
        def call(*given: P.args, **named: P.kwargs) -> ToldT:
            with inside(offer, doing):
                return then(run(*given, **named))

        return call

    def grammar(told: Grammar | None) -> Grammar | None:
        return told and check_is(offer, told, Grammar, by="force")

    spec, forces = offer.spec, "make a grammar of calls"
    return replace(
        spec,
        make=lambda setup: _GuardedParser(offer, setup),
        is_inside=spec.is_inside and guarded(spec.is_inside, "tell where a prompt ends"),
        force=spec.force and guarded(spec.force, forces, grammar),
        force_or_json=spec.force_or_json
        and guarded(spec.force_or_json, forces, lambda force: force and guarded(force, forces, grammar)),
        tell=spec.tell and guarded(spec.tell, "write a conversation"),
    )


class _GuardedParser:
    def __init__(self, offer: Offer[ParserSpec], setup: ParserSetup) -> None:
        self._offer = offer
        with inside(offer, "make a parser"):
            self._parser = offer.spec.make(setup)

    def feed(self, text: str) -> list[ParserEvent]:
        with inside(self._offer, "read an answer"):
            return self._events(self._parser.feed(text))

    def finish(self) -> list[ParserEvent]:
        with inside(self._offer, "read an answer"):
            return self._events(self._parser.finish())

    def _events(self, told: Iterable[ParserEvent]) -> list[ParserEvent]:
        events = list(told)
        if wrong := [event for event in events if not isinstance(event, ParserEvent)]:
            raise PluginError(f"{self._offer.source} read {wrong[0]!r:.100} in an answer, which is no event of a parser")
        return events


def siblings_of(offer: Offer[DrafterSpec], options: object) -> int:
    """How many of the likeliest others are verified beside each guess of a draft model."""
    return options.num_siblings if offer.spec.is_model and isinstance(options, DraftModelOptions) else 0


def gives_trees(offer: Offer[DrafterSpec], options: object) -> bool:
    with inside(offer, "say whether its guesses branch"):
        return offer.spec.trees is not None and offer.spec.trees(options)


def checked(offer: Offer[object], made: ToldT, protocol: type) -> ToldT:
    """What the plugin built. Raises `PluginError` that names the plugin where that is no `protocol`, or cannot be called as it."""
    wanted, there = [*vars(protocol), *vars(protocol).get("__annotations__", ())], () if isinstance(made, type) else dir(made)
    if missing := [name for name in wanted if not name.startswith("_") and name not in there]:
        raise PluginError(f"{offer.source} built {made!r:.100}, which is no {protocol.__name__}: it has no {', '.join(missing)}")
    kind: type = type(made)
    _check_takes(offer.source, kind, protocol)
    return made


@functools.cache  # it takes 0.1 ms, and each answer's grammar is checked
def _check_takes(source: str, kind: type, protocol: type) -> None:
    for name, method in vars(protocol).items():
        if not name.startswith("_") and isfunction(method) and isfunction(own := getattr_static(kind, name, None)):
            given = BoundArguments(takes := signature(method), OrderedDict(takes.parameters))
            try:
                signature(own).bind(*given.args, **given.kwargs)
            except TypeError as error:
                raise PluginError(f"{source}: {kind.__name__} lacks {method.__qualname__}{takes}: {error}") from error


def described(family: Offer[ModelSpec], config: Mapping[str, object], what: str) -> ModelFacts:
    """What the family says of config.json. what: whose that is, in words."""
    with inside(family, f"describe {what}"):
        facts = family.spec.describe(config)
    return check_is(family, facts, ModelFacts, by="describe")


def check_is(offer: Offer[object], told: object, kind: type[ToldT], *, by: str) -> ToldT:
    """What the plugin's function `by` returned, if it is of that kind. Else raises `PluginError` that names the plugin."""
    if not isinstance(told, kind):
        raise PluginError(f"{offer.source}: {by} returned {told!r:.100}, which is no {kind.__name__}")
    return told


@contextmanager
def inside(offer: Offer[object], doing: str) -> Iterator[None]:
    """Run a plugin's code. Its own `EnginError`s pass; anything else becomes a `PluginError`: PLUGIN could not DOING: why."""
    try:
        yield
    except EnginError:
        raise
    except FAULTS as error:  # a plugin's code
        raise PluginError(f"{offer.source} could not {doing}: {explain(error, vars(offer.spec).values())}") from error


@contextmanager
def exits_as_failures() -> Iterator[None]:
    """Run code of which some is a plugin's: what would end the process, SystemExit or a panic in Rust, becomes `RuntimeError`."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit, CancelledError):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None


class Observers:
    """The `observe_step` of each plugin that has one, by the plugin as messages name it. They cannot stop the loop."""

    def __init__(self, observers: Mapping[str, Callable[..., object]]) -> None:
        self._live = dict(observers)

    def __bool__(self) -> bool:
        return bool(self._live)

    def report(self, report: StepReport) -> None:
        """Tell every observer. One that raises is logged once and switched off."""
        for source, observe in tuple(self._live.items()):
            try:
                observe(report=replace(report, pages=dict(report.pages)))  # its own to change; `asdict` takes no read-only one
            except FAULTS:  # a plugin's code
                del self._live[source]
                _log.exception("observe_step of %s failed at step %d; it is switched off", source, report.step)
