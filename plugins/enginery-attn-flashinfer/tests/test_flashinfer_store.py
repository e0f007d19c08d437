"""Compiling what is missing of FlashInfer's kernels, with stand-ins for its modules."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from enginery.api import Unsupported
from enginery_attn_flashinfer.store import compile_missing


class Module:
    """As FlashInfer's spec of one. fails: what its compiler says."""

    def __init__(self, name: str, *, is_compiled: bool = False, fails: str = "") -> None:
        self.name, self.is_compiled, self._fails = name, is_compiled, fails

    def build(self, *, verbose: bool) -> None:
        if self._fails:
            raise RuntimeError(self._fails)
        self.is_compiled = True


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of FlashInfer, which need not be here for this."""
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__="0.6"))


@pytest.mark.usefixtures("version")
def test_what_is_missing_is_compiled_and_said_before(caplog: pytest.LogCaptureFixture) -> None:
    modules = [Module("prefill"), Module("cascade", is_compiled=True), Module("paged")]
    with caplog.at_level("INFO"):
        assert compile_missing(modules) == 2
    assert all(module.is_compiled for module in modules)
    assert caplog.messages == ["compiling 2 of FlashInfer's modules, which takes a minute or two: prefill, paged"]
    caplog.clear()
    assert compile_missing(modules) == 0
    assert caplog.messages == []


@pytest.mark.usefixtures("version")
def test_a_compiler_that_fails_is_told_with_its_words() -> None:
    with pytest.raises(
        Unsupported, match=r"FlashInfer 0\.6 could not compile its kernels: nvcc: not found; it needs nvcc and ninja"
    ):
        compile_missing([Module("prefill", fails="nvcc: not found")])


@pytest.mark.usefixtures("version")
def test_nothing_is_compiled_where_flashinfers_own_switch_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    compiled = Module("cascade", is_compiled=True)
    assert compile_missing([compiled]) == 0
    with pytest.raises(Unsupported, match="switched off by FLASHINFER_DISABLE_JIT, and not on disk are prefill"):
        compile_missing([compiled, Module("prefill")])
