"""Ranks of a model as threads of one process: their parts of the weights, and collectives over barriers.

    thread 0   stage 0 ── arrived ──> stage 1      each thread is one rank of a stage, and runs the stages one after the other
    thread 1   stage 0 ── arrived ──> stage 1      sums over ranks are taken in rank order, so all ranks have the same bits

Attention is the formula of `testing.reference`, over one sequence at once: what is compared is the model, not a backend.
T tokens, H query heads, K KV heads, D head dim, V value dim.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from enginery.contracts.attention import KVGeometry, LayerSpec
from enginery.contracts.batch import FULL, ForwardBatch, Named
from enginery.contracts.model import Model, ModelContext, ModelFacts, ModelSpec
from enginery.contracts.ops import OpTable
from enginery.contracts.parallel import ParallelFacts, StageTensors
from enginery.contracts.weights import Linear
from enginery.kv.pool import TORCH_DTYPES, PagedKVPool
from enginery.nn.reference_ops import reference_ops
from enginery.testing import reference
from enginery.testing.kits.weights import WholeTensors, weights_of
from enginery.testing.rules import BrokenRule
from enginery.worker.token_feed import NamedTensors
from enginery.worker.weights.rank import BoundLinear
from enginery.worker.weights.shares import stage_of

AnyT = TypeVar("AnyT")


class Meeting:
    """Where the threads of a group exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=50)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: AnyT) -> list[AnyT]:
        """The values of all ranks, by rank."""
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        """Nobody waits any more: those that do raise `BrokenBarrierError`."""
        self._barrier.abort()


@dataclass(frozen=True, eq=False)
class ThreadCollectives:
    """Implements `enginery.contracts.parallel.Collectives` for ranks of one stage that are threads.

    place: this rank's. lane: where tensor ranks of its lane meet. everyone: where all do. sent: what left early last, and a copy.
    """

    place: ParallelFacts
    lane: Meeting
    everyone: Meeting
    ops: OpTable
    vocab_size: int
    sent: list[torch.Tensor] = field(default_factory=list)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """In rank order and at least float32, rounded once."""
        return _sum(self.lane.exchange(self.place.tensor_rank, partial))

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Of each lane's first rank."""
        return x if self.place.num_lanes == 1 else torch.cat(self._exchange(x)[:: self.place.tensor_size])

    def own_rows_sum(self, partial: torch.Tensor) -> torch.Tensor:
        """[L N, C] of L lanes -> [N, C]."""
        return _sum(self._exchange(partial)).chunk(self.place.num_lanes)[self.place.lane]

    def add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, of_all_lanes: bool = False
    ) -> torch.Tensor:
        """The sum, then the operation. Raises `BrokenRule` if what was sent on early is not what is to be summed."""
        if self.sent and self.sent[0] is partial and not torch.allclose(partial, self.sent[1], rtol=0, atol=0, equal_nan=True):
            raise BrokenRule("the result of a product that is summed early was changed before it was summed")
        total = self.own_rows_sum(partial) if of_all_lanes else self.sum(partial)
        return self.ops.add_rms_norm(total, residual, weight, eps)

    def summed_early(self, linear: Linear) -> Linear:
        def sent(x: torch.Tensor) -> torch.Tensor:
            self.sent[:] = [out := linear(x), out.clone()]
            return out

        return BoundLinear(sent, linear.rows)

    def gather_columns(self, partial: torch.Tensor) -> torch.Tensor:
        """[N, V], without what only pads."""
        return torch.cat(self._exchange(partial), dim=-1)[:, : self.vocab_size]

    def best(self, partial: torch.Tensor) -> torch.Tensor:
        """By each rank's largest, of equal ones the first rank's."""
        first = self.place.over_lanes().tensor_rank * partial.shape[-1]
        own = partial[:, : max(self.vocab_size - first, 0)]
        empty = torch.full((len(partial), 1), -torch.inf, dtype=partial.dtype)
        values, ids = (own if own.shape[1] else empty).max(dim=-1)
        found = self._exchange((values, ids + first))
        winner = torch.stack([values for values, _ in found]).max(dim=0).indices
        return torch.stack([ids for _, ids in found])[winner, torch.arange(len(winner))]

    def _exchange(self, value: AnyT) -> list[AnyT]:
        return self.everyone.exchange(self.place.over_lanes().tensor_rank, value)


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return functools.reduce(torch.add, (part.to(wide) for part in parts)).to(parts[0].dtype)


@dataclass(frozen=True, eq=False)
class WholeSequence:
    """What a model reads of a batch of one sequence. logits_rows: [N] int64, None for all. Named inputs are zeros."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logits_rows: torch.Tensor | None
    inputs: Mapping[str, Named] = field(default_factory=dict)
    outputs: Mapping[str, Named] = field(default_factory=dict)
    num_requests: ClassVar[int] = 1

    @property
    def num_tokens(self) -> int:
        """How many rows all sequences have together: T."""
        return len(self.input_ids)

    def slots_for(self, layer: LayerSpec) -> torch.Tensor:
        """[T], for every layer the same."""
        return self.slots


@dataclass(frozen=True, kw_only=True, eq=False)
class RankAnswer:
    """Of one rank: hidden states of its lane on the last stage, logits of all columns, and the best tokens."""

    hidden: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RankThreads:
    """A model of a family on so many ranks. tensors: the whole model; their dtype is that of weights and activations.

    cuts_experts: see `ParallelFacts`.
    """

    family: ModelSpec
    config: Mapping[str, Any]
    tensors: WholeTensors
    tensor_size: int = 1
    num_stages: int = 1
    cuts_experts: bool = False

    def run(
        self, ids: Sequence[int], logits_rows: Sequence[int] | None = None, *, beside: Sequence[Sequence[int]] = ()
    ) -> list[RankAnswer]:
        """One forward pass over the sequence `ids`, by rank. beside: what other lanes run at once, as many tokens each.

        Raises what a rank raised, first of all `Unsupported` for sizes that the ranks cannot share.
        """
        facts, lanes = self.family.describe(self.config), [ids, *beside]
        mesh = ParallelFacts(tensor_size=self.tensor_size, num_lanes=len(lanes), cuts_experts=self.cuts_experts)
        meetings, everyone = [Meeting(self.tensor_size) for _ in lanes], Meeting(mesh.num_ranks)
        rows, places = None if logits_rows is None else torch.tensor(logits_rows), torch.arange(len(ids))

        def work(rank: int) -> RankAnswer:
            place = mesh.of_rank(rank)
            batch = WholeSequence(torch.tensor(lanes[place.lane]), places, places, rows)
            comm = ThreadCollectives(place, meetings[place.lane], everyone, reference_ops(), facts.vocab_size)
            with torch.inference_mode():  # it is off in new threads
                try:
                    return self._run_rank(facts, batch, comm)
                except BaseException:
                    for meeting in (*meetings, everyone):
                        meeting.abort()
                    raise

        with ThreadPoolExecutor(mesh.num_ranks, thread_name_prefix="rank") as pool:
            return _answers([pool.submit(work, rank) for rank in range(mesh.num_ranks)])

    def _run_rank(self, facts: ModelFacts, batch: Any, comm: ThreadCollectives) -> RankAnswer:
        arrived: StageTensors | None = None
        device = batch.input_ids.device
        named = NamedTensors(facts.inputs, facts.outputs, max_tokens=batch.num_tokens, max_requests=1, device=device)
        batch = named.placed(named.with_inputs(batch))
        for stage in range(self.num_stages):
            parallel = dataclasses.replace(comm.place, stage=stage, num_stages=self.num_stages)
            model = self._build(facts, parallel, comm, num_slots=len(batch.slots))
            passed = model.forward(batch, arrived)
            if not isinstance(passed, torch.Tensor):
                assert set(passed) == {channel.name for channel in facts.boundary}
                arrived = passed
                continue
            partial = model.logits(comm.all_rows(passed))
            found = comm.gather_columns(partial), comm.best(partial)
            logits, best = (each.chunk(comm.place.num_lanes)[comm.place.lane] for each in found)
            return RankAnswer(hidden=passed, logits=logits, best=best)
        raise AssertionError("the last stage returned what would cross to the next")

    def _build(self, facts: ModelFacts, parallel: ParallelFacts, comm: ThreadCollectives, *, num_slots: int) -> Model:
        stage, dtype = stage_of(facts, parallel), self.tensors.dtype
        kv_dtype = next((name for name, known in TORCH_DTYPES.items() if known is dtype), "float32")
        geometry = KVGeometry(pages={FULL: 1}, page_size=num_slots, layers=stage.memory, dtype=kv_dtype)
        context = ModelContext(
            config=self.config,
            facts=facts,
            weights=weights_of(self.tensors, ops=comm.ops, comm=comm, parallel=parallel),
            ops=comm.ops,
            attend=attend_by_definition,
            advance=advance_by_definition,
            pool=PagedKVPool(geometry, torch.device("cpu")),
            device=torch.device("cpu"),
            dtype=dtype,
            max_positions=num_slots,
            stage=stage,
            comm=comm,
        )
        return self.family.build(context)


def _answers(futures: Sequence[Future[RankAnswer]]) -> list[RankAnswer]:
    """A rank that only waited for another raises `BrokenBarrierError`; the other's reason comes first."""
    failures = [failure for future in futures if (failure := future.exception()) is not None]
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    return [future.result() for future in futures]


def attend_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor
) -> None:
    """q [T, H, D], k [T, K, D], v [T, K, V], out [T, H, V] of a whole sequence."""
    if layer.latent is not None and layer.facts.latent is not None:
        k, v = reference.expand_latents(k, layer.latent.kv_b, layer.facts.latent)
    out.copy_(reference.attention(q, k, v, facts=layer.facts, scale=layer.scale, sinks=layer.sinks)[0])


def advance_by_definition(
    mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor
) -> None:
    """mixed [T, C], gates [T, G], out [T, HV, V] of a whole sequence, from a state of zeros."""
    facts, weights = layer.facts.recurrent, layer.recurrent
    assert facts is not None
    assert weights is not None
    out.copy_(reference.recurrence(mixed, gates, facts=facts, weights=weights, scale=layer.scale)[0])
