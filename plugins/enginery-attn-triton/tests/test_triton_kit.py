"""The conformance kit: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from few_checks import ABOUT_PLANS, few

from enginery.testing.conformance import Check, checks_of
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite

CAN_INTERPRET = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()

# A prefix in chunks of a few keys makes thousands of programs, of some milliseconds each. Other cases of these rules run.
TOO_SLOW = (
    "long-tail: MLA, heads 4/1, rank 32+16, chunked",
    "numbers: MLA, heads 16/1, rank 32+16, chunked",
    "padded-equals-unpadded: MLA, heads 4/1, rank 32+16, chunked",
    "plan-a-plan-b-run-a: MLA, heads 4/1, rank 32+16, chunked",
)
# Fewer values are fewer cases. On a GPU all are tried.
FEWER = {"head_dims": frozenset({16, 64, 80, 256}), "page_sizes": frozenset({1, 3, 16})}


@pytest.mark.skipif(not CAN_INTERPRET, reason="kernels are interpreted where Triton is installed and there is no CUDA device")
@pytest.mark.usefixtures("interpreter")
class TestTritonInterpreted(AttnBackendSuite):
    backend = "triton"

    @classmethod
    def subject(cls) -> Subject:
        """Found with the interpreter switched on, in which the backend is one for the CPU. It claims less: see `FEWER`."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            found = super().subject()
        spec = dataclasses.replace(found.offer.spec, capabilities=dataclasses.replace(found.can, **FEWER))
        return dataclasses.replace(found, offer=dataclasses.replace(found.offer, spec=spec))

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        """Without the slowest cases. On a GPU they run."""
        return few([check for check in checks_of(subject) if not str(check).startswith(TOO_SLOW)], of_plans=ABOUT_PLANS)


@pytest.mark.gpu
class TestTritonOnCuda(AttnBackendSuite):
    backend = "triton"
    device = "cuda"
