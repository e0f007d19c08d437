"""The hook groups as a table, and the check of a descriptor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Final, Protocol

from enginery.contracts.attention import AttnBackendSpec, Capabilities, SparseCoordinatorSpec
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.grammars import GrammarKind, GrammarSpec
from enginery.contracts.model import CheckpointSpec, ModelSpec
from enginery.contracts.ops import OpSpec, OpTable, PeerOpsSpec
from enginery.contracts.parallel import ExecutorSpec
from enginery.contracts.parsers import ParserSpec
from enginery.contracts.schedule import SchedulePolicySpec
from enginery.contracts.versions import CONTRACT_VERSIONS, ApiVersion, HookGroup
from enginery.contracts.weights import WeightFormatSpec
from enginery.plugin.near import did_you_mean
from enginery.plugin.options import options_problems, options_type

_DTYPES: Final = ("float32", "bfloat16", "float16")
_KNOWN: Final = {"devices": ("cpu", "cuda"), "dtypes": _DTYPES, "kv_dtypes": (*_DTYPES, "float8_e4m3fn")}
_TYPES: Final = {
    "priority": (int, "a whole number"),
    **dict.fromkeys(("prefill_priority", "single_priority"), (int | None, "a whole number")),
    **dict.fromkeys(("summary", "note"), (str, "text")),
    **dict.fromkeys(("schemes", "stacked_weights", "drafters"), (Mapping, "a mapping")),
    "folder": (Path, "a pathlib.Path"),
    "model": (ModelSpec | None, "a ModelSpec"),
    "peer_ops": (PeerOpsSpec | None, "a PeerOpsSpec"),
}
_FUNCTIONS: Final = ("Callable[", "ForceFn", "Launch", "RecordCalls")  # how the type of a field begins that is one
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Descriptor(Protocol):
    """What all descriptors have."""

    @property
    def name(self) -> str: ...
    @property
    def api(self) -> ApiVersion: ...


@dataclass(frozen=True, kw_only=True)
class Group:
    """Which hook registers a group's descriptors, of which type, and which hook builds one, where a hook does."""

    register: str
    descriptor: type[Descriptor]
    create: str | None = None


GROUPS: Final[Mapping[HookGroup, Group]] = {
    HookGroup.ATTN_BACKEND: Group(register="register_attn_backends", descriptor=AttnBackendSpec, create="create_attn_backend"),
    HookGroup.SPARSE_COORDINATOR: Group(
        register="register_sparse_coordinators", descriptor=SparseCoordinatorSpec, create="create_sparse_coordinator"
    ),
    HookGroup.MODEL: Group(register="register_models", descriptor=ModelSpec),
    HookGroup.CHECKPOINT: Group(register="register_checkpoints", descriptor=CheckpointSpec),
    HookGroup.OP: Group(register="register_ops", descriptor=OpSpec),
    HookGroup.WEIGHT_FORMAT: Group(register="register_weight_formats", descriptor=WeightFormatSpec),
    HookGroup.GRAMMAR: Group(register="register_grammars", descriptor=GrammarSpec),
    HookGroup.DRAFTER: Group(register="register_drafters", descriptor=DrafterSpec),
    HookGroup.SCHEDULE_POLICY: Group(register="register_schedule_policies", descriptor=SchedulePolicySpec),
    HookGroup.EXECUTOR: Group(register="register_executors", descriptor=ExecutorSpec),
    HookGroup.PARSER: Group(register="register_parsers", descriptor=ParserSpec),
}


def descriptor_problems(group: HookGroup, spec: object) -> list[str]:
    """What is wrong with one descriptor that a plugin registered in `group`, apart from its contract version."""
    wanted = GROUPS[group].descriptor
    if not isinstance(spec, wanted):
        return [f"{GROUPS[group].register} returned {spec!r}, which is no {wanted.__name__}"]
    problems = []
    if not (isinstance(spec.name, str) and NAME.fullmatch(spec.name)) or spec.name == "auto":
        problems.append("the name must be letters, digits, '.', '_' and '-', and not auto")
    if not (isinstance(spec.api, tuple) and [*map(type, spec.api)] == [int, int] and min(spec.api) >= 0):
        problems.append(f"api is {spec.api!r}, but must be two numbers, for instance {CONTRACT_VERSIONS[group]}")
    problems += _type_problems(spec)
    if (options := options_type(spec)) is not None:
        problems += options_problems(options)
    problems += _own_problems(spec)
    return [f"{wanted.__name__} {spec.name!r}: {problem}" for problem in problems]


def _own_problems(spec: Descriptor) -> list[str]:
    match spec:
        case AttnBackendSpec():
            return _capability_problems(spec.capabilities)
        case ModelSpec():
            return _names_problems("architectures", spec.architectures) + _ignored_problems(spec.ignored_weights)
        case WeightFormatSpec():
            return _names_problems("methods", spec.methods)
        case GrammarSpec() if not (isinstance(spec.kinds, frozenset) and spec.kinds <= set(GrammarKind)):
            return [f"kinds is {spec.kinds!r}, but must be a frozenset of {', '.join(GrammarKind)}"]
        case ParserSpec() if spec.kind not in ("tools", "reasoning") or spec.name == "none":
            return [f"kind is {spec.kind!r}, but must be tools or reasoning, and none is no name for a parser"]
        case OpSpec():
            return _operation_problems(spec.provides)
        case DrafterSpec():
            return _draft_problems(spec)
    return []


def _names_problems(field: str, names: object) -> list[str]:
    is_tuple = isinstance(names, tuple | list) and len(names) > 0 and all(isinstance(name, str) for name in names)
    return [] if is_tuple else [f"{field} is {names!r}, but must be a tuple of at least one name"]


def _ignored_problems(ignored: object) -> list[str]:
    """A text alone would be as many patterns as it has letters."""
    is_right = callable(ignored) or ignored in ((), []) or not _names_problems("ignored_weights", ignored)
    return [] if is_right else [f"ignored_weights is {ignored!r}, but must be a tuple of patterns, or a function that gives them"]


def _draft_problems(spec: DrafterSpec) -> list[str]:
    problems = ["off is no name for a drafter"] if spec.name == "off" else []
    if isinstance(spec.most, bool) or not isinstance(spec.most, int) or spec.most < 1:
        problems.append(f"most is {spec.most!r}, but must be a whole number from 1 on")
    return problems + [f"model.{problem}" for problem in (_own_problems(spec.model) if isinstance(spec.model, ModelSpec) else ())]


def _operation_problems(provided: Iterable[str]) -> list[str]:
    known = {field.name for field in fields(OpTable)}
    return _names_problems("provides", provided) or [
        f"it provides {op!r}, which is no operation{did_you_mean(op, known)}" for op in set(provided) - known
    ]


def version_refusal(group: HookGroup, spec: Descriptor) -> str:
    """Why a descriptor's contract version does not fit this core; empty if it does: same major, minor not above the core's."""
    core, (major, minor) = CONTRACT_VERSIONS[group], spec.api
    if major == core[0] and minor <= core[1]:
        return ""
    advice = "update enginery" if (major, minor) > core else "update the plugin"
    return f"{spec.name} is written for {group} contract {major}.{minor}, this core has {core[0]}.{core[1]}; {advice}"


def claims(group: HookGroup, spec: Descriptor) -> list[str]:
    """The names that a descriptor takes for itself: nobody else may have the same. Where a name is shared, so are usual options."""
    taken, shares = [f"{group} {spec.name}"], False
    if isinstance(spec, DrafterSpec) and spec.suits is not None and spec.model is not None:
        taken = [f"{group} {spec.name} of {architecture}" for architecture in spec.model.architectures]
        shares = spec.options is None
    if options_type(spec) is not None and not shares:
        taken.append(f"options {spec.name}")
    return taken


def _type_problems(spec: object) -> list[str]:
    """What is wrong with fields that have the same type in all descriptors, and in what these hold."""
    assert is_dataclass(spec), "every descriptor is"
    problems = []
    for field in fields(spec):
        value = vars(spec)[field.name]
        kinds, what = _TYPES.get(field.name, (object, ""))
        if field.name in _TYPES and (isinstance(value, bool) or not isinstance(value, kinds)):
            problems.append(f"{field.name} is {value!r}, but must be {what}")
        if str(field.type).startswith(_FUNCTIONS) and not (callable(value) or value is field.default is None):
            problems.append(f"{field.name} is {value!r}, but must be a function: {field.type}")
        problems += _problems_within(field.name, value)
    return problems


def _problems_within(name: str, value: object) -> list[str]:
    return [f"{name}.{problem}" for problem in _type_problems(value)] if isinstance(value, ModelSpec | PeerOpsSpec) else []


def _capability_problems(capabilities: object) -> list[str]:
    if not isinstance(capabilities, Capabilities):
        return [f"capabilities is {capabilities!r}, which is no Capabilities"]
    sets = ("devices", "dtypes", "kv_dtypes", "phases", "head_dims", "page_sizes")
    values = {name: vars(capabilities)[name] for name in sets}
    kinds = {**dict.fromkeys(sets, frozenset | None), **dict.fromkeys(_KNOWN, frozenset)}
    wrong = {name: value for name, value in values.items() if not isinstance(value, kinds[name])}
    problems = [f"capabilities.{name} is {value!r}, but must be a frozenset" for name, value in wrong.items()]
    return problems or [
        f"capabilities.{name} is {sorted(map(str, values[name]))}, of which the engine knows none; it knows {', '.join(known)}"
        for name, known in _KNOWN.items()
        if values[name].isdisjoint(known)
    ]
