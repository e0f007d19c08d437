"""Kernels in Gluon, which not every version of Triton runs."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Final

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

VERSIONS: Final = ("3.6.", "3.7.")
"""Of Triton, with which they ran on a GPU: Gluon is experimental, and others' may differ."""
_log: Final = logging.getLogger(__name__)


def gluon_kernels(name: str, version: str = triton.__version__) -> ModuleType | None:
    """That module of `kernels`, for the `VERSIONS` of Triton."""
    return importlib.import_module(f"enginery_ops_triton.kernels.{name}") if version.startswith(VERSIONS) else None


def hopper_kernels(name: str, weight: torch.Tensor) -> ModuleType | None:
    """The same for a weight on a device of Hopper's, for which they are cut."""
    on_hopper = weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device)[0] == 9
    return gluon_kernels(name) if on_hopper else None


def warn_without_gluon(version: str = triton.__version__) -> None:
    """Say what a device does without, which has kernels in Gluon, and how to have them."""
    if gluon_kernels("linear_few", version) is None:
        _log.warning(
            "triton %s is installed, and kernels for few requests are in the Gluon of triton 3.6 and 3.7, which is experimental: "
            "others do their work, more slowly. torch 2.11 comes with triton 3.6, torch 2.13 with 3.7",
            version,
        )
