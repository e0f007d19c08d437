"""The kit around stand-ins of fla-core's kernels in torch; around the kernels themselves on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import compile_only
import pytest
import torch
from few_checks import few
from pairwise import EVERYTHING

from enginery.api import STATE, Phase, PlanKey
from enginery.testing.conformance import Check, checks_of
from enginery.testing.rules import compare
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench
from enginery_attn_fla.spec import FlaOptions

CAN_INTERPRET = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


@pytest.fixture
def beside_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts find the modules here."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, beside_tests: None) -> None:
    """For the processes that a test starts."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def is_shown_by_delta(check: Check) -> bool:
    """All but delta rules are the kernels of enginery-attn-delta, in prefills too: of those the numbers of one dtype will do."""
    rule = None if check.case is None else check.case.facts.recurrent
    if rule is None or rule.rule == "delta":
        return False
    return check.rule.name not in ("numbers", "chunked-equals-whole") or check.case.dtype != "float32"


@pytest.mark.skipif(not CAN_INTERPRET, reason="decoding's kernels are interpreted where Triton is installed, without a CUDA device")
@pytest.mark.usefixtures("interpreter")
class TestFlaStandIn(AttnBackendSuite):
    backend = "fla"

    @classmethod
    def subject(cls) -> Subject:
        """The backend over stand-ins, which no manifest offers."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            environment.syspath_prepend(str(Path(__file__).parent))
            return Subject.imported("fla_stand_in:PAIR", device="cpu")

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        checks = checks_of(subject)
        return few([check for check in checks if EVERYTHING or not is_shown_by_delta(check)], without=["another-process"])


@pytest.mark.skipif(not CAN_INTERPRET, reason="the kernels that run token by token are interpreted where there is Triton")
@pytest.mark.usefixtures("interpreter")
def test_short_prompts_run_token_by_token_and_many_must_be_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, ran = TestFlaStandIn.subject(), list[bool]()
    monkeypatch.setattr(
        "fla_stand_in.by_token", lambda *given, run=sys.modules["fla_stand_in"].by_token: ran.append(True) or run(*given)
    )
    case = next(case for case in subject.usual if case.facts.recurrent is not None and case.facts.recurrent.rule == "delta")
    bench = Workbench(subject, case, options=FlaOptions(by_token=20))
    for lengths, chunked in (([20, 7], False), ([21], True), ([10] * 9, False), ([11] * 9, True), ([11, *[1] * 9], True)):
        ran.clear()
        turns = bench.turns([(3, length) for length in lengths])
        expected = [bench.expected(turn) for turn in turns]
        compare(bench.run(turns, Phase.PREFILL), expected, dtype=case.dtype, leeway=case.leeway, what=f"{lengths}")
        assert bool(ran) is chunked, lengths
        bench.forget()


@pytest.mark.skipif(not CAN_INTERPRET, reason="plans are made on a device that is none")
@pytest.mark.usefixtures("interpreter")
def test_a_plan_is_uploaded_from_pinned_memory_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decoding rows, of prompts with and without checkpoints, and of a captured plan for other requests."""
    subject = TestFlaStandIn.subject()
    case = next(case for case in subject.usual if case.facts.recurrent is not None and case.facts.recurrent.rule == "delta")
    bench, pinned, uploads = Workbench(subject, case), set[int](), list[bool]()
    rows, chunks = (sys.modules[f"enginery_attn_{name}"] for name in ("delta.plan", "fla.chunks"))

    def making(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*given: object, pin_memory: bool = False, **how: object) -> torch.Tensor:
            values = made(*given, **how)
            pinned.update([values.untyped_storage().data_ptr()] * pin_memory)
            return values

        return noted

    def to(values: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        uploads.append(non_blocking and values.untyped_storage().data_ptr() in pinned)
        return values.clone()

    batch = bench.batch(bench.turns([(5, 1), (0, 40), (3, 30)]), Phase.MIXED)
    marks = {"checkpoints_cpu": batch.states.writes_cpu, "checkpoint_rows_cpu": torch.tensor([0, 16, 0], dtype=torch.int32)}
    kept = dataclasses.replace(batch, views={**batch.views, STATE: dataclasses.replace(batch.states, **marks)})
    monkeypatch.setattr("enginery_attn_delta.plan.can_chain", lambda device: False)
    monkeypatch.setattr(torch, "empty", making(torch.empty))
    monkeypatch.setattr(torch, "zeros", making(torch.zeros))
    monkeypatch.setattr(torch.Tensor, "to", to)
    cuda = torch.device("cuda")
    for each in (batch, kept):
        rows.plan_rows(each, PlanKey.of(each, "fla#0"), cuda)
        for group in rows.prompts_of(each):
            if len(group.lengths):
                chunks.plan_chunks(group, cuda)
    assert len(uploads) == 2 + 1 + 2
    assert all(uploads)


@pytest.mark.gpu
@pytest.mark.usefixtures("beside_tests")
class TestFlaOnCuda(AttnBackendSuite):
    """Short prompts in chunks too."""

    device = "cuda"

    @classmethod
    def subject(cls) -> Subject:
        with pytest.MonkeyPatch.context() as environment:
            environment.syspath_prepend(str(Path(__file__).parent))
            return Subject.imported("fla_stand_in:ON_CUDA", device="cuda")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="it is compiled by Triton")
def test_the_kernel_before_chunks_compiles_for_hopper_without_a_gpu() -> None:
    compile_only.run(Path(__file__).with_name("hopper_kernels.py"))
