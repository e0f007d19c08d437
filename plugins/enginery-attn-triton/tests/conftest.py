"""On a machine without a CUDA device the kernels run in Triton's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from pairwise import EVERYTHING


def _is_interpreted() -> bool:
    """Imports Triton for the interpreter, unless there is none, or somebody imported it for the compiler."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        from triton.language import standard
        from triton.runtime.interpreter import InterpretedFunction

        import enginery_attn_triton.backend  # noqa: F401

        return isinstance(standard.max, InterpretedFunction)


INTERPRETED = _is_interpreted()
QUICKLY = Path(__file__).parents[3] / "tests" / "quickly_interpreted"


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where kernels are not interpreted. Few programs merge a row, as most would find nothing to merge."""
    if not INTERPRETED:
        pytest.skip("kernels are interpreted where Triton is installed and there is no CUDA device")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if not EVERYTHING:
        monkeypatch.setenv("PYTHONPATH", str(QUICKLY), prepend=os.pathsep)
        monkeypatch.setattr("enginery_attn_triton.launch._MERGING", 32)
