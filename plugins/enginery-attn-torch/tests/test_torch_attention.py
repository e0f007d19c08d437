"""The conformance kit, on both devices."""

from __future__ import annotations

import pytest

from enginery.testing.suite import AttnBackendSuite


class TestTorchAttention(AttnBackendSuite):
    backend = "torch"


@pytest.mark.gpu
class TestTorchAttentionOnCuda(AttnBackendSuite):
    backend = "torch"
    device = "cuda"
