"""What the plugins with decoding kernels for Blackwell GPUs share. H query heads, R latent rank, P rope dim, B requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from enginery.api import BackendContext, LatentFacts
from enginery_attn_flashinfer_mla.backend import FlashInferMla
from enginery_attn_flashinfer_mla.table_backend import TableBackend, TableKernel, Tables

MAX_MULTIPROCESSORS: Final = 192  # of compute capability 10.x; they have 148 to 160


def latent_of(context: BackendContext) -> LatentFacts:
    """Of the model's MLA layers, which are all alike."""
    return next(layer.latent for layer in context.geometry.layers if layer.latent is not None)


def beside_flashinfer(context: BackendContext, kernel: TableKernel) -> TableBackend:
    """Decodes with the kernel, and prefills with FlashInfer."""
    from enginery_attn_flashinfer_mla.kernels import FlashInferKernels

    return TableBackend(context, kernel, FlashInferMla(context, FlashInferKernels))


class CuteDecode:
    """Implements `TableKernel` by a function with the arguments of FlashInfer's `cute_dsl_mla_decode`, and `further` ones."""

    zeroed = False
    columns = 4  # rows of a table begin at multiples of 16 bytes

    def __init__(self, decode: Callable[..., object], latent: LatentFacts, *, max_rows: int, **further: object) -> None:
        """max_rows: rows of partial results, for each of which there is a sum besides."""
        self.workspace_bytes = max_rows * (latent.rank + 1) * 4
        self._decode = decode
        self._further = {"kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope_dim, **further}

    def __call__(
        self, q: torch.Tensor, latents: torch.Tensor, tables: Tables, workspace: torch.Tensor, out: torch.Tensor, *, scale: float
    ) -> None:
        """See `TableKernel`."""
        self._decode(
            query=q.unsqueeze(1),  # [B, 1, H, R + P]
            kv_cache=latents,
            workspace_buffer=workspace.view(torch.int8),
            block_tables=tables.table,
            seq_lens=tables.lens,
            max_seq_len=tables.longest,
            softmax_scale=scale,
            output_scale=1.0,
            out=out.unsqueeze(1),  # [B, 1, H, R]
            **self._further,
        )
