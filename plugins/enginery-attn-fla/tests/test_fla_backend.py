"""The kit around stand-ins of fla-core's kernels in torch; around the kernels themselves on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from few_checks import few
from pairwise import EVERYTHING

from enginery.testing.conformance import Check, checks_of
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite

CAN_INTERPRET = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that a test starts."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def is_shown_by_delta(check: Check) -> bool:
    """Scans and convolutions are the kernels of enginery-attn-delta, in prefills too: of those the numbers of one dtype will do."""
    rule = None if check.case is None else check.case.facts.recurrent
    if rule is None or rule.rule not in ("scan", "conv"):
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


@pytest.mark.gpu
class TestFlaOnCuda(AttnBackendSuite):
    backend = "fla"
    device = "cuda"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="it is compiled by Triton")
def test_the_kernel_before_chunks_compiles_for_hopper_without_a_gpu() -> None:
    """In a process of its own, where triton is imported for the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("hopper_kernels.py")
    made = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert made.returncode == 0, made.stderr
