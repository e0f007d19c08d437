"""Compiles decoding for compute capability 9.0: of gpt-oss with windows and sinks, latents, few requests. No GPU is needed."""

from __future__ import annotations

import compile_only
import numpy as np
import torch

from enginery.api import AttnLayerFacts, LatentFacts
from enginery_attn_triton.kernels import decode_few
from enginery_attn_triton.launch import Memory, Scores, run_decode
from enginery_attn_triton.plan import Split
from enginery_attn_triton.splitting import split_decoding, split_verifying
from enginery_attn_triton.tiling import Device, LayerCut

H200 = Device(num_units=132, shared_bytes=compile_only.SHARED_BYTES, chained=True)
LATENT = LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
GPT_OSS = AttnLayerFacts(num_heads=64, num_kv_heads=8, head_dim=64, sliding_window=128, sinks=True)
LLAMA = AttnLayerFacts(num_heads=32, num_kv_heads=8, head_dim=128)
QWEN_NEXT = AttnLayerFacts(num_heads=16, num_kv_heads=2, head_dim=256)
LATENTS = {heads: AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=576, latent=LATENT) for heads in (16, 20, 128)}


def compile_decode(
    facts: AttnLayerFacts, length: int = 1, *, requests: int = 1, lengths: bool = False, trees: bool = False
) -> None:
    """length: rows of each request. lengths, trees: on the device."""
    cut, kv_lens = LayerCut.of(facts, itemsize=2, device=H200, length=length), np.array([640] * requests, dtype=np.int32)
    items, splits, _ = (split_verifying if length > 1 else split_decoding)(kv_lens, cut.decode, columns=40)
    split = Split(items=torch.from_numpy(items), splits=torch.from_numpy(splits), tall=None, merged=True)
    keys = torch.zeros(41, 16, facts.num_kv_heads, facts.head_dim, dtype=torch.bfloat16)
    memory = Memory(k=keys, v=keys[..., : facts.value_dim], pages=torch.zeros(40, dtype=torch.int32))
    q = torch.zeros(length * requests, facts.num_heads, facts.head_dim, dtype=torch.bfloat16)
    run_decode(
        q,
        memory,
        torch.empty_like(q[..., : facts.value_dim]),
        cut=cut,
        split=split,
        parts=torch.empty(cut.workspace_bytes, dtype=torch.uint8),
        scores=Scores(scale=0.1, window=facts.sliding_window, sinks=torch.zeros(facts.num_heads) if facts.sinks else None),
        lengths=torch.from_numpy(kv_lens) if lengths else None,
        trees=torch.ones(requests, length, length, dtype=torch.bool) if trees else None,
    )


def check_few(facts: AttnLayerFacts, requests: int) -> None:
    """Of few requests the keys stay in registers, and none is read before the predecessor, which may write it, has ended."""
    decode_few.decode_few.device_caches.clear()
    compile_decode(facts, requests=requests)
    ((cache, *_),) = decode_few.decode_few.device_caches.values()
    (made,) = cache.values()
    ahead, behind = made.asm["ptx"].split("griddepcontrol.wait")[:2]
    assert "ld.volatile" not in ahead
    assert "v4" not in ahead, "places of keys alone"
    assert "ld.volatile.global.v4" in behind
    assert compile_only.stack_bytes(made.asm["cubin"]) <= 8


def main() -> None:
    compile_only.install(reads_code=True)
    for facts, requests in ((GPT_OSS, 2), (LLAMA, 1), (LLAMA, 2), (QWEN_NEXT, 1)):
        check_few(facts, requests)
    for requests in (4, 64):
        compile_decode(GPT_OSS, requests=requests)
    for facts in LATENTS.values():  # whose tiles are all there are for one row
        compile_decode(facts)
    # Both tiles of several rows. With trees they need the most memory; without, `hopper_prompts.py` compiles every branch.
    compile_decode(LATENTS[16], 2, trees=True)
    compile_decode(LATENTS[16], 5, lengths=True, trees=True)


if __name__ == "__main__":
    main()
