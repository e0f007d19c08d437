"""The conformance kit."""

import pytest
from few_checks import few

from enginery.testing.conformance import Check, checks_of
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite


class TestLinear(AttnBackendSuite):
    backend = "linear"

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        return few(checks_of(subject), without=["another-process"])


@pytest.mark.gpu
class TestLinearOnCuda(AttnBackendSuite):
    backend = "linear"
    device = "cuda"
