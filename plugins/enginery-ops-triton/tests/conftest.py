"""Kernels are compiled where there is a CUDA device and interpreted elsewhere. Triton decides that once, when it is imported.

If that was for the compiler, because another test imported torch's, the tests in the interpreter are skipped.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from cuda_simulated import simulated

if not torch.cuda.is_available():
    with patch.dict(os.environ, TRITON_INTERPRET="1"):  # not for longer: the engine would choose the interpreter for other tests
        for name in ("triton.experimental.gluon", "enginery_ops_triton.ops", "enginery_ops_triton.sampling"):
            importlib.import_module(name)


@pytest.fixture
def hopper() -> Iterator[None]:
    """A simulated device."""
    with simulated():
        yield
