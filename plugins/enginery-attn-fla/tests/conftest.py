"""Decoding's kernels are compiled where there is a CUDA device and interpreted elsewhere, chosen before triton is imported."""

from __future__ import annotations

import importlib
import os
from unittest.mock import patch

import torch

if not torch.cuda.is_available():
    with patch.dict(os.environ, TRITON_INTERPRET="1"):  # not for longer: the engine would choose the interpreter for other tests
        importlib.import_module("enginery_attn_delta.launch")
