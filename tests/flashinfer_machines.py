"""What plugins with FlashInfer's kernels answer on machines that have FlashInfer, or lack it or a compiler for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from enginery.api import AttnBackendSpec, AttnNeeds


def check_answer(spec: AttnBackendSpec, asked: AttnNeeds, rule: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The needs are met, or refused by this rule among others. Whether packages are installed does not matter."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    reasons = spec.refuse(asked)
    assert bool(reasons) == (rule is not None)
    assert rule is None or rule in [reason.rule for reason in reasons]


def check_what_is_missing(spec: AttnBackendSpec, asked: AttnNeeds, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Without FlashInfer a user is told what to install. It needs compiled kernels, or a compiler. folder: an empty one."""
    missing: set[str] = {"flashinfer"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setenv("CUDA_HOME", str(folder))
    (reason,) = spec.refuse(asked)
    assert "pip install flashinfer-python" in reason.text
    missing.clear()
    assert spec.refuse(asked) == []
    missing.add("flashinfer_jit_cache")
    (reason,) = spec.refuse(asked)
    assert "no nvcc" in reason.text
    (folder / "bin").mkdir()
    (folder / "bin" / "nvcc").touch()
    assert spec.refuse(asked) == []
