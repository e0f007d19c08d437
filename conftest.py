"""Triton compiles its kernels or interprets them, and decides that once, when it is first imported.

Machines without a CUDA device interpret them. torch imports Triton too, so this comes before any test does. The variable must not
stay set: the engine would choose the interpreted plugins for every other test.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from unittest.mock import patch

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("triton.experimental.gluon")
