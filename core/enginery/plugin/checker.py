"""A plugin manager with a strict check of a plugin's hook implementations, before pluggy sees them.

pluggy lets through what later fails or is silently ignored, and not the same things in 1.6 and 1.7. Here all of it is refused, and
all of a plugin's problems are reported together. Works for any class of `hookspec`s and any module or object with `hookimpl`s.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, Protocol

import pluggy
from pluggy import HookimplOpts

from enginery.errors import PluginError
from enginery.plugin.hookspecs import PROJECT
from enginery.plugin.near import did_you_mean

_HOLDERS: Final = (types.FunctionType, types.MethodType, staticmethod, classmethod)
_UNKNOWN: Final = (inspect.Parameter.empty, Any, object)
_IN_PYTHON: Final = 1 << 9  # of a type's flags: made by a class statement
_STARS: Final[Mapping[object, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class StrictPluginManager(pluggy.PluginManager):
    """Registers a plugin wholly or not at all, the same under pluggy 1.6 and 1.7, and nothing after `freeze`."""

    def __init__(self, specs: type) -> None:
        super().__init__(PROJECT)
        self.specs = specs
        self.frozen = False
        self.add_hookspecs(specs)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Raises `PluginError` with every problem of the plugin, before any of its hooks is live."""
        shown = name or self.get_canonical_name(plugin)
        if self.frozen:
            raise PluginError(f"plugin {shown!r} comes too late: plugins are loaded once, at the start; install it and restart")
        if problems := check(plugin, self.specs):
            raise PluginError("\n  - ".join([f"plugin {shown!r} does not fit the hooks of {self.specs.__name__}:", *problems]))
        return super().register(plugin, name)

    def unregister(self, plugin: object | None = None, name: str | None = None) -> object | None:
        """Take a plugin out. Raises `PluginError` after `freeze`."""
        if self.frozen:
            raise PluginError(f"plugin {name or plugin!r} cannot be removed after the start; block it with -p no:NAME and restart")
        return super().unregister(plugin, name)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> HookimplOpts | None:
        """Found without running properties, which pluggy 1.6 does."""
        return marked_options(plugin, name)

    def freeze(self) -> None:
        """Allow no more changes: from now on `register` and `unregister` raise."""
        self.frozen = True

    def only(self, plugin: str, hook: str) -> pluggy.HookCaller:
        """`hook` of one plugin, so that no other can answer for it."""
        others = [module for name, module in self.list_name_plugin() if name != plugin and module is not None]
        return self.subset_hook_caller(hook, others)

    def implements(self, plugin: str, hook: str) -> bool:
        """Whether the plugin of that name has an implementation of `hook`."""
        return marked_options(self.get_plugin(plugin), hook) is not None


def marked_options(plugin: object, name: str) -> HookimplOpts | None:
    """The options of the `hookimpl` on attribute `name`, or None. Runs no property and no other code of the plugin."""
    return _options(_static(plugin, name))


def _options(holder: object) -> HookimplOpts | None:
    if not isinstance(holder, _HOLDERS):
        return None
    mark, function = f"{PROJECT}_impl", holder if isinstance(holder, types.FunctionType) else holder.__func__
    options: HookimplOpts | None = vars(holder).get(mark) or vars(inspect.unwrap(function)).get(mark)
    return options if isinstance(options, dict) else None


@functools.cache
def hooks_of(specs: type) -> dict[str, Callable[..., object]]:
    """The functions of `specs` that are marked as hooks, by name."""
    functions = inspect.getmembers_static(specs, inspect.isfunction)
    return {name: function for name, function in functions if f"{PROJECT}_spec" in vars(function)}


def check(plugin: object, specs: type) -> list[str]:
    """Every problem of the plugin's implementations against `specs`, one sentence each; empty if there is none."""
    wanted, problems = hooks_of(specs), list[str]()
    if not isinstance(plugin, types.ModuleType) and inspect.getattr_static(type(plugin), "__getattr__", None) is not None:
        lost = "hooks are found without it, so those of what it wraps would be lost"
        problems.append(f"{type(plugin).__name__} has a __getattr__: {lost}; let enginery.attention.wrapper.Wrapper wrap it")
    for name in dir(plugin):
        found = _static(plugin, name)
        options = _options(found)
        if options is None:
            problems += _never_called(found, name, wanted)
            continue
        if unused := sorted(option for option, value in options.items() if value):
            problems.append(f"{name}: @hookimpl({', '.join(unused)}) is not accepted: order decides nothing here, names do")
        if name not in wanted:
            problems.append(f"{name} is not a hook{did_you_mean(name, wanted)}")
            continue
        impl = getattr(plugin, name)
        problems += [f"{name}: {problem}" for problem in _compare(_Signature.of(impl), _wanted(wanted[name]))]
    return problems


def _never_called(found: object, name: str, wanted: Collection[str]) -> list[str]:
    """Why `found`, which stands under `name`, would never be called, though it is marked as a hook or has the name of one."""
    if isinstance(found, _HOLDERS):
        return [f"{name} has the name of a hook but no @hookimpl, so it would never be called"] if name in wanted else []
    if _is_marked_inside(found):
        kind = f"an object of {type(found).__module__}.{type(found).__name__}"
        if isinstance(found, type):
            kind = f"a class, {found.__name__}"
        return [f"{name} is marked with @hookimpl but is {kind}, which is never called: write a plain function"]
    return []


def _is_marked_inside(found: object) -> bool:
    """Whether `found`, which is no function, was marked, or wraps a function that was. Runs none of the plugin's code."""
    match found:
        case property():
            inner: list[object] = [found.fget, found.fset]
        case functools.partial() | functools.partialmethod() | functools.cached_property():
            inner = [found.func]
        case _ if not (type(found).__dictoffset__ or type(found).__flags__ & _IN_PYTHON):
            return False  # a number, a text: it can have no mark
        case _:
            inner = [inspect.getattr_static(found, "__wrapped__", None), inspect.getattr_static(type(found), "__call__", None)]
    marks = [inspect.getattr_static(each, f"{PROJECT}_impl", None) for each in (found, *inner)]
    holders = (each for each in inner if not isinstance(each, types.FunctionType | types.WrapperDescriptorType | type | None))
    return any(isinstance(mark, dict) for mark in marks) or any(map(_is_marked_inside, holders))


def _static(plugin: object, name: str) -> object:
    """What stands under `name`, found without running any of the plugin's code; None if nothing does."""
    return vars(plugin).get(name) if isinstance(plugin, types.ModuleType) else inspect.getattr_static(plugin, name, None)


class _Signature(NamedTuple):
    """A callable as the comparison needs it: parameters without `self`, annotations resolved where their names can be."""

    parameters: dict[str, inspect.Parameter]
    returns: object
    kind: str

    @classmethod
    def of(cls, function: Callable[..., object], skip: int = 0) -> _Signature:
        signature = inspect.signature(function)
        inner = inspect.unwrap(function)
        scope = inner.__globals__ if inspect.isfunction(inner) else inner.__func__.__globals__
        parameters = list(signature.parameters.values())[skip:]
        kind = "a plain function"
        if inspect.iscoroutinefunction(inner):
            kind = "async"
        elif inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            kind = "a generator"
        return cls(
            {p.name: p.replace(annotation=_resolve(p.annotation, scope)) for p in parameters},
            _resolve(signature.return_annotation, scope),
            kind,
        )


@functools.cache
def _wanted(hook: Callable[..., object]) -> _Signature:
    return _Signature.of(hook, skip=1)


def _resolve(annotation: object, scope: dict[str, object]) -> object:
    """A string that names things imported for type checking only stays a string."""
    if not isinstance(annotation, str):
        return type(None) if annotation is None else annotation
    try:
        return _resolve(eval(annotation, scope), scope)
    except Exception:  # the plugin's own text: whatever it raises, it could not be resolved
        return annotation


def _compare(impl: _Signature, spec: _Signature) -> list[str]:
    each = (_parameter_problems(name, parameter, impl, spec) for name, parameter in impl.parameters.items())
    problems = [problem for found in each for problem in found]
    if impl.kind != spec.kind:
        problems.append(f"is {impl.kind}, but the hook is {spec.kind}")
    if not _fits(given=impl.returns, wanted=spec.returns):
        problems.append(f"is annotated to return {_text(impl.returns)}, but the hook returns {_text(spec.returns)}")
    return problems


def _parameter_problems(name: str, parameter: inspect.Parameter, impl: _Signature, spec: _Signature) -> list[str]:
    has_default = parameter.default is not parameter.empty
    if stars := _STARS.get(parameter.kind):
        return [f"{stars}{name} stays empty: a hook gets the arguments it names"]
    if parameter.kind is parameter.KEYWORD_ONLY:
        return [f"keyword-only parameter {name!r} is never passed; remove the * before it"]
    if name not in spec.parameters:
        free = [other for other in spec.parameters if other not in impl.parameters]
        hint = did_you_mean(name, free) or f"; it can ask for {', '.join(spec.parameters) or 'nothing'}"
        default = f" and would keep its default {parameter.default!r} for ever" * has_default
        return [f"parameter {name!r} is not in the hook's specification{default}{hint}"]
    problems = []
    if has_default:
        problems.append(f"parameter {name!r} has a default ({parameter.default!r}), so pluggy 1.6 would never pass it; remove it")
    wanted = spec.parameters[name].annotation
    if not _fits(given=wanted, wanted=parameter.annotation):
        problems.append(f"parameter {name!r} is annotated {_text(parameter.annotation)}, but the hook passes {_text(wanted)}")
    return problems


def _fits(*, given: object, wanted: object) -> bool:
    """Whether a value annotated `given` may go where `wanted` stands. What cannot be decided fits."""
    if given in _UNKNOWN or _is_any(wanted):
        return True
    if isinstance(given, str) or isinstance(wanted, str):  # it could not be resolved: an object fits, and an equal name does
        return _text(given) == _text(wanted) or any(_is_any(each) for each in alternatives(wanted))
    given_options, wanted_options = alternatives(given), alternatives(wanted)
    if len(given_options) == len(wanted_options) == 1:
        return _fits_alone(given, wanted)
    return all(any(_fits(given=one, wanted=other) for other in wanted_options) for one in given_options)


def _fits_alone(given: object, wanted: object) -> bool:
    """Of two annotations that are no unions: a subclass fits, whose type arguments fit."""
    given_origin, wanted_origin = typing.get_origin(given) or given, typing.get_origin(wanted) or wanted
    if not (inspect.isclass(given_origin) and inspect.isclass(wanted_origin)):
        return given == wanted
    pairs = zip(typing.get_args(given), typing.get_args(wanted), strict=False)
    return issubclass(given_origin, wanted_origin) and all(_fits(given=one, wanted=other) for one, other in pairs)


def alternatives(annotation: object) -> tuple[object, ...]:
    """The members of a union; of anything else, itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _is_any(annotation: object) -> bool:
    return annotation in _UNKNOWN or (inspect.isclass(annotation) and Protocol in annotation.__bases__)


def _text(annotation: object) -> str:
    raw = annotation.__name__ if inspect.isclass(annotation) and not typing.get_args(annotation) else str(annotation)
    words = "".join(c if c.isidentifier() or c.isdigit() or c == "." else f" {c} " for c in raw).split()
    text = "".join(word.rpartition(".")[2] for word in words)
    return text.replace("|", " | ").replace(",", ", ").replace("NoneType", "None")
