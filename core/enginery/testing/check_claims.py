"""Rules about what a backend says of itself, and about the object that it is."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from typing import Final, Literal, get_args, get_origin, get_type_hints

import msgspec
import torch

from enginery.contracts.attention import Reason
from enginery.contracts.batch import Phase
from enginery.errors import Unsupported
from enginery.kv.pool import TORCH_DTYPES
from enginery.plugin.selection import refusals as refusals_of
from enginery.plugin.selection import select
from enginery.testing.cases import AttnCase, Kind, Row, unclaimed
from enginery.testing.rules import BrokenRule, compare, raising, rule
from enginery.testing.subject import ChildTask, Subject, first_case, leaf_cases, the_whole
from enginery.testing.workbench import Workbench


@rule(leaf_cases, "Mark each hook with @hookimpl and take only arguments of its specification, by their names.")
def hooks(subject: Subject, case: AttnCase) -> None:
    """A backend implements attend, advance and the hooks that it claims, with the arguments that they have."""
    bench, can = Workbench(subject, case), subject.can  # with a relay, which checks the id and the arguments
    for name, claims, hook in (
        ("mla_ragged", can.mla_ragged, "init_mha_chunk_metadata"),
        ("graphs", can.graphs, "init_graph_state"),
        ("sparse", can.sparse, "indexer_metadata"),
        ("trees", can.trees, "verify_mask"),
        ("phase verify of recurrences", bool(can.recurrences) and Phase.VERIFY in can.phases, "commit_state"),
    ):
        if claims != bench.leaf.has(hook):
            raise BrokenRule(f"capabilities say {name}={claims}, and the backend has {'no ' if claims else ''}{hook}")
    for claimed, method in ((can.causal or can.mla, "attend"), (bool(can.recurrences), "advance")):
        if claimed and method not in bench.leaf.methods:
            raise BrokenRule(f"capabilities claim layers that are given to {method}, and the backend has none")


@rule(the_whole, "Narrow the capabilities to what is served; refuse_also is for what they cannot express.")
def claims(subject: Subject, case: None) -> str | None:
    """What capabilities claim is not refused."""
    problems = [] if subject.covering else ["it refuses everything that it claims, so nothing could be tried"]
    for kind, served in subject.served:
        reasons = {reason.text for _, case in kind.rows() for reason in refusals_of(subject.offer, subject.needs(case))}
        for factor, missing in _never_served(kind, served):
            problems.append(f"{kind.name}: {factor} {', '.join(missing)} is always refused ({'; '.join(sorted(reasons)[:3])})")
    if problems:
        raise BrokenRule("; ".join(problems))
    unknown = sorted((subject.can.dtypes | subject.can.kv_dtypes) - TORCH_DTYPES.keys())
    return f"not tried: {', '.join(unknown)}, of which the core has no pools" if unknown else None


def _never_served(kind: Kind, served: Collection[Row]) -> Iterator[tuple[str, list[str]]]:
    """Each factor with values that no served row has, and these values. No capability says how many heads there may be."""
    for index, (factor, values) in enumerate(kind.factors.items()):
        seen = {row[index] for row in served}
        if factor != "heads" and (missing := [str(value) for value in values if value not in seen]):
            yield factor, missing


@rule(first_case, "Leave refuse as AttnBackendSpec has it, and give further reasons through refuse_also.")
def refusals(subject: Subject, case: AttnCase) -> None:
    """What capabilities do not claim is refused, with a reason, and choosing the backend for it by name raises Unsupported."""
    offer, wrong = subject.offer, []
    for what, needs in unclaimed(subject.can, subject.needs(case)):
        reasons = offer.spec.refuse(needs)
        if not reasons or not all(isinstance(reason, Reason) and reason.rule and reason.text for reason in reasons):
            wrong.append(f"{what} (refuse answers {reasons!r})")
        elif did := raising(functools.partial(select, offer.name, needs, (offer,), ()), Unsupported):
            wrong.append(f"{what} (choosing it by name {did})")
    if wrong:
        raise BrokenRule(f"not refused, though not claimed: {', '.join(wrong)}")


class _Coordinator:
    coordinator_id = "kit-coordinator#0"


@rule(leaf_cases, "Set every attribute in __init__, to None where a configuration does not need it.")
def same_attributes(subject: Subject, case: AttnCase) -> None:
    """A backend has the same attributes under every configuration, from its constructor on."""
    usual = Workbench(subject, case)
    wanted = _attributes(usual.backend)
    others = [(str(other), Workbench(subject, other, num_tokens=16)) for other in subject.covering]
    others.append(("with a sparse coordinator", Workbench(subject, case, coordinator=_Coordinator())))
    others += [(f"with {options}", Workbench(subject, case, options=options)) for options in _variants(subject.options)]
    for what, bench in others:
        if differing := wanted ^ _attributes(bench.backend):
            raise BrokenRule(f"{', '.join(sorted(differing))} exists for {case} or {what}, but not for both")
    for phase, turns in usual.steps():
        usual.run(turns, phase)
    if differing := wanted ^ _attributes(usual.backend):
        raise BrokenRule(f"{', '.join(sorted(differing))} comes or goes when a batch is planned and attended")


def _attributes(backend: object) -> set[str]:
    """The names in its dictionary and its slots."""
    state = object.__getstate__(backend)
    return {name for part in (state if isinstance(state, tuple) else (state,)) if part for name in part}


def _variants(options: object | None) -> Iterator[object]:
    """The options with one switch flipped, or with another of the choices that a field lists."""
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        return
    for name, hint in get_type_hints(type(options)).items():
        choices = (True, False) if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()
        yield from (dataclasses.replace(options, **{name: choice}) for choice in choices if vars(options)[name] != choice)


@rule(first_case, "Register and build in the plugin's hooks; rely on nothing that the parent process did.")
def another_process(subject: Subject, case: AttnCase) -> None:
    """A new process builds the backend from the manifest, and it gives the same results."""
    asked = ChildTask(origin=subject.origin, device=str(subject.device), path=sys.path)
    command = [sys.executable, "-m", "enginery.testing.child"]
    done = subprocess.run(
        command, input=msgspec.json.encode(asked).decode(), capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise BrokenRule(f"a new process ends with status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    there = [torch.tensor(rows) for rows in json.loads(done.stdout.splitlines()[-1])]
    compare(there, run_claimed(subject, case), dtype=case.dtype, leeway=case.leeway, what="in a new process")


def run_claimed(subject: Subject, case: AttnCase) -> list[torch.Tensor]:
    """The results of a batch of each claimed phase."""
    bench = Workbench(subject, case)
    return [rows for phase, turns in bench.steps() for rows in bench.run(turns, phase)]


CLAIMS: Final = (claims, refusals, same_attributes, another_process)
