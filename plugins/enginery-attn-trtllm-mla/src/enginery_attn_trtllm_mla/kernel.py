"""FlashInfer's `trtllm_batch_decode_with_kv_cache_mla`, version 0.6.11. B requests, H query heads, R latent rank, P rope dim.

Results are bfloat16. Page tables have whole blocks of 128 tokens. The workspace holds counters besides results of split requests:
zero before the first launch, and left so by each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from enginery.api import BackendContext, LatentFacts
from enginery_attn_flashinfer_mla.blackwell import latent_of
from enginery_attn_flashinfer_mla.table_backend import Tables

BLOCK_TOKENS: Final = 128
WORKSPACE_BYTES: Final = 150 << 20  # what TensorRT-LLM's callers give it


class TrtllmDecode:
    """Implements `enginery_attn_flashinfer_mla.table_backend.TableKernel`. decode: FlashInfer's function."""

    zeroed = True
    workspace_bytes = WORKSPACE_BYTES

    def __init__(self, decode: Callable[..., object], latent: LatentFacts, *, page_size: int) -> None:
        self.columns = BLOCK_TOKENS // page_size
        self._decode = decode
        self._dims = {
            "qk_nope_head_dim": latent.nope_dim,
            "kv_lora_rank": latent.rank,
            "qk_rope_head_dim": latent.rope_dim,
        }

    def __call__(
        self, q: torch.Tensor, latents: torch.Tensor, tables: Tables, workspace: torch.Tensor, out: torch.Tensor, *, scale: float
    ) -> None:
        """See `TableKernel`."""
        self._decode(
            query=q.unsqueeze(1),  # [B, 1, H, R + P]
            kv_cache=latents.unsqueeze(1),  # [pages, 1, page_size, R + P]
            workspace_buffer=workspace,
            block_tables=tables.table,
            seq_lens=tables.lens,
            max_seq_len=tables.longest,
            out=out.unsqueeze(1),  # [B, 1, H, R]
            bmm1_scale=scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            **self._dims,
        )


def load_kernel(context: BackendContext) -> TrtllmDecode:
    """FlashInfer fetches the compiled kernel when it is first launched."""
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

    return make_kernel(context, trtllm_batch_decode_with_kv_cache_mla)


def make_kernel(context: BackendContext, decode: Callable[..., object]) -> TrtllmDecode:
    """decode: FlashInfer's function."""
    return TrtllmDecode(decode, latent_of(context), page_size=context.geometry.page_size)
