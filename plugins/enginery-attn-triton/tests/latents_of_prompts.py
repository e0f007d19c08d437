"""Compiles prompts over latents for less shared memory than Hopper's. Triton refuses what needs more than there is."""

from __future__ import annotations

import compile_only
import numpy as np
import torch

from enginery.api import AttnLayerFacts, LatentFacts
from enginery_attn_triton.launch import Memory, Scores, run_prefill
from enginery_attn_triton.plan import Tiles, tiles_of
from enginery_attn_triton.tiling import Device, LayerCut, prefill_tile

LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
FACTS = AttnLayerFacts(num_heads=16, num_kv_heads=1, head_dim=576, latent=LATENT)


def main() -> None:
    keys = torch.zeros(9, 16, 1, 576, dtype=torch.bfloat16)
    memory = Memory(k=keys, v=keys, pages=torch.zeros(8, dtype=torch.int32))
    q = torch.zeros(16, 16, 576, dtype=torch.bfloat16)
    for capability, most in compile_only.LESS_SHARED.items():
        compile_only.install(capability=capability)
        device = Device(num_units=108, shared_bytes=most)
        cut = LayerCut.of(FACTS, itemsize=2, device=device)
        tile = prefill_tile(cut.dims, device, max_rows=10000)
        whole = tiles_of(*(np.array([number], dtype=np.int32) for number in (16, 0, 0)), first_row=0, tokens=tile.tokens)
        run_prefill(
            q,
            memory,
            torch.empty(16, 16, 512, dtype=torch.bfloat16),
            cut=cut,
            tiles=Tiles(table=torch.from_numpy(whole), tile=tile, splits=None),
            parts=torch.empty(cut.workspace_bytes, dtype=torch.uint8),
            scores=Scores(scale=0.1),
        )


if __name__ == "__main__":
    main()
