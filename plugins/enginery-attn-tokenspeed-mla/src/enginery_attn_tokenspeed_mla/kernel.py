"""`tokenspeed_mla_decode` of the package tokenspeed-mla, version 2.0. B requests, H query heads, R latent rank, P rope dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from enginery.api import BackendContext, LatentFacts
from enginery_attn_flashinfer_mla.table_backend import Tables

MAX_MULTIPROCESSORS: Final = 192  # of compute capability 10.x; they have 148 to 160
TILE: Final = 128  # rows of a tile, of which fewer heads fill a part


class TokenspeedDecode:
    """Implements `enginery_attn_flashinfer_mla.table_backend.TableKernel`. decode: TokenSpeed's function."""

    zeroed = False
    columns = 4  # rows of a table begin at multiples of 16 bytes

    def __init__(self, decode: Callable[..., object], latent: LatentFacts) -> None:
        self.workspace_bytes = MAX_MULTIPROCESSORS * TILE * (latent.rank + 1) * 4
        self._decode = decode
        self._dims = {"kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope_dim}

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
            enable_pdl=True,
            **self._dims,
        )


def load_kernel(context: BackendContext) -> TokenspeedDecode:
    """It is compiled when it is first launched."""
    from tokenspeed_mla import tokenspeed_mla_decode  # type: ignore[import-not-found]

    return make_kernel(context, tokenspeed_mla_decode)


def make_kernel(context: BackendContext, decode: Callable[..., Any]) -> TokenspeedDecode:
    """For the model's MLA layers, which are all alike."""
    return TokenspeedDecode(decode, next(layer.latent for layer in context.geometry.layers if layer.latent is not None))
