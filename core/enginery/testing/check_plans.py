"""Rules about planning: plans are values of one batch, made on the host, and nothing is read back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from enginery.attention.axes import token_fields
from enginery.attention.relay import MIXED_GRAPHS
from enginery.attention.watch import digest
from enginery.contracts.attention import GlobalLayerId, LocalLayerId
from enginery.contracts.batch import FULL, ForwardBatch, Phase
from enginery.contracts.plan import Accepted, ForwardPlan
from enginery.errors import StalePlan, Unsupported
from enginery.testing.cases import AttnCase
from enginery.testing.check_numbers import equals_formula
from enginery.testing.readback import no_reads
from enginery.testing.rules import BrokenRule, SkippedCheck, compare, raising, rule
from enginery.testing.stage import Turn
from enginery.testing.subject import Subject, covering_cases, leaf_cases, usual_cases
from enginery.testing.workbench import Workbench
from enginery.worker.paths.captured_step import Capture, Replayable
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.paths.host_capture import HostCapture

_GRAPH_SIZE: Final = 8
_VERIFIED: Final = 3  # rows of a request that verifies drafts
_LONGER: Final = 4  # keys of each, as far as the host knows, than there are
_EXPECTED: Final = ((40, 1), (15, 2), (0, 30), (9, 700), (70, 60))  # keys before a row that decodes, and behind what is true
_MIXED_ROWS: Final = (150, 70)  # the second is captured when tables of the first are full


@rule(leaf_cases, "Return a frozen dataclass derived from ForwardPlan, with context.instance in its key.")
def plan_value(subject: Subject, case: AttnCase) -> None:
    """A plan is a frozen value whose key says which batch it is for."""
    bench = Workbench(subject, case)
    for phase, turns in bench.steps():
        batch = bench.batch(turns, phase)
        before = digest(batch)
        plan = bench.leaf.make_plan(batch, capture=False)  # its relay checks type and key
        if digest(batch) != before:
            raise BrokenRule(f"{phase}: planning writes to a host tensor of the batch")
        for name in (*(field.name for field in dataclasses.fields(plan)), "a_new_attribute"):
            if did := raising(functools.partial(setattr, plan, name, None), AttributeError):
                raise BrokenRule(f"setting {name} of a {type(plan).__name__} {did}")


@rule(usual_cases, "Return all that attend needs in the plan, and keep nothing of a batch on the backend.")
def plan_a_plan_b_run_a(subject: Subject, case: AttnCase) -> None:
    """Two batches may be planned before either runs; each keeps its own plan, for all layers."""
    bench = Workbench(subject, case)
    usual = bench.layer
    for phase, first in bench.steps():
        turns = [first, bench.turns([(cached + 2, new) for _, cached, new in first])]
        batches = [bench.relay.plan(bench.batch(each, phase)) for each in turns]
        for index in (0, 1) if case.facts.recurrent is not None else (0, 1, 0):  # a state moves on with every run
            bench.layer = dataclasses.replace(usual, global_id=GlobalLayerId(8), local_id=LocalLayerId(2))
            bench.attend(batches[index], turns[index])
            bench.layer, expected = usual, [bench.expected(turn) for turn in turns[index]]
            what = f"{phase}, batch {'AB'[index]} after both were planned, in another layer than first"
            compare(bench.attend(batches[index], turns[index]), expected, dtype=case.dtype, leeway=case.leeway, what=what)


@rule(
    covering_cases,
    "Plan one request, and the last of several, as any other: look at the sizes of a grid, and at what stands for many.",
)
def decoding(subject: Subject, case: AttnCase) -> None:
    """A request that decodes or verifies alone, or is the last of two, three or five, gets what any other gets."""
    bench, page = Workbench(subject, case), case.page_size if case.facts.recurrent is None else 16
    full, begun, many = 2 * page - 1, page, 2 * page + 3
    batches = (full,), (begun,), (many,), (many,), (300,), (begun, full), (full, many, begun), (begun, 0, many, 1, full)
    for phase, new in ((Phase.DECODE, 1), (Phase.VERIFY, 3)):
        bench.forget()
        for cached in batches if phase in subject.can.phases else ():
            equals_formula(bench, bench.turns([(each, new) for each in cached]), phase, f" of {new} behind {cached}")


@rule(leaf_cases, "Begin attend and advance with covering_plan(plan, batch, YourPlan, backend=self.backend_id).")
def stale_plans(subject: Subject, case: AttnCase) -> None:
    """attend and advance refuse, with StalePlan, a plan that was not made for the batch they are given."""
    bench = Workbench(subject, case)
    for phase, turns in bench.steps():
        for what, batch, plan in _stale_plans(subject, bench, turns, phase):
            inputs, out = bench.inputs(turns, batch.num_tokens), bench.guarded_out(batch.num_tokens)[1:-1]
            if did := raising(functools.partial(bench.call_leaf, inputs, batch, plan, out), StalePlan):
                raise BrokenRule(f"{phase}: with {what} it {did}")


def _stale_plans(
    subject: Subject, bench: Workbench, turns: list[Turn], phase: Phase
) -> Iterator[tuple[str, ForwardBatch, ForwardPlan | None]]:
    batch = bench.batch(turns, phase)
    plan = bench.leaf.make_plan(batch, capture=False)

    def carrying(other: ForwardBatch, *, epoch: int = plan.key.epoch) -> tuple[ForwardBatch, ForwardPlan]:
        """A batch, and the plan as if it had been made for it."""
        return other, dataclasses.replace(plan, key=plan.key._replace(batch=other.identity, epoch=epoch))

    yield "no plan", batch, None
    yield "the plan of another batch of the same sizes", dataclasses.replace(batch), plan
    yield "the plan of a batch with fewer tokens", *carrying(bench.pad(batch, requests=0, tokens=1))
    yield "the plan of a batch with fewer requests", *carrying(bench.pad(batch, requests=1, tokens=0))
    yield "the plan of a batch of another phase", *carrying(dataclasses.replace(batch, phase=Phase.IDLE))
    yield "a plan of another epoch", *carrying(batch, epoch=plan.key.epoch + 1)
    foreign = Workbench(subject, bench.case, instance="kit#1").leaf.make_plan(batch, capture=False)
    yield "another instance's plan", batch, foreign


@rule(usual_cases, "Plan from the batch's host tensors, those named _cpu, alone; copy to the device with non_blocking=True.")
def planning_reads_nothing(subject: Subject, case: AttnCase) -> str | None:
    """Planning reads nothing back from the device."""
    bench, remark = Workbench(subject, case, watched=False), None
    if subject.device.type == "cuda":
        for phase, turns in bench.steps():
            batch = bench.batch(turns, phase)
            with no_reads(subject.device):
                bench.relay.plan(batch)
        return None
    meta = torch.device("meta")  # its tensors have no values to read
    try:
        planner = Workbench(dataclasses.replace(subject, device=meta), case, watched=False)
    except Exception as error:  # a backend's constructor
        planner, remark = bench, f"reads of its own tensors are not noticed: on the meta device {type(error).__name__}: {error}"
    for phase, turns in bench.steps():
        batch = bench.batch(turns, phase)
        view = dataclasses.replace(batch.pages, slots=batch.pages.slots.to(meta))
        there = dataclasses.replace(
            batch,
            input_ids=batch.input_ids.to(meta),
            positions=batch.positions.to(meta),
            views={**batch.views, FULL: view},
        )
        try:
            planner.relay.plan(there)
        except (RuntimeError, NotImplementedError) as error:
            raise BrokenRule(f"{phase}: planning reads a tensor of the device: {error}") from error
    return remark


@rule(usual_cases, "Do it when planning and keep it in the plan; on the device, use masks and indices of fixed shape.")
def attend_reads_nothing(subject: Subject, case: AttnCase) -> None:
    """attend and advance read no values back: they would wait for the device, and could not be captured."""
    bench = Workbench(subject, case, watched=False)
    for phase, turns in bench.steps():
        bench.run(turns, phase)  # a first call may compile
        batch = bench.relay.plan(bench.batch(turns, phase))
        inputs, whole = bench.inputs(turns, batch.num_tokens), bench.guarded_out(batch.num_tokens)
        with no_reads(subject.device):
            bench.call(inputs, batch, batch.plan, whole[1:-1])


@rule(usual_cases, "Take what a row sees from kv_lens where it is set; a part that lies wholly behind it weighs nothing.")
def device_lengths(subject: Subject, case: AttnCase) -> None:
    """Rows that decode see as many keys as the device says, where the host expects more."""
    if not subject.can.device_lengths or case.facts.recurrent is not None or Phase.DECODE not in subject.can.phases:
        raise SkippedCheck("capabilities do not claim it, or the layer has no keys")
    bench = Workbench(subject, case, num_tokens=3000)
    turns = [turn._replace(new=1) for turn in bench.turns(_EXPECTED)]
    batch = bench.batch(turns, Phase.DECODE)
    true, more = batch.kv_lens_cpu.to(bench.device), torch.tensor([new - 1 for _, new in _EXPECTED], dtype=torch.int32)
    batch = dataclasses.replace(batch, kv_lens=true, kv_lens_cpu=batch.kv_lens_cpu + more)
    expected, what = [bench.expected(turn) for turn in turns], "decoding rows whose lengths the device alone knows"
    compare(bench.plan_and_attend(batch, turns), expected, dtype=case.dtype, leeway=case.leeway, what=what)


@rule(leaf_cases, "What a captured plan points to stays where it is; refresh_graph_metadata writes new lengths and pages into it.")
def captured_equals_eager(subject: Subject, case: AttnCase) -> str | None:
    """A captured step, replayed for as many requests or fewer, gives what an eager one gives."""
    capture = _capture_of(subject)
    bench = _bench_of(subject, case, capture, most_rows=_GRAPH_SIZE)
    step = CapturedCall(bench, capture, size=_GRAPH_SIZE)
    for cached in ((40, 0, 15, 16, 3, 70, 33, 1), (9, 0, 90), (20,)):
        step.replay(bench.turns([(length, 1) for length in cached]))
    if Phase.VERIFY not in subject.can.phases or subject.device.type == "cpu":  # where steps that verify are not recorded
        return None
    answers = [
        verifies_captured(_bench_of(subject, case, capture, most_rows=_GRAPH_SIZE * _VERIFIED), capture, on_device=on_device)
        for on_device in (False, True)[: 1 + subject.can.verify_lengths]
    ]
    return answers[0]


def verifies_captured(bench: Workbench, capture: Capture, *, on_device: bool = False) -> str | None:
    """Drafts are verified in a graph, and recurrent states moved in another. Returns why it is done eagerly, where it is.

    Raises `BrokenRule`. bench: whose graphs have room. on_device: lengths are true there alone.
    """
    try:
        step = CapturedCall(bench, capture, size=_GRAPH_SIZE, length=_VERIFIED, on_device=on_device)
    except Unsupported as error:
        return f"drafts are verified eagerly: {error}"
    for cached in ((40, 0, 15, 16, 3, 30, 33, 1), (9, 0, 50), (20,)):
        bench.forget()
        whole = bench.turns([(length, _VERIFIED + _LONGER) for length in cached])
        turns = [turn._replace(new=_VERIFIED) for turn in whole]
        step.replay(turns)
        if bench.case.facts.recurrent is None:
            continue
        right = [(place + 1) % _VERIFIED for place in range(len(turns))]
        step.move_states(right)
        going_on = [turn._replace(cached=turn.cached + 1 + count, new=2) for turn, count in zip(turns, right, strict=True)]
        what = f"after {right} right drafts of {_VERIFIED - 1}, whose states a graph moved"
        expected = [bench.expected(turn) for turn in going_on]
        compare(bench.run(going_on, Phase.PREFILL), expected, dtype=bench.case.dtype, leeway=bench.case.leeway, what=what)
    return None


class CapturedCall:
    """One layer of a captured step of `size` requests of `length` rows each. on_device: as `verifies_captured` has it."""

    def __init__(self, bench: Workbench, capture: Capture, *, size: int, length: int = 1, on_device: bool = False) -> None:
        """Raises `Unsupported` where the backend captures no such step."""
        self.bench, self.capture, self.size, self.length = bench, capture, size, length
        self.phase = Phase.DECODE if length == 1 else Phase.VERIFY
        self.lengths = torch.full((size,), length, dtype=torch.int32, device=bench.device) if on_device else None
        self.batch = bench.relay.plan(self.padded([]), capture=True)
        self.inputs, self.whole = bench.inputs([], size * length), bench.guarded_out(size * length)
        self.counts = torch.zeros(size, dtype=torch.int64, device=bench.device)
        self.graph = self._captured(self._call)
        moves = bench.case.facts.recurrent is not None and length > 1
        self.moving = self._captured(self._move) if moves else None

    def padded(self, turns: Sequence[Turn]) -> ForwardBatch:
        """As long as what is captured."""
        more = self.size - len(turns)
        batch = dataclasses.replace(self.bench.batch(turns, self.phase), decode_len=self.length)
        batch = self.bench.pad(batch, requests=more, tokens=more * self.length)
        if self.lengths is None:
            return batch
        self.lengths.copy_(batch.kv_lens_cpu)
        longer = torch.arange(self.size) < len(turns)
        return dataclasses.replace(batch, kv_lens=self.lengths, kv_lens_cpu=batch.kv_lens_cpu + _LONGER * longer.int())

    def replay(self, turns: Sequence[Turn], batch: ForwardBatch | None = None) -> None:
        """Raises `BrokenRule` if the results are not the formula's. batch: of these turns, padded; None: as they are."""
        bench, captured = self.bench, self.batch
        batch = self.padded(turns) if batch is None else batch
        new = [*bench.inputs(turns, batch.num_tokens), *token_fields(batch)]
        for static, values in zip([*self.inputs, *token_fields(captured)], new, strict=True):
            static.copy_(values)
        assert captured.plan is not None, "it was planned to be captured"
        bench.relay.refresh(captured.plan, batch)
        with torch.inference_mode():
            self.graph.replay()
        what = f"a graph of {self.name} replayed for {len(turns)}"
        expected = [bench.expected(turn) for turn in turns]
        compare(bench.rows_of(self.whole, turns), expected, dtype=bench.case.dtype, leeway=bench.case.leeway, what=what)

    def move_states(self, right: Sequence[int]) -> None:
        """By a graph of its own: behind so many drafts of each request."""
        assert self.moving is not None, "there are states"
        self.counts.zero_()[: len(right)] = torch.tensor(right, device=self.counts.device)
        with torch.inference_mode():
            self.moving.replay()

    @property
    def name(self) -> str:
        """What it is for."""
        return f"{self.size} requests" + ("" if self.length == 1 else f" of {self.length} rows")

    def _captured(self, call: Callable[[], None]) -> Replayable:
        with torch.inference_mode():
            return self.capture(call)

    def _call(self) -> None:
        self.bench.relay.ask("device_prologue", plan=self.batch.plan)
        self.bench.call(self.inputs, self.batch, self.batch.plan, self.whole[1:-1])

    def _move(self) -> None:
        if self.bench.relay.ask("commit_state", plan=self.batch.plan, accepted=Accepted(counts=self.counts)) is None:
            raise BrokenRule("it claims to verify drafts, and commit_state does nothing")


class MixedCall(CapturedCall):
    """One layer of a captured step of `size` times `length` rows: `length` of each that decodes, prompts', the rest nobody's."""

    def padded(self, turns: Sequence[Turn]) -> ForwardBatch:
        batch = dataclasses.replace(self.bench.batch(turns, Phase.MIXED), decode_len=self.length)
        return self.bench.pad(batch, requests=0, tokens=self.size * self.length - batch.num_tokens)

    @property
    def name(self) -> str:
        return f"{self.size * self.length} rows, {self.length} of each that decodes"

    def replay(self, turns: Sequence[Turn], batch: ForwardBatch | None = None) -> None:
        """Raises `BrokenRule` too if rows of nobody are not zero."""
        super().replay(turns, batch)
        if bool(self.whole[1 + sum(turn.new for turn in turns) : -1].count_nonzero()):
            raise BrokenRule(f"a graph of {self.name} replayed for {len(turns)}: rows of nobody are not zero")


@rule(
    leaf_cases,
    "Keep tables at fixed places, as large as any step needs them; what a step does not need is empty, and so it is first.",
)
def mixed_captured(subject: Subject, case: AttnCase) -> None:
    """A captured mixed step, replayed for any prompts and decoding requests, gives what eager ones give, and zeros for nobody."""
    if subject.device.type != "cuda":
        raise SkippedCheck("such steps are captured on CUDA devices alone")
    bench, sizes = Workbench(subject, case, num_tokens=4000, watched=False), {"max_batch_size": _GRAPH_SIZE}
    bench.relay.ask("init_graph_state", **sizes, max_num_tokens=_GRAPH_SIZE)
    if not bench.relay.ask(MIXED_GRAPHS, **sizes, max_num_tokens=_MIXED_ROWS[0]):
        raise SkippedCheck("it has no init_mixed_graph_state, or answers None")
    for size, length in (*((rows, 1) for rows in _MIXED_ROWS), (_MIXED_ROWS[-1] // _VERIFIED, _VERIFIED)):
        try:
            step = MixedCall(bench, CudaCapture(subject.device), size=size, length=length)
        except Unsupported:
            if length == 1:
                raise
            return
        for turns in _mixed_steps(size * length, each=length):
            bench.forget()
            step.replay(bench.turns(turns))


def _mixed_steps(num_rows: int, *, each: int) -> Sequence[Sequence[tuple[int, int]]]:
    """Cached and new tokens of requests, no more than so many new ones. each: rows of one that decodes."""
    long = ((5, each), (40, each), (0, 30), (17, 3)), ((700, each), (300, each), (300, 9)), ((400, 60),)
    return (*long, ((3, each),) * _GRAPH_SIZE, ((0, 2),) * _GRAPH_SIZE, ((64, each),), ((0, num_rows),))


def _bench_of(subject: Subject, case: AttnCase, capture: Capture, *, most_rows: int) -> Workbench:
    bench = Workbench(subject, case, watched=isinstance(capture, CudaCapture))
    if bench.relay.ask("init_graph_state", max_batch_size=_GRAPH_SIZE, max_num_tokens=most_rows) is None:
        raise BrokenRule("init_graph_state answers None")
    return bench


def _capture_of(subject: Subject) -> Capture:
    """How its steps are captured. Raises `SkippedCheck` where they are not."""
    tell = subject.offer.spec.record_calls
    if not subject.can.graphs or Phase.DECODE not in subject.can.phases:
        raise SkippedCheck("capabilities claim no graphs, or no decoding")
    if subject.device.type == "cuda":
        return CudaCapture(subject.device)
    if tell is None:
        raise SkippedCheck("it states no record_calls, without which nothing is recorded on a CPU")
    return HostCapture([tell])


PLANS: Final = (
    *(plan_value, plan_a_plan_b_run_a, decoding, stale_plans, planning_reads_nothing, attend_reads_nothing),
    *(device_lengths, captured_equals_eager, mixed_captured),
)
