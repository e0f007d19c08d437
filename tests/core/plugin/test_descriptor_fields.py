"""Fields of descriptors that cannot be used, of every kind: the plugin is broken when it is loaded, not when it is needed."""

from __future__ import annotations

import collections.abc
import dataclasses
import typing
from pathlib import Path

import pytest
from core.plugin.loaded import load, record_of

from enginery import api
from enginery.api import (
    AttnBackendSpec,
    Capabilities,
    CheckpointSpec,
    DrafterSpec,
    ExecutorSpec,
    GrammarKind,
    GrammarSpec,
    ModelSpec,
    OpSpec,
    ParserSpec,
    PeerOpsSpec,
    SchedulePolicySpec,
    SparseCoordinatorSpec,
    WeightFormatSpec,
)
from enginery.contracts.ops import RecordCalls
from enginery.contracts.versions import CONTRACT_VERSIONS, HookGroup
from enginery.plugin.checker import alternatives
from enginery.plugin.groups import GROUPS, descriptor_problems
from enginery.plugin.records import Status


def call(*_: object) -> list[object]:
    return []


SOME = frozenset({"float32"})
CAN = Capabilities(devices=frozenset({"cpu"}), dtypes=SOME, kv_dtypes=SOME)
MODEL = ModelSpec(name="x", api=(2, 0), architectures=("X",), describe=call, build=call)
PEERS = PeerOpsSpec(num_bytes=1, bind=call)
USUAL = {"name": "x", "api": (2, 0)}
SPECS = {
    HookGroup.ATTN_BACKEND: AttnBackendSpec(**USUAL, priority=1, capabilities=CAN, summary=""),
    HookGroup.SPARSE_COORDINATOR: SparseCoordinatorSpec(**USUAL, summary=""),
    HookGroup.MODEL: MODEL,
    HookGroup.CHECKPOINT: CheckpointSpec(**USUAL, priority=1, folder=Path(), note=""),
    HookGroup.OP: OpSpec(**USUAL, priority=1, provides=("greedy",), refuse=call, load=call, peer_ops=PEERS),
    HookGroup.WEIGHT_FORMAT: WeightFormatSpec(**USUAL, priority=1, summary="", methods=("x",), reads=call, refuse=call, load=call),
    HookGroup.GRAMMAR: GrammarSpec(**USUAL, priority=1, summary="", kinds=frozenset(GrammarKind), refuse=call, load=call),
    HookGroup.DRAFTER: DrafterSpec(**USUAL, summary="", most=1, build=call),
    HookGroup.SCHEDULE_POLICY: SchedulePolicySpec(**USUAL, key=call, summary=""),
    HookGroup.EXECUTOR: ExecutorSpec(**USUAL, launch=call, summary=""),
    HookGroup.PARSER: ParserSpec(**USUAL, kind="tools", summary="", suits=call, make=call),
}


def functions_of(descriptor: type) -> list[tuple[str, bool]]:
    """Its fields that are functions, by what their types are, and whether each may be None."""
    found = []
    for name, hint in typing.get_type_hints(descriptor, localns={**vars(api), "RecordCalls": RecordCalls}).items():
        kinds = alternatives(hint)
        if typing.get_origin(kinds[0]) is collections.abc.Callable:
            found.append((name, type(None) in kinds))
    return found


FUNCTIONS = [(group, *each) for group in SPECS for each in functions_of(GROUPS[group].descriptor)]


def test_there_is_a_descriptor_of_each_kind_and_each_can_be_used() -> None:
    assert SPECS.keys() == GROUPS.keys() == CONTRACT_VERSIONS.keys()
    assert {group: problems for group, spec in SPECS.items() if (problems := descriptor_problems(group, spec))} == {}
    assert len(FUNCTIONS) > 25


@pytest.mark.parametrize(("group", "field", "may_be_none"), FUNCTIONS)
def test_a_field_that_must_be_a_function_and_is_none_is_said_so(group: HookGroup, field: str, may_be_none: bool) -> None:
    """`build` of a drafter besides, without which its descriptor is not even made."""
    spec = SPECS[group]
    for value in ("a text", None):
        if (group, field, value) == (HookGroup.DRAFTER, "build", None):
            continue
        problems = descriptor_problems(group, dataclasses.replace(spec, **{field: value}))
        if value is None and may_be_none:
            assert problems == []
        else:
            (problem,) = problems
            assert f"{type(spec).__name__} 'x': {field} is {value!r}, but must be a function: " in problem


@pytest.mark.parametrize(
    ("group", "changes", "said"),
    [
        (HookGroup.DRAFTER, {"build": None, "model": dataclasses.replace(MODEL, describe=None)}, "model.describe is None"),
        (HookGroup.DRAFTER, {"build": None, "model": dataclasses.replace(MODEL, architectures="X")}, "model.architectures is 'X'"),
        (HookGroup.DRAFTER, {"build": None, "model": call}, "must be a ModelSpec"),
        (HookGroup.OP, {"peer_ops": PeerOpsSpec(num_bytes=1, bind=None)}, "peer_ops.bind is None, but must be a function"),
        (HookGroup.OP, {"peer_ops": call}, "must be a PeerOpsSpec"),
        (HookGroup.OP, {"schemes": ("fp8",)}, "schemes is ('fp8',), but must be a mapping"),
        (HookGroup.MODEL, {"ignored_weights": "lm_head.*"}, "ignored_weights is 'lm_head.*', but must be a tuple of patterns"),
        (HookGroup.MODEL, {"ignored_weights": None}, "ignored_weights is None"),
        (HookGroup.MODEL, {"stacked_weights": None}, "stacked_weights is None, but must be a mapping"),
        (HookGroup.CHECKPOINT, {"folder": "weights"}, "folder is 'weights', but must be a pathlib.Path"),
    ],
)
def test_what_descriptors_hold_is_looked_at_too(group: HookGroup, changes: dict[str, object], said: str) -> None:
    (problem,) = descriptor_problems(group, dataclasses.replace(SPECS[group], **changes))
    assert said in problem


def test_a_plugin_without_a_function_that_it_needs_is_broken_and_the_command_line_says_why(site) -> None:
    site.install(
        "few",
        "from enginery.api import ModelSpec, hookimpl\n@hookimpl\ndef register_models():\n"
        "    return [ModelSpec(name='few', api=(2, 0), architectures=('Few',), describe=None, build=print)]\n",
    )
    record = record_of(load(), "few")
    assert record.status is Status.BROKEN
    assert "it registers what cannot be used:\n  - ModelSpec 'few': describe is None, but must be a function" in record.reason
