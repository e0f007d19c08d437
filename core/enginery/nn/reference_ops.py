"""Plain torch for every operation: correct on every device, and what faster ones are tested against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F

from enginery.contracts.ops import LEAST_TEMPERATURE, LinearFn, NormGate, OpTable, SamplingTensors
from enginery.contracts.weights import SILU, Activation, Scheme, StoredWeight
from enginery.nn.activation import gated
from enginery.nn.reference_experts import bind_experts, bind_squared_experts, route, route_gated
from enginery.nn.stored import FLOAT4_BLOCKS, FLOAT8_BLOCKS, widen

# Experts are widened one by one, when they are used, and take half the memory; products at once, when they are read.
REFERENCE_SCHEMES: Final[Mapping[str, frozenset[Scheme]]] = {"bind_experts": frozenset({FLOAT8_BLOCKS, FLOAT4_BLOCKS})}
GELU_BY_TANH: Final = Activation(kind="gelu_tanh")
_STRIDE, _MULTIPLIER = 0x9E3779B9 - (1 << 32), 0xD35A2D97 - (1 << 32)  # as int32


def reference_ops() -> OpTable:
    """The table that plugins override in part."""
    return OpTable(
        embed=embed,
        bind_linear=bind_linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        gated_rms_norm=gated_rms_norm,
        gated_group_norm=gated_group_norm,
        qk_norm_rotary=qk_norm_rotary,
        qk_norm_rotary_write=qk_norm_rotary_write,
        latent_norm_rotary_write=latent_norm_rotary_write,
        gated_silu=gated_silu,
        gated_gelu=gated_gelu,
        gated_sigmoid=gated_sigmoid,
        route=route,
        route_gated=route_gated,
        bind_router=bind_router,
        bind_experts=bind_experts,
        bind_squared_experts=bind_squared_experts,
        greedy=greedy,
        sample_rows=sample_rows,
        draw_rows=draw_rows,
    )


def embed(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`F.embedding`, which has its arguments the other way round."""
    return F.embedding(ids, table)


def bind_linear(weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
    """`F.linear` with its weight bound. A stored weight is widened at each call."""
    if isinstance(weight, StoredWeight):
        stored = weight
        return lambda x: F.linear(x, widen(stored, x.dtype), bias)
    plain = weight
    return lambda x: F.linear(x, plain, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension; weight broadcasts."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of residual + x; residual keeps the sum."""
    return rms_norm(residual.add_(x), weight, eps)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gating: NormGate) -> torch.Tensor:
    """The norm of each head times a function of its gate, which is not rounded before."""
    return (rms_norm(x, weight, eps) * opened(gate, gating)).to(x.dtype)


def gated_group_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gating: NormGate, gate_first: bool
) -> torch.Tensor:
    """The same of groups; with the gate first the norm is of what is not rounded yet."""
    if not gate_first:
        return gated_rms_norm(x, gate, weight, eps, gating)
    wide = x.float() * opened(gate, gating)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def opened(gate: torch.Tensor, gating: NormGate) -> torch.Tensor:
    """What a gate multiplies by, in float32."""
    return F.silu(gate.float()) if gating == "silu" else gate.float().sigmoid()


def bind_router(weight: torch.Tensor) -> LinearFn:
    """A GPU adds up products of half precision in float32, and gives them so."""
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    if weight.is_cuda and weight.dtype.itemsize == 2:
        return lambda x: torch.mm(x, weight.T, out_dtype=wide)
    return lambda x: F.linear(x.to(wide), weight.to(wide))


def qk_norm_rotary(qk: torch.Tensor, weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor) -> None:
    """Norm each head (if there is a weight), then rotate pairs (d, d + R/2) by the position's angle, in place."""
    if weight is not None:
        qk.copy_(rms_norm(qk, weight, eps))
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]  # [T, 1, R/2]
    first, second = qk[..., :half], qk[..., half : 2 * half]  # [T, N, R/2]
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


def qk_norm_rotary_write(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`qk_norm_rotary` on queries and keys, then keys and values into their slots."""
    num_kv = keys.shape[1]
    rotated = qkv.shape[1] - num_kv
    qk_norm_rotary(qkv[:, :rotated], weight, eps, cos_sin)
    store_rows(keys, slots, qkv[:, rotated - num_kv : rotated])
    store_rows(values, slots, qkv[:, rotated:])


def latent_norm_rotary_write(
    q: torch.Tensor,
    latents: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    *,
    stored: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Norm and rotate the latents, rotate the queries, then latents into their slots."""
    rank, rotary_dim = len(weight), cos_sin.shape[-1]
    latents[:, :rank] = rms_norm(latents[:, :rank], weight, eps)
    qk_norm_rotary(q[..., -rotary_dim:], None, eps, cos_sin)
    qk_norm_rotary(latents[:, None, rank:], None, eps, cos_sin)
    store_rows(stored, slots, latents)


def store_rows(stored: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """stored[slots[i]] = rows[i]. What a float8 cannot hold becomes its largest number."""
    if stored.dtype.itemsize > 1:
        stored.index_copy_(0, slots, rows.to(stored.dtype))
        return
    most = torch.finfo(stored.dtype).max
    narrow = rows.clamp(-most, most).to(stored.dtype)
    stored.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))


def gated_silu(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (arXiv:2002.05202): [T, 2I], the gates before the ups, to [T, I]."""
    return gated(x, SILU)


def gated_gelu(x: torch.Tensor) -> torch.Tensor:
    """The same with GELU by tanh (arXiv:1606.08415)."""
    return gated(x, GELU_BY_TANH)


def gated_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The gate of attention's output (arXiv:2505.06708)."""
    return x * gate.sigmoid()


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row."""
    return logits.argmax(-1)


def sample_rows(logits: torch.Tensor, draws: SamplingTensors) -> torch.Tensor:
    """Inverse transform sampling over the kept tokens in the order of their indices; see `SamplingTensors`."""
    heat = draws.temperature[:, None]  # [N, 1]
    scaled = logits.float() / heat.clamp(min=LEAST_TEMPERATURE)
    weights = scaled.softmax(-1)  # [N, V]
    if draws.cut:
        weights.masked_fill_(~_kept(scaled, draws), 0)
    return torch.where(draws.temperature < LEAST_TEMPERATURE, greedy(logits), _invert(weights, draws.uniform))


def _kept(scaled: torch.Tensor, draws: SamplingTensors) -> torch.Tensor:
    """Which tokens no cut drops: [N, V] bool."""
    vocab_size = scaled.shape[-1]
    top_k, top_p, min_p = draws.top_k[:, None], draws.top_p[:, None], draws.min_p[:, None]  # [N, 1]
    whole = draws.most_kept >= vocab_size
    best, tokens = scaled.sort(dim=-1, descending=True, stable=True) if whole else scaled.topk(draws.most_kept, dim=-1)  # [N, k]
    rank = torch.arange(best.shape[-1], device=best.device)
    beyond = (top_k > 0) & (rank >= top_k)  # [N, k]
    shares = best.masked_fill(beyond, float("-inf")).softmax(-1)
    before = shares.cumsum(-1) - shares  # of the likelier ones
    dropped = beyond | (before >= top_p) | (shares < shares[:, :1] * min_p)
    dropped[:, 0] = False
    return torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, tokens, ~dropped)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative weight exceeds `uniform` times the total. [N, V] -> [N].

    A `uniform` that rounds to 1 would end beyond the last column, or on one without weight; it gets the last one that has some.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    last = torch.searchsorted(cumulative, total)  # the first column to reach it
    return torch.minimum(torch.searchsorted(cumulative, uniform[:, None] * total, right=True), last).squeeze(1)


def draw_rows(logits: torch.Tensor, draws: SamplingTensors) -> torch.Tensor:
    """The largest of the kept logits with noise (Gumbel-max, arXiv:1411.0030); see `OpTable`. Equal ones: the first."""
    scaled = logits.float() / draws.temperature[:, None].clamp(min=LEAST_TEMPERATURE)
    noisy = scaled - exponentials(draws.uniform, logits.shape[-1]).log_()  # [N, V]
    if draws.cut:
        noisy.masked_fill_(~_kept(scaled, draws), float("-inf"))
    return torch.where(draws.temperature < LEAST_TEMPERATURE, greedy(logits), greedy(noisy))


def exponentials(uniform: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """-log(1 - r), with r in (0, 1) by a hash of the bits of a row's number and a token's index: [N] float32 -> [N, V] float32."""
    indices = torch.arange(vocab_size, dtype=torch.int32, device=uniform.device) * _STRIDE
    hashed = _mixed(_mixed(uniform.view(torch.int32).clone())[:, None] ^ indices)  # [N, V]
    signed = hashed.float()
    below = torch.where(signed < 0, signed + 2.0**32, signed).add_(0.5).mul_(-(2.0**-32))  # -r
    return below.clamp_(min=2.0**-24 - 1).log1p_().neg_()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """In place, modulo 2^32: hash-prospector's [16 21f0aaad 15 d35a2d97 15] (github.com/skeeto/hash-prospector)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_MULTIPLIER)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
