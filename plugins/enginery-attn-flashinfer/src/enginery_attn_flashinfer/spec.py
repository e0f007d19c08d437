"""What it can do."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from enginery.api import AttnBackendSpec, AttnNeeds, Capabilities, Phase, Reason

NAME: Final = "flashinfer"
DTYPES: Final = frozenset({"bfloat16", "float16"})
FP8: Final = "float8_e4m3fn"
HEAD_DIMS: Final = frozenset({64, 128, 256})
WORKSPACE_MB: Final = 384
GATHER_MB: Final = 256


@dataclass(frozen=True, kw_only=True)
class FlashInferOptions:
    """workspace_mb: the most that split requests may take; a model that could need more is refused at the start.

    gather_mb: the most that copies of a layer's keys and values in one piece may take, for prefill; 0 makes none.
    prefill: `fa3` is for compute capability 9.x, and `auto` takes it there; float8 pages that are not copied have `fa2` everywhere.
    shared_prefix_tokens: decoding requests that share so many tokens, in whole pages, read them once; 0 switches that off.
    shared_prefix_in_graphs: in captured steps too, which costs some microseconds a layer in steps where nothing is shared.
    """

    workspace_mb: int = WORKSPACE_MB
    gather_mb: int = GATHER_MB
    prefill: Literal["auto", "fa2", "fa3"] = "auto"
    shared_prefix_tokens: int = 2048
    shared_prefix_in_graphs: bool = False

    def __post_init__(self) -> None:
        if self.workspace_mb < 1 or self.gather_mb < 0 or self.shared_prefix_tokens < 0:
            raise ValueError("workspace_mb must be positive, gather_mb and shared_prefix_tokens not negative")


@dataclass(frozen=True, kw_only=True)
class FlashInferSpec(AttnBackendSpec):
    """Its rank for prefill is for devices that have FlashAttention-3."""

    def priority_for(self, needs: AttnNeeds) -> int:
        """See `AttnBackendSpec.priority_for`."""
        has_fa3 = needs.compute_capability is not None and needs.compute_capability[0] == 9
        return super().priority_for(needs) if has_fa3 else self.priority


def make_spec() -> FlashInferSpec:
    """Behind Triton, which decodes as fast and plans faster, and before it for prefill alone: FlashAttention-3 is faster."""
    from enginery_attn_flashinfer.store import ModuleStore

    return FlashInferSpec(
        name=NAME,
        api=(2, 0),
        priority=45,
        prefill_priority=60,
        summary="FlashInfer's kernels for CUDA devices",
        refuse_also=refuse_also,
        options=FlashInferOptions,
        kernel_store=ModuleStore(_modules),
        capabilities=Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=DTYPES,
            kv_dtypes=DTYPES | {FP8},
            head_dims=HEAD_DIMS,
            min_compute_capability=(8, 0),
            sliding_window=True,
            softcap=True,
            phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
            graphs=True,
            needs_jit=True,
            workspace_bytes=(WORKSPACE_MB + GATHER_MB) << 20,
        ),
    )


def _modules(needs: AttnNeeds, options: object | None) -> Sequence[Any]:
    from enginery_attn_flashinfer.modules import needed_modules

    return needed_modules(needs, options)


def refuse_also(needs: AttnNeeds) -> list[Reason]:
    """A machine without FlashInfer or a compiler for it, and memory of another half-precision dtype than the model's."""
    reasons = missing_software()
    if needs.kv_dtype not in (needs.dtype, FP8):
        reasons.append(Reason(rule="kv dtype", text=f"keys and values are {needs.kv_dtype}, the model is {needs.dtype}"))
    return reasons


def missing_software() -> list[Reason]:
    """Why FlashInfer's kernels cannot be had here; empty if they can."""
    if importlib.util.find_spec("flashinfer") is None:
        text = "the package flashinfer is not installed; `pip install flashinfer-python`"
        return [Reason(rule="flashinfer", text=text)]
    if not can_compile() and importlib.util.find_spec("flashinfer_jit_cache") is None:
        text = "FlashInfer compiles its kernels, and there is no nvcc in CUDA_HOME, on the path or in /usr/local/cuda; "
        return [Reason(rule="compiler", text=text + "install CUDA's compiler, or the package flashinfer-jit-cache")]
    return []


def can_compile() -> bool:
    """Whether nvcc is where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        return shutil.which("nvcc") is not None or os.path.exists("/usr/local/cuda/bin/nvcc")
    return os.path.exists(os.path.join(home, "bin", "nvcc"))
