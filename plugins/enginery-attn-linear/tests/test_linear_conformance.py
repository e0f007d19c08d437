"""The conformance kit."""

import pytest

from enginery.testing.suite import AttnBackendSuite


class TestLinear(AttnBackendSuite):
    backend = "linear"


@pytest.mark.gpu
class TestLinearOnCuda(AttnBackendSuite):
    backend = "linear"
    device = "cuda"
