"""All that plugins offer, in one frozen object: built once at the start of each process, then asked by name or by need."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from enginery.contracts.attention import (
    AttnBackend,
    AttnBackendSpec,
    AttnNeeds,
    BackendContext,
    CoordinatorContext,
    SparseCoordinator,
    SparseCoordinatorSpec,
)
from enginery.contracts.engine import EngineHandle
from enginery.contracts.model import CheckpointSpec, ModelSpec
from enginery.contracts.schedule import SchedulePolicySpec
from enginery.errors import FAULTS, CheckpointError, PluginError
from enginery.plugin.boundary import Observers, checked
from enginery.plugin.checker import StrictPluginManager
from enginery.plugin.discovery import Wanted
from enginery.plugin.groups import Descriptor
from enginery.plugin.loading import Loaded, explain, load
from enginery.plugin.manifest import Manifest
from enginery.plugin.near import did_you_mean
from enginery.plugin.options import parse_options
from enginery.plugin.records import Offer, PluginRecord, SpecT, absent_plugins, not_found
from enginery.plugin.selection import FLAG, Selection, choose_family, ranked, select

if TYPE_CHECKING:
    from fastapi import APIRouter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Registry:
    """What is installed (`records`), what is on offer, of all groups and sorted by name, and the calls into plugins.

    options: of each descriptor that has some, by its name. manager: frozen; registering with it raises. manifest: what is live
    here; `replay` it in every child, and compare the digests.
    """

    records: tuple[PluginRecord, ...]
    on_offer: tuple[Offer[Descriptor], ...]
    manager: StrictPluginManager
    observers: Observers
    options: Mapping[str, object]
    manifest: Manifest

    @classmethod
    def load(cls, *, blocked: Sequence[str] = (), no_plugins: bool = False, options: Sequence[str] = ()) -> Registry:
        """Find, import and check the installed plugins. Imports no torch, as long as no plugin's `__init__` does.

        blocked: plugins that are not even imported, besides those of ENGINERY_BLOCKED_PLUGINS. options: `NAME.key=value`. Raises
        `ConfigError` for unknown names; a faulty plugin is a record, unless ENGINERY_STRICT_PLUGINS is set.
        """
        wanted = Wanted.read(blocked=blocked, no_plugins=no_plugins)
        return _build(cls, load(wanted), options=tuple(options), blocked=tuple(sorted(wanted.blocked)))

    @classmethod
    def replay(cls, manifest: Manifest) -> Registry:
        """Load in a child process what the parent's manifest says and nothing else. Raises `PluginError` on any difference."""
        loaded = load(Wanted(only=frozenset(entry.name for entry in manifest.plugins), absent=manifest.absent))
        manifest.check(loaded.records)
        return _build(cls, loaded, options=manifest.options, blocked=manifest.blocked)

    def offers(self, kind: type[SpecT]) -> tuple[Offer[SpecT], ...]:
        """Every descriptor of that kind, sorted by name."""
        return cast("tuple[Offer[SpecT], ...]", tuple(offer for offer in self.on_offer if isinstance(offer.spec, kind)))

    def named(self, kind: type[SpecT], name: str, what: str) -> Offer[SpecT]:
        """The descriptor of that name. what: its kind, in words. Raises `PluginError` with the near matches."""
        for offer in self.offers(kind):
            if offer.name == name:
                return offer
        raise PluginError(not_found(what, name, [offer.name for offer in self.offers(kind)], self.records))

    def select_attn_backend(self, wanted: str, needs: AttnNeeds, *, leave_out: Collection[str] = (), flag: str = FLAG) -> Selection:
        """The backend named `wanted`, or for "auto" the best that refuses nothing, with every candidate's reasons.

        leave_out: names that are not candidates. flag: what names `wanted`. Raises `Unsupported` when that, or everything,
        refuses, and `PluginError` for an unknown name.
        """
        offers = [offer for offer in self.offers(AttnBackendSpec) if offer.name not in leave_out]
        return select(wanted, needs, offers, self.records, flag)

    def create_attn_backend(self, name: str, context: BackendContext) -> AttnBackend:
        """Build the backend `name` by its own plugin. Raises `PluginError` naming the plugin when that fails."""
        offer = self.named(AttnBackendSpec, name, "attention backend")
        backend: AttnBackend = _created(self.manager, offer, "create_attn_backend", name=name, context=context)
        return backend

    def create_sparse_coordinator(self, name: str, context: CoordinatorContext) -> SparseCoordinator:
        """Build the coordinator `name` by its own plugin. Raises `PluginError` naming the plugin when that fails."""
        offer = self.named(SparseCoordinatorSpec, name, "sparse coordinator")
        coordinator: SparseCoordinator = _created(self.manager, offer, "create_sparse_coordinator", context=context)
        return checked(offer, coordinator, SparseCoordinator)

    def find_model(self, config: Mapping[str, Any]) -> tuple[Offer[ModelSpec], str]:
        """The family for a config.json, and why it is that one: of its `architectures` the first that any serves.

        Of several families the one of highest priority that refuses nothing. Raises `CheckpointError`.
        """
        architectures: Sequence[str] = config["architectures"]
        known = {architecture for offer in self.offers(ModelSpec) for architecture in offer.spec.architectures}
        lines = []
        for architecture in filter(known.__contains__, architectures):
            families = ranked(offer for offer in self.offers(ModelSpec) if architecture in offer.spec.architectures)
            chosen, refused = choose_family(families, config, architecture)
            if chosen is not None:
                return chosen
            lines += refused
        shown = " or ".join(architectures)
        lines = lines or [f"no plugin serves the architecture {shown}{did_you_mean(shown, known) or '.'}"]
        lines += [f"Served are: {', '.join(sorted(known)) or 'none'}.", *absent_plugins(self.records)]
        raise CheckpointError("\n".join([*lines, "Install a plugin for it; engine plugins shows what is installed."]))

    def schedule_policy(self, name: str) -> Offer[SchedulePolicySpec]:
        """The order of that name; "auto" is first come, first served."""
        return self.named(SchedulePolicySpec, "fcfs" if name == "auto" else name, "schedule policy")

    def checkpoint(self, name: str) -> Offer[CheckpointSpec] | None:
        return next((offer for offer in self.offers(CheckpointSpec) if offer.name == name), None)

    def default_checkpoint(self) -> Offer[CheckpointSpec]:
        """The installed checkpoint of highest priority. Raises `PluginError` when none is installed."""
        if not (checkpoints := ranked(self.offers(CheckpointSpec))):
            advice = "name a folder or a Hugging Face id with --model (ENGINERY_MODEL)"
            raise PluginError("\n".join([f"no model is named, and no plugin brings one; {advice}", *absent_plugins(self.records)]))
        return checkpoints[0]

    def options_for(self, name: str) -> object | None:
        """The options of the descriptor `name`, an instance of its dataclass; None if it has none."""
        return self.options.get(name)

    def implementing(self, hook: str) -> list[PluginRecord]:
        return [record for record in self.records if record.is_live and self.manager.implements(record.name, hook)]

    def register_routes(
        self, names: Sequence[str], router: APIRouter, engine: EngineHandle
    ) -> list[tuple[PluginRecord, APIRouter]]:
        """Add the HTTP routes of the plugins named, and of those that offer nothing else: they were installed for their routes.

        Returns the routes of each plugin. Raises `PluginError` for one named that is unknown, has none, or fails; one that nobody
        named is left out if it fails.
        """
        able = {record.name: record for record in self.implementing("register_routes")}
        for name in names:
            if name not in able:
                raise PluginError(not_found("plugin with routes named", name, able, self.records))
        pages = [name for name, record in able.items() if tuple(record.offers) == ("routes",)]
        added: list[tuple[PluginRecord, APIRouter]] = []
        for name in dict.fromkeys((*names, *pages)):
            own = type(router)()
            try:
                self.manager.only(name, "register_routes")(router=own, engine=engine)
            except FAULTS as error:  # a plugin's code
                if name in names:
                    raise PluginError(f"{able[name]} could not add its routes: {explain(error)}") from error
                _log.warning("routes of %s are left out: %s", able[name], explain(error))
                continue
            router.include_router(own)
            added.append((able[name], own))
        return added


def _created(manager: StrictPluginManager, offer: Offer[object], hook: str, **given: object) -> Any:
    try:
        created = manager.only(offer.plugin, hook)(**given)
    except FAULTS as error:
        raise PluginError(f"{offer.source} could not build {offer.group} {offer.name!r}: {explain(error)}") from error
    if created is None:
        why = f"registers {offer.group} {offer.name!r}, but its {hook} answered None; report it there"
        raise PluginError(f"{offer.source} {why}")
    return created


def raised_in(error: BaseException, registry: Registry) -> str:
    """` in ` the plugin whose code raised, as messages name it, with function and line; empty if no plugin's did, and of Ctrl-C."""
    if not isinstance(error, Exception):
        return ""
    modules = {record: registry.manager.get_plugin(record.name) for record in registry.records if record.is_live}
    packages = {f"{module.__name__}.": record for record, module in modules.items() if isinstance(module, ModuleType)}
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        for package, record in packages.items():
            if f"{frame.f_globals['__name__']}.".startswith(package):
                return f" in {record}, {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
    return ""


def _build(cls: type[Registry], loaded: Loaded, *, options: tuple[str, ...], blocked: tuple[str, ...]) -> Registry:
    observing = [record for record in loaded.records if record.is_live and "observer" in record.offers]
    observers = {str(record): loaded.manager.only(record.name, "observe_step") for record in observing}
    return cls(
        records=loaded.records,
        on_offer=loaded.offers,
        manager=loaded.manager,
        observers=Observers(observers),
        options=parse_options(options, loaded.offers, loaded.records),
        manifest=Manifest.of(loaded.records, options=options, blocked=blocked),
    )
