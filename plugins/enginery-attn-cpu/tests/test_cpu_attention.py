"""The conformance kit, on each instruction set that this CPU has."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar

import pytest
from few_checks import few

from enginery.testing.conformance import Check, checks_of
from enginery.testing.subject import Subject
from enginery.testing.suite import AttnBackendSuite
from enginery_attn_cpu.native_part import kernels

pytestmark = pytest.mark.skipif(kernels is None, reason="the compiled part was not built")


@functools.cache  # what it claims is the same on each instruction set, and takes 0.4 s to ask
def _subject() -> Subject:
    return _Cpu.subject()


class _Cpu(AttnBackendSuite):
    backend = "cpu"


class _On(_Cpu):
    isa: ClassVar[str]

    @pytest.fixture(autouse=True)
    def narrowed(self) -> Iterator[None]:
        """Its kernels and no better ones."""
        assert kernels is not None
        if self.isa not in kernels.supported:
            pytest.skip(f"this CPU has no {self.isa}")
        kernels.use(self.isa)
        yield
        kernels.use(kernels.isa)

    @classmethod
    def subject(cls) -> Subject:
        return _subject()

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        """Another process would choose the instruction set anew."""
        return few(checks_of(subject), without=() if cls.isa == "generic" else ("another-process", "claims", "refusals"))


class TestGeneric(_On):
    isa = "generic"


class TestAvx2(_On):
    isa = "avx2"


class TestAvx512(_On):
    isa = "avx512"


class TestAvx512Bf16(_On):
    isa = "avx512_bf16"
