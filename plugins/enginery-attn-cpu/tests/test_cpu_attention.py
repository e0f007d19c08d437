"""The conformance kit."""

from __future__ import annotations

from enginery.testing.suite import AttnBackendSuite


class TestCpuAttention(AttnBackendSuite):
    backend = "cpu"
