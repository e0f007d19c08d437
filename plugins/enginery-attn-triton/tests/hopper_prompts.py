"""Compiles for compute capability 9.0, without a GPU, what few rows of prompts with long contexts run, and what decodes: with
drafts, and with lengths of the device. `hopper_decode.py` compiles what decodes plainly."""

from __future__ import annotations

import dataclasses

import compile_only
import numpy as np
import torch

from enginery.api import AttnLayerFacts
from enginery_attn_triton.launch import Memory, Scores, run_decode, run_prefill
from enginery_attn_triton.plan import Split, Tiles, tiles_of
from enginery_attn_triton.splitting import split_alone, split_tiles
from enginery_attn_triton.tiling import Device, LayerCut, prefill_tile

H200 = Device(num_units=132, shared_bytes=compile_only.SHARED_BYTES, chained=True)


def main() -> None:
    compile_only.install()
    facts = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64, sliding_window=512, sinks=True)
    cut = LayerCut.of(facts, itemsize=2, device=H200)
    tile = prefill_tile(cut.dims, H200, max_rows=16 * cut.dims.group)
    keys = torch.zeros(129, 16, 2, 64, dtype=torch.bfloat16)
    memory = Memory(k=keys, v=keys, pages=torch.zeros(128, dtype=torch.int32))
    q = torch.zeros(16, 4, 64, dtype=torch.bfloat16)
    rows, contexts, bases = (np.array([number], dtype=np.int32) for number in (16, 2048, 0))
    whole = tiles_of(rows, contexts, bases, first_row=0, tokens=tile.tokens)
    found = split_tiles(whole, cut.decode, tile, most=8)
    assert found is not None
    table, splits = (torch.from_numpy(each) for each in found)
    parts = torch.empty(cut.workspace_bytes, dtype=torch.uint8)
    scores = Scores(scale=0.1, window=512, sinks=torch.zeros(4))
    run_prefill(
        q,
        memory,
        torch.empty_like(q),
        cut=cut,
        tiles=Tiles(table=table, tile=tile, splits=splits),
        parts=parts,
        scores=scores,
    )
    for length, known, trees in ((1, False, False), (4, True, False), (4, False, False), (5, False, True)):
        cut = LayerCut.of(dataclasses.replace(facts, sliding_window=None), itemsize=2, device=H200, length=length)
        items, splits = map(torch.from_numpy, split_alone(np.array([900, 300], np.int32), cut.decode, columns=64, exact=True)[:2])
        run_decode(
            q,
            memory,
            torch.empty_like(q),
            cut=cut,
            split=Split(items=items, splits=splits, tall=None, merged=True),
            parts=torch.empty(cut.workspace_bytes, dtype=torch.uint8),
            scores=Scores(scale=0.1),
            lengths=None if known else torch.zeros(2, dtype=torch.int32),
            trees=torch.zeros(2, length, length, dtype=torch.bool) if trees else None,
        )


if __name__ == "__main__":
    main()
