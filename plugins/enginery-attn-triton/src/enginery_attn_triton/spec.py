"""What it can do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from enginery.api import AttnBackendSpec, AttnNeeds, Capabilities, Phase, Reason

NAME: Final = "triton"
DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
WORKSPACE_BYTES: Final = 64 << 20  # of the results of split requests; `LayerCut` keeps to it
TABLE_BYTES: Final = 64 << 20  # of the page table of captured decoding steps, at the most
MIXED_TABLE_BYTES: Final = 16 << 20  # likewise of captured mixed steps; longer requests' run in pieces
MOST_ROWS: Final = 17  # of a request in a captured step that verifies drafts
MAX_HEAD_DIM: Final = 256
MAX_RANK: Final = 512
MAX_ROPE_DIM: Final = 128
FEW_HEADS: Final = 32  # of latents: with more, others decode one request faster


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on host tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, kw_only=True)
class TritonSpec(AttnBackendSpec):
    """Its rank for one request is for latents with few query heads."""

    def priority_for(self, needs: AttnNeeds) -> int:
        """See `AttnBackendSpec.priority_for`."""
        few = all(layer.latent is not None and layer.num_heads <= FEW_HEADS for layer in needs.layers)
        return super().priority_for(needs) if few else self.priority


def make_spec() -> TritonSpec:
    """Before FlashInfer for one request of latents with few heads, which it decodes faster, and for more of them behind it.

    Interpreted, it is for the CPU, and last in the order: thousands of times slower than anything else there.
    """
    interpreted = is_interpreted()
    return TritonSpec(
        name=NAME,
        api=(2, 1),
        priority=1 if interpreted else 50,
        single_priority=None if interpreted else 70,
        summary="Triton kernels, interpreted: for tests" if interpreted else "Triton kernels for CUDA devices",
        refuse_also=refuse_also,
        capabilities=Capabilities(
            devices=frozenset({"cpu"} if interpreted else {"cuda"}),
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            min_compute_capability=None if interpreted else (8, 0),
            sliding_window=True,
            softcap=True,
            unequal_values=True,
            sinks=True,
            phases=frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY}),
            mla=True,
            mla_ragged=True,
            graphs=True,
            lse_base="e",
            device_lengths=True,
            verify_lengths=True,
            trees=True,
            needs_jit=True,
            workspace_bytes=WORKSPACE_BYTES + TABLE_BYTES + MIXED_TABLE_BYTES,
        ),
    )


def refuse_also(needs: AttnNeeds) -> list[Reason]:
    """A machine without Triton, dims whose tiles do not fit on a multiprocessor, a model and memory of different dtypes."""
    reasons = []
    if find_spec("triton") is None:
        reasons.append(Reason(rule="installed", text="triton is not installed; torch's CUDA builds bring it, or pip does"))
    if needs.dtype != needs.kv_dtype:
        reasons.append(Reason(rule="kv dtype", text=f"keys and values are {needs.kv_dtype}, the model is {needs.dtype}"))
    for layer in needs.layers:
        latent = layer.latent
        if latent is None and layer.head_dim > MAX_HEAD_DIM:
            reasons.append(Reason(rule="head dim", text=f"head dim {layer.head_dim} is more than {MAX_HEAD_DIM}"))
        if latent is not None and (latent.rank > MAX_RANK or latent.rope_dim > MAX_ROPE_DIM):
            dims = f"latent rank {latent.rank} and rope dim {latent.rope_dim}"
            reasons.append(Reason(rule="latent rank and rope dim", text=f"{dims} are more than {MAX_RANK} and {MAX_ROPE_DIM}"))
    return list(dict.fromkeys(reasons))
