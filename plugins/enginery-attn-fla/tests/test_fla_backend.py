"""The kit around stand-ins of fla-core's kernels in torch; around the kernels themselves on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from few_checks import few

from enginery.testing.conformance import Check, checks_of
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite

CAN_INTERPRET = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that a test starts."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


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
        return few(checks_of(subject), without=["another-process"])


@pytest.mark.gpu
class TestFlaOnCuda(AttnBackendSuite):
    backend = "fla"
    device = "cuda"
