"""Kernels in Gluon, which not every version of Triton runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]


def gluon_kernels(name: str, version: str = triton.__version__) -> ModuleType | None:
    """That module of `kernels`, for Triton 3.6: its Gluon is experimental, and those of other versions differ."""
    return importlib.import_module(f"enginery_ops_triton.kernels.{name}") if version.startswith("3.6.") else None
