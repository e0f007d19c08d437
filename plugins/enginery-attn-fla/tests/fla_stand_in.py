"""For the kit, prompts of any length in chunks: the backend itself, `ON_CUDA`, and over stand-ins of fla-core's kernels in torch,
decoding by interpreted kernels, `PAIR`."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from enginery.api import BackendContext
from enginery_attn_delta.spec import refuse_also
from enginery_attn_fla.spec import FLA, FlaOptions

DEVICE = ThreadPoolExecutor(1)  # where a kernel reads what it likes; the kit watches the host's thread


@dataclass(frozen=True)
class AlwaysChunks(FlaOptions):
    by_token: int = 0


def by_token(*arguments: Any) -> Any:
    return DEVICE.submit(_by_token, *arguments).result()


def _by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, given: dict[str, Any]
) -> Any:
    """What the kernels compute, in float32, with their arguments. decay: [1, S, H] or [1, S, H, K]."""
    group = v.shape[2] // q.shape[2]
    q, k, v = (part[0].float() for part in (q.repeat_interleave(group, 2), k.repeat_interleave(group, 2), v))
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    out, after = torch.empty_like(v), given["initial_state"].clone()
    bounds = given["cu_seqlens_cpu"].tolist()
    assert bounds == given["cu_seqlens"].tolist()
    counts = [-(-(last - first) // 64) for first, last in itertools.pairwise(bounds)]
    chunks = [[request, place] for request, count in enumerate(counts) for place in range(count)]
    assert given["chunk_indices"].tolist() == chunks
    assert given["chunk_offsets"].tolist() == [0, *itertools.accumulate(counts)]
    for request, (first, last) in enumerate(itertools.pairwise(bounds)):
        state = after[request]
        for row in range(first, last):
            state *= decay[0, row].exp()[:, None, None] if decay.dim() == 3 else decay[0, row].exp()[:, None]
            new = beta[0, row, :, None] * (v[row] - torch.einsum("hvk,hk->hv", state, k[row]))
            state += new[..., None] * k[row, :, None]
            out[row] = given["scale"] * torch.einsum("hvk,hk->hv", state, q[row])
    return out[None], after


def delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any) -> Any:
    return by_token(q, k, v, g, beta, given)


def stand_in(context: BackendContext) -> Any:
    from enginery_attn_fla.backend import ChunkedAttention
    from enginery_attn_fla.kernels import Kernels

    return ChunkedAttention(context, Kernels(delta, delta))


def stand_in_spec() -> Any:
    can = dataclasses.replace(
        FLA.capabilities,
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        kv_dtypes=frozenset({"float32", "bfloat16"}),
        min_compute_capability=None,
        head_dims=frozenset({16, 64}),
    )
    return dataclasses.replace(FLA, name="fla-stand-in", capabilities=can, refuse_also=refuse_also, options=AlwaysChunks)


def on_cuda(context: BackendContext) -> Any:
    from enginery_attn_fla.backend import ChunkedAttention
    from enginery_attn_fla.kernels import load_kernels

    return ChunkedAttention(context, load_kernels())


PAIR = (stand_in_spec(), stand_in)
ON_CUDA = (dataclasses.replace(FLA, options=AlwaysChunks), on_cuda)
