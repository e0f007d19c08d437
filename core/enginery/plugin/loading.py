"""From what is installed to what can be used: import, check, collect, settle conflicts. A plugin is taken wholly or not at all."""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

from enginery import __version__
from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.versions import HookGroup
from enginery.errors import FAULTS, PluginError
from enginery.plugin import own_parts
from enginery.plugin.checker import StrictPluginManager
from enginery.plugin.discovery import CORE, Found, Wanted, discover
from enginery.plugin.groups import GROUPS, Descriptor, claims, descriptor_problems, version_refusal
from enginery.plugin.hookspecs import EngineHooks
from enginery.plugin.records import FAILED, Offer, PluginRecord, Status

_log = logging.getLogger(__name__)
_ENGINE, _PYTHON = re.escape(__file__.removesuffix("plugin/loading.py")), re.escape(traceback.__file__.removesuffix("traceback.py"))
_NOT_A_PLUGINS: Final = re.compile(rf"<string>|{_ENGINE}|.*-packages/torch/|{_PYTHON}(?!(site|dist)-packages/)")
_OTHER_OFFERS: Final = {"commands": "register_commands", "routes": "register_routes", "observer": "observe_step"}


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A plugin on its way: `module` and `offers` only while its record is live."""

    record: PluginRecord
    module: ModuleType | None = None
    offers: tuple[Offer[Descriptor], ...] = ()

    def failed(self, status: Status, reason: str) -> Plugin:
        return Plugin(record=replace(self.record, status=status, reason=reason))


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Everything that could be loaded, in a frozen manager, and a record of everything that is installed.

    offers: of all groups, sorted by name.
    """

    manager: StrictPluginManager
    records: tuple[PluginRecord, ...]
    offers: tuple[Offer[Descriptor], ...]


def load(wanted: Wanted) -> Loaded:
    """Import and check what is installed and wanted. Raises `PluginError` only in strict mode, or for a fault of the core's own."""
    record = PluginRecord(name=CORE, distribution="enginery", version=__version__, status=Status.LOADED)
    core = _collect(Plugin(record=record, module=own_parts))
    plugins = settle_conflicts([core, *(_import(found) for found in discover(wanted))])
    if wanted.strict:
        _refuse_failures(plugins)
    manager = StrictPluginManager(EngineHooks)
    for plugin in plugins:
        if plugin.module is not None:
            manager.register(plugin.module, plugin.record.name)
    manager.freeze()
    offers = sorted((offer for plugin in plugins for offer in plugin.offers), key=lambda offer: offer.name)
    return Loaded(manager=manager, records=tuple(plugin.record for plugin in plugins), offers=tuple(offers))


def _refuse_failures(plugins: Sequence[Plugin]) -> None:
    failures = [plugin.record for plugin in plugins if plugin.record.status in FAILED]
    if failures:
        lines = [f"{failure} is {failure.status}: {failure.reason}" for failure in failures]
        raise PluginError("\n  - ".join(["ENGINERY_STRICT_PLUGINS is set, and not every plugin is sound:", *lines]))


def settle_conflicts(plugins: Sequence[Plugin]) -> list[Plugin]:
    """Plugins that claim one name are all in conflict, whatever their order; a name of the core's own stays the core's."""
    owners: dict[str, list[Plugin]] = defaultdict(list)
    for plugin in plugins:
        for claim in _claims(plugin):
            owners[claim].append(plugin)
    settled = []
    for plugin in plugins:
        rivals = {claim: owners[claim] for claim in _claims(plugin) if len(owners[claim]) > 1}
        if rivals and plugin.record.name != CORE:
            told = (f"{claim} is registered by {' and '.join(str(each.record) for each in by)}" for claim, by in rivals.items())
            plugin = plugin.failed(Status.CONFLICT, f"{'; '.join(told)}; block one with -p no:NAME or uninstall it")
        settled.append(plugin)
    return settled


def explain(error: BaseException, called: Iterable[object] = ()) -> str:
    """An exception of a plugin in one line, with the last file and line that it passed outside of the engine, torch and Python.

    called: what may be functions of the plugin. Where one was called with arguments that it does not take, its place is told.
    """
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = _frames(error)
    places = [(one.filename, one.lineno) for one in frames if not _NOT_A_PLUGINS.match(one.filename)]
    if not places:
        codes = [each.__code__ for each in called if isinstance(each, FunctionType)]
        places = [(code.co_filename, code.co_firstlineno) for code in codes if str(error).startswith(f"{code.co_qualname}() ")]
    file, line = places[-1] if places else (frames[-1].filename, frames[-1].lineno)
    return f"{type(error).__name__}: {error} ({file}, line {line})"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Without those of Python's frozen modules, which no file has."""
    return [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]


def _import(found: Found) -> Plugin:
    plugin = Plugin(record=found.record)
    if found.entry_point is None:
        return plugin
    if found.entry_point.attr:
        return plugin.failed(Status.BROKEN, f"its entry point is {found.entry_point.value}, but must name the package alone")
    try:
        module = found.entry_point.load()
    except FAULTS as error:  # the plugin's code: its failure is a row, not ours
        value, why = found.entry_point.value, f"{explain(error)}; its entry point is {found.entry_point.value}"
        if isinstance(error, ModuleNotFoundError) and f"{value}.".startswith(f"{error.name}."):
            advice = f"see what `pip show -f {found.record.distribution}` lists, and the packages in its pyproject.toml"
            why = f"its entry point is {value}, and no package {error.name} is installed; {advice}"
        return plugin.failed(Status.BROKEN, why)
    except KeyboardInterrupt:  # the user's, or the plugin's, which nobody would find
        _log.warning("interrupted while %s was imported", found.record)
        raise
    return _collect(replace(plugin, module=module, record=replace(found.record, status=Status.LOADED)))


def _collect(plugin: Plugin) -> Plugin:
    try:
        return _checked(plugin)
    except FAULTS as error:  # the plugin's code
        why = str(error).removeprefix(f"plugin {plugin.record.name!r} ") if isinstance(error, PluginError) else explain(error)
        return plugin.failed(Status.BROKEN, why)  # behind its name


def _checked(plugin: Plugin) -> Plugin:
    """Check the plugin's hooks and its descriptors, in a manager of its own, so that a faulty one leaves no trace."""
    name = plugin.record.name
    manager = StrictPluginManager(EngineHooks)
    manager.register(plugin.module, name)
    offers = [offer for group in HookGroup for offer in _ask(manager, group, plugin.record)]
    problems = [problem for offer in offers for problem in descriptor_problems(offer.group, offer.spec)]
    if problems := problems or _plugin_problems(manager, offers, name):
        raise PluginError("\n  - ".join(["it registers what cannot be used:", *problems]))
    if refusals := [refusal for offer in offers if (refusal := version_refusal(offer.group, offer.spec))]:
        return plugin.failed(Status.INCOMPATIBLE, "; ".join(refusals))
    record = replace(plugin.record, offers=_shown(offers, manager, name))
    return _without_device(replace(plugin, offers=tuple(offers), record=record))


def _shown(offers: Sequence[Offer[Descriptor]], manager: StrictPluginManager, name: str) -> tuple[str, ...]:
    other = [shown for shown, hook in _OTHER_OFFERS.items() if manager.implements(name, hook)]
    return tuple(sorted([*(f"{offer.group}:{offer.name}" for offer in offers), *other]))


def _ask(manager: StrictPluginManager, group: HookGroup, record: PluginRecord) -> list[Offer[Descriptor]]:
    offers = []
    hook = GROUPS[group].register
    if not manager.implements(record.name, hook):
        return []
    for answer in manager.only(record.name, hook)() or [None]:  # pluggy leaves a None out
        if not isinstance(answer, list | tuple):
            raise PluginError(f"{hook} returned {answer!r:.100}, but must return a list or a tuple")
        for spec in answer:
            name = str(vars(spec).get("name")) if isinstance(spec, GROUPS[group].descriptor) else repr(spec)
            offers.append(
                Offer(
                    spec=spec, group=group, name=name, plugin=record.name, distribution=record.distribution, version=record.version
                )
            )
    return offers


def _plugin_problems(manager: StrictPluginManager, offers: Sequence[Offer[Descriptor]], name: str) -> list[str]:
    counted = Counter(claim for offer in offers for claim in claims(offer.group, offer.spec))
    problems = [f"{claim} is registered {count} times" for claim, count in sorted(counted.items()) if count > 1]
    for group in GROUPS:
        problems += _create_problems(manager, group, [offer.name for offer in offers if offer.group is group], name)
    if not manager.get_hookcallers(manager.get_plugin(name)):
        problems.append("it implements no hook; mark functions with enginery.api.hookimpl")
    return problems


def _create_problems(manager: StrictPluginManager, group: HookGroup, offered: Sequence[str], name: str) -> list[str]:
    """What is wrong with a group whose descriptors a hook builds. offered: names of the plugin's descriptors."""
    create, shown = GROUPS[group].create, f"{GROUPS[group].register} offers {', '.join(offered)}"
    if create is None or not offered:
        return []
    problems = [] if manager.implements(name, create) else [f"{shown}, but there is no {create} to build it"]
    if group is HookGroup.SPARSE_COORDINATOR and len(offered) > 1:
        problems.append(f"{shown}, but {create} is not told which: one per plugin")
    return problems


def _claims(plugin: Plugin) -> list[str]:
    package = [] if plugin.module is None else [f"package {plugin.module.__name__}"]
    return package + [claim for offer in plugin.offers for claim in claims(offer.group, offer.spec)]


def _without_device(plugin: Plugin) -> Plugin:
    """Mark a plugin whose every offer is an attention backend for a device that is not here. Its offers stay, to give reasons."""
    wanted = [offer.spec.capabilities.devices if isinstance(offer.spec, AttnBackendSpec) else None for offer in plugin.offers]
    devices = frozenset[str]().union(*(names for names in wanted if names is not None))
    if not wanted or None in wanted or devices & present_devices():
        return plugin
    reason = f"the backends run on {', '.join(sorted(devices))}, this machine has {', '.join(sorted(present_devices()))}"
    return replace(plugin, record=replace(plugin.record, status=Status.NO_DEVICE, reason=reason))


def present_devices() -> frozenset[str]:
    """The kinds of device this process can see, as far as can be told without torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    has_cuda = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    return frozenset({"cpu", "cuda"}) if has_cuda and not hidden else frozenset({"cpu"})
