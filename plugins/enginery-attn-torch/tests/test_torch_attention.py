"""The conformance kit, on both devices, and memory that holds what is no number."""

from __future__ import annotations

import pytest
import torch

from enginery.api import AttnLayerFacts, LatentFacts, Phase
from enginery.testing.cases import AttnCase
from enginery.testing.rules import compare
from enginery.testing.suite import AttnBackendSuite
from enginery.testing.workbench import Workbench

PLAIN = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64)
LAYERS = {
    "plain": PLAIN,
    "window": AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64, sliding_window=20),
    "soft cap": AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64, softcap=3.0),
    "sinks": AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=64, sinks=True),
    "latents": AttnLayerFacts(
        num_heads=4, num_kv_heads=1, head_dim=48, latent=LatentFacts(rank=32, rope_dim=16, nope_dim=32, value_dim=32)
    ),
}


class TestTorchAttention(AttnBackendSuite):
    backend = "torch"


@pytest.mark.gpu
class TestTorchAttentionOnCuda(AttnBackendSuite):
    backend = "torch"
    device = "cuda"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_what_is_no_number_in_a_request_s_memory_reaches_no_other(layer: AttnLayerFacts, dtype: str) -> None:
    """One request at a time is looked at: all memory but its own keys is NaN, the rest of its last page too."""
    bench = Workbench(TestTorchAttention.subject(), AttnCase(facts=layer, page_size=16, dtype=dtype))
    lengths = (40, 9, 64, 3)
    for row, length in enumerate(lengths):
        turns = bench.turns([(kept, 1) for kept in lengths])
        batch = bench.batch(turns, Phase.DECODE)
        own = batch.page_table_cpu[row, : length // 16 + 1].long()
        for pages in bench.pool.layer(bench.layer.local_id):
            kept = pages[own].clone()
            kept[-1, length % 16 + 1 :] = torch.nan
            pages.fill_(torch.nan)
            pages[own] = kept
        found = bench.plan_and_attend(batch, turns)
        compare(found[row : row + 1], [bench.expected(turns[row])], dtype=dtype, what=f"request {row}")
