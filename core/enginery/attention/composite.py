"""A backend made of backends: each batch is cut into parts, each part is planned and attended by one child.

    batch     [ request 0 | request 1 | request 2 | request 3 ]        phase split of a mixed batch:
    parts     [ 0: decode child       | 1: prefill child      ]        each with a batch and a plan of its own

The parts, with the children's plans, are the composite's plan. Composites nest, because they are backends.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from enginery.attention.policies import Policy, derived_from_specs
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import ForwardBatch, Phase, with_fields
from enginery.contracts.latent import ChunkPlan
from enginery.contracts.plan import Accepted, ForwardPlan, IndexerPlan, PlanKey, VerifyMask, covering_plan
from enginery.errors import StalePlan, Unsupported
from enginery.plugin.hookspecs import hookimpl


@dataclass(frozen=True, kw_only=True, eq=False, init=False)
class Part:
    """What one child does of a batch.

    rows, requests: of the whole batch, those of `batch`; None for all of them. plan: the child's; None before planning, and where
    what the child planned is no plan for its `attend`.
    """

    child: int
    rows: slice | None
    batch: ForwardBatch
    requests: slice | None = None
    plan: ForwardPlan | None = None

    def __init__(self, *, child: int, rows: slice | None, batch: ForwardBatch, requests: slice | None = None) -> None:
        """Unplanned. A step has a dozen parts, so the fields are set at once."""
        vars(self).update(child=child, rows=rows, batch=batch, requests=requests, plan=None)

    @property
    def has_trees(self) -> bool:
        """Whether it is planned, and drafts of its requests branch."""
        return self.plan is not None and self.batch.trees and self.batch.num_decode_requests > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class CompositePlan(ForwardPlan):
    """The parts of a batch, each with the plan of the child that attends it."""

    parts: tuple[Part, ...]


@derived_from_specs
class Composite(ABC):
    """Cuts batches and calls its children. Implements `AttnBackend`, `Attends` and `Advances` of `enginery.api`."""

    kind: ClassVar[str]

    def __init__(self, *children: BackendRelay) -> None:
        self.children = children
        self.backend_id = f"{self.kind}({', '.join(child.backend_id for child in children)})"

    @abstractmethod
    def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterable[Part]:
        """The parts of a batch, unplanned. capture: of one that is captured, or replayed."""

    def serving_layer(self, layer: LayerSpec) -> Sequence[int]:
        """The children that have a part in `layer`."""
        return range(len(self.children))

    def serving_phase(self, phase: Phase) -> Sequence[int]:
        """The children that are given requests in `phase`."""
        return range(len(self.children))

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> ForwardPlan:
        parts = [self.plan_part(part, capture=capture) for part in self.cut(batch, capture=capture)]
        return CompositePlan(key=PlanKey.of(batch, self.backend_id, capture=capture), parts=tuple(parts))

    def plan_part(self, part: Part, *, capture: bool) -> Part:
        return with_fields(part, plan=self.children[part.child].make_plan(part.batch, capture=capture))

    @hookimpl
    def draft_steps_plan(self, batches: tuple[ForwardBatch, ...], capture: bool) -> tuple[ForwardPlan, ...] | None:
        """Cut every batch; what each child does of them, it plans together. None: a child can plan the first step only."""
        cuts = [tuple(self.cut(batch, capture=capture)) for batch in batches]
        planned: list[list[Part]] = [[] for _ in batches]
        for parts in zip(*cuts, strict=True):
            (child,) = {part.child for part in parts}
            plans = self.children[child].make_step_plans([part.batch for part in parts], capture=capture)
            if len(plans) < len(parts):
                return None
            for into, part, plan in zip(planned, parts, plans, strict=True):
                into.append(with_fields(part, plan=plan))
        return tuple(
            CompositePlan(key=PlanKey.of(batch, self.backend_id, capture=capture), parts=tuple(parts))
            for batch, parts in zip(batches, planned, strict=True)
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: Tensor
    ) -> None:
        """Attend part by part, each with the plan of the child that has it."""
        for part, of_part in self._parts_of(layer, batch, plan):
            child, rows = self.children[part.child], part.rows
            if rows is None:
                child.needs_none(child.attend(q, k, v, layer, part.batch, of_part, out))
            else:
                child.needs_none(child.attend(q[rows], k[rows], v[rows], layer, part.batch, of_part, out[rows]))

    def advance(self, mixed: Tensor, gates: Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: Tensor) -> None:
        """Advance part by part, each with the plan of the child that has it."""
        for part, of_part in self._parts_of(layer, batch, plan):
            child, rows = self.children[part.child], part.rows
            if rows is None:
                child.needs_none(child.advance(mixed, gates, layer, part.batch, of_part, out))
            else:
                child.needs_none(child.advance(mixed[rows], gates[rows], layer, part.batch, of_part, out[rows]))

    def _parts_of(self, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan) -> list[tuple[Part, ForwardPlan]]:
        """What is done for a layer, with plans. Raises `Unsupported` if that is nothing: `out` would stay as it was."""
        parts = covering_plan(plan, batch, CompositePlan, backend=self.backend_id).parts
        serving = self.serving_layer(layer)
        found = [(part, part.plan) for part in parts if part.child in serving and part.plan is not None]
        if not found and batch.num_requests:
            raise Unsupported(f"no part of {self.backend_id} serves layer {layer.global_id}, of kind {layer.kind}")
        return found

    def has(self, hook: str) -> bool:
        """Whether it has the hook of its own, or all of its children have it."""
        is_derived = inspect.getattr_static(type(self), hook) is vars(Composite)[hook]
        return not is_derived or all(child.has(hook) for child in self.children)

    def dispatch(self, policy: Policy, hook: str, arguments: Mapping[str, object]) -> object:
        """The answer of the children to `hook`, as the policy says; None if they have none."""
        if policy is Policy.EACH_PART:
            return True if any(answer is not None for _, answer in self.ask_parts(hook, arguments)) else None
        if policy is Policy.ALL_OF:
            answers = [child.ask(hook, **arguments) for child in self.children]
            return True if all(answer is not None for answer in answers) else None
        if policy is Policy.BY_PHASE:
            return self._by_phase(hook, arguments)
        return _joined(self.ask_parts(hook, arguments, trees=policy is Policy.OF_TREES))

    def _by_phase(self, hook: str, arguments: Mapping[str, object]) -> object:
        batch = arguments["batch"]
        assert isinstance(batch, ForwardBatch), f"{hook} is asked with {batch!r:.100} as its batch"
        asked = (self.children[child].ask(hook, **arguments) for child in self.serving_phase(batch.phase))
        answer: object = next((found for found in asked if found is not None), None)
        if isinstance(answer, ChunkPlan):
            return dataclasses.replace(answer, key=answer.key._replace(backend=self.backend_id))
        return answer

    def ask_parts(self, hook: str, arguments: Mapping[str, object], *, trees: bool = False) -> list[tuple[Part, object]]:
        """What the child of each planned part answers, given its plan, its batch, and what of its requests was accepted.

        trees: of parts with trees of drafts alone.
        """
        plan = arguments["plan"]
        assert isinstance(plan, CompositePlan), f"{hook} is asked with {plan!r:.100}"
        if plan.key.backend != self.backend_id:
            raise StalePlan(f"{hook} of {self.backend_id} is asked with a plan made for {plan.key}")
        batch = arguments.get("batch")
        replayed = isinstance(batch, ForwardBatch) and batch.identity != plan.key.batch
        cuts = self.cut(batch, capture=plan.key.capture) if isinstance(batch, ForwardBatch) and replayed else plan.parts
        answers = []
        for part, cut in zip(plan.parts, cuts, strict=True):
            if part.has_trees if trees else part.plan is not None:
                asked = {name: _of_part(value, part, cut) for name, value in arguments.items()}
                answers.append((part, self.children[part.child].ask(hook, **asked)))
        return answers


def _of_part(value: object, part: Part, cut: Part) -> object:
    if isinstance(value, ForwardPlan):
        return part.plan
    if isinstance(value, ForwardBatch):
        return cut.batch
    if isinstance(value, Accepted) and part.requests is not None:
        return Accepted(counts=value.counts[part.requests])
    return value


def _joined(answers: Sequence[tuple[Part, object]]) -> VerifyMask | IndexerPlan | None:
    """Of parts that share their rows, all masks, or the one that answers; of all others, what they answer, one after the other."""
    by_rows: dict[int, VerifyMask | IndexerPlan | None] = {}
    for part, answer in answers:
        first, moved = 0 if part.rows is None else part.rows.start, _moved(answer, part)
        known = by_rows.get(first)
        by_rows[first] = _together(known, moved) if isinstance(known, VerifyMask) and moved else known or moved
    return functools.reduce(_together, by_rows.values()) if by_rows else None


def _together(first: VerifyMask | IndexerPlan | None, second: VerifyMask | IndexerPlan | None) -> VerifyMask | IndexerPlan | None:
    if isinstance(first, VerifyMask) and isinstance(second, VerifyMask):
        return VerifyMask(parts=(*first.parts, *second.parts))
    if isinstance(first, IndexerPlan) and isinstance(second, IndexerPlan):
        return IndexerPlan(parts=(*first.parts, *second.parts))
    return None


def _moved(answer: object, part: Part) -> VerifyMask | IndexerPlan | None:
    """An answer about a part, with the places of its rows and requests in the whole batch."""
    if isinstance(answer, VerifyMask):
        by = 0 if part.requests is None else part.requests.start
        return VerifyMask(parts=tuple(mask._replace(requests=_later(mask.requests, by)) for mask in answer.parts))
    if isinstance(answer, IndexerPlan):
        by = 0 if part.rows is None else part.rows.start
        return IndexerPlan(parts=tuple(rows._replace(rows=_later(rows.rows, by)) for rows in answer.parts))
    return None


def _later(places: slice, by: int) -> slice:
    return slice(places.start + by, places.stop + by)
