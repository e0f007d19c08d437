"""From what a layer gives `advance` to fla-core's chunked kernels. S rows of N requests, H value heads, K, V: dims of a head."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from enginery.api import RecurrentFacts, RecurrentWeights
from enginery_attn_delta.backend import heads_of

CHUNK: Final = 64  # tokens
_LOG2_E: Final = 1 / math.log(2.0)

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Kernels(NamedTuple):
    """fla-core's, each q, k, v [1, S, heads, dim] and keywords -> outputs [1, S, H, V], states after each request [N, H, V, K]."""

    gated_delta_rule: Kernel
    kda: Kernel
    simple_gla: Kernel


def load_kernels() -> Kernels:
    """Import them: 17 s when nothing is cached. What fla-core warns of then is about parts of it that nobody uses here.

    Two of its public functions are not told which chunks there are. They find out from `cu_seqlens` and upload that from pageable
    memory, for which the host waits until the device has nothing left to do. So what is called is what those call.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.modules.norm.l2norm import l2norm_fwd  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from fla.ops.kda.chunk_fwd import chunk_kda_fwd  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from fla.ops.utils import chunk_local_cumsum  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made, after = chunk_gated_delta_rule(q, k, v, use_qk_l2norm_in_kernel=True, **given)
        return made, after

    def kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (l2norm_fwd(part.contiguous())[0] for part in (q, k))
        made, after, *_ = chunk_kda_fwd(q, k, v.contiguous(), **given)
        return made.to(q.dtype), after

    def simple_gla(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        g: torch.Tensor | None = None,
        g_gamma: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor,
        **given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if g is not None:  # powers of 2 from here on
            g = chunk_local_cumsum(g, CHUNK, scale=_LOG2_E, cu_seqlens=given["cu_seqlens"], chunk_indices=given["chunk_indices"])
        if g_gamma is not None:
            g_gamma = g_gamma * _LOG2_E
        q, k, v = (part.contiguous() for part in (q, k, v))
        made, after = chunk_simple_gla_fwd(q, k, v, g=g, g_gamma=g_gamma, chunk_size=CHUNK, **given)
        return made.to(q.dtype), after

    return Kernels(delta, kda, simple_gla)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """Consecutive rows of N requests that have some. first_rows: [N + 1] int64, from 0, on the device and on the host.

    reads, writes: [N] int64, pages; fresh: [N, 1, 1, 1] bool, of requests that begin from zeros and read none; indices: [chunks, 2]
    int64, of each chunk of `CHUNK` tokens the request and which of its chunks it is; device.
    """

    rows: slice
    first_rows: torch.Tensor
    first_rows_cpu: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    fresh: torch.Tensor
    indices: torch.Tensor


def chunk_indices(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[chunks, 2], see `Chunks`. lengths: [N], tokens of each request."""
    counts = -(-lengths // CHUNK)
    request = np.repeat(np.arange(len(lengths)), counts)
    return np.stack([request, np.arange(len(request)) - (np.cumsum(counts) - counts)[request]], axis=1)


def can_chunk(facts: RecurrentFacts) -> bool:
    """Whether there is a chunked kernel for the rule; others run token by token."""
    return facts.rule in ("linear", "delta")


def run_chunks(
    kernels: Kernels,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    facts: RecurrentFacts,
    weights: RecurrentWeights,
    *,
    chunks: Chunks,
    matrix: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """mixed: [S, C], after the convolution; gates: [S, G]; matrix: [pages, H, V, K] float32, of which the write pages are written.

    Returns [S, H, V].
    """
    heads = heads_of(facts)
    keys, values = heads.num_keys * heads.key_dim, heads.num_values * heads.value_dim
    q, k = (mixed[None, :, at : at + keys].reshape(1, len(mixed), heads.num_keys, heads.key_dim) for at in (heads.q_at, heads.k_at))
    v = mixed[None, :, heads.v_at : heads.v_at + values].reshape(1, len(mixed), heads.num_values, heads.value_dim)
    given: dict[str, Any] = {
        "scale": scale,
        "initial_state": matrix.index_select(0, chunks.reads).masked_fill_(chunks.fresh, 0.0),  # [N, H, V, K]
        "output_final_state": True,
        "state_v_first": True,
        "cu_seqlens": chunks.first_rows,
        "cu_seqlens_cpu": chunks.first_rows_cpu,
        "chunk_indices": chunks.indices,
    }
    log_decay, steps = _decays(gates, facts, weights)
    if facts.rule == "delta":
        beta = gates[:, heads.num_values * heads.key_dim :] if facts.decay == "channel" else gates[:, : heads.num_values]
        kernel = kernels.kda if facts.decay == "channel" else kernels.gated_delta_rule
        made, after = kernel(q, k, v, g=log_decay[None], beta=beta.float().sigmoid()[None], **given)
    else:
        group = heads.num_values // heads.num_keys
        q, k = (part.repeat_interleave(group, dim=2) if group > 1 else part for part in (q, k))
        written = v if steps is None or not facts.ssm else (v * steps[None, ..., None]).to(v.dtype)
        decay = {"g_gamma": weights.log_decay} if facts.decay == "constant" else {"g": log_decay[None]}
        made, after = kernels.simple_gla(q, k, written, **decay, **given)
    matrix.index_copy_(0, chunks.writes, after)
    return made[0] if weights.skip is None else made[0] + (weights.skip[:, None] * v[0]).to(made.dtype)


def _decays(gates: torch.Tensor, facts: RecurrentFacts, weights: RecurrentWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logarithm of each row's decay, [S, H] or [S, H, K] float32, and the steps it is made of; nothing for a constant one."""
    if facts.decay == "constant" or weights.a_log is None:
        return gates, None
    heads, rate = facts.value_heads, weights.a_log.exp()
    if facts.decay == "channel":
        raw, rate = gates[:, : heads * facts.key_dim].float().reshape(-1, heads, facts.key_dim), rate[:, None]
    else:
        raw = gates[:, -heads:].float()
    if weights.dt_bias is not None:
        raw = raw + weights.dt_bias
    if facts.gate_floor is not None:
        return facts.gate_floor * (rate * raw).sigmoid(), None
    steps = F.softplus(raw).clamp(*facts.step_limits)
    return -rate * steps, steps
