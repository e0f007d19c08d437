"""Kimi delta attention (arXiv:2510.26692): the delta rule with a decay for each channel.

T tokens, C hidden size, H heads, D dims of a head, W taps of the convolution.
"""

from __future__ import annotations

import dataclasses

import torch

from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.memory import RecurrentFacts, RecurrentWeights
from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import LinearShape
from enginery.nn.attention import take_out
from enginery.nn.recurrent import recurrent_facts, take_conv


class KimiDeltaAttention:
    """Queries, keys and values pass a convolution; the output's norm is gated by a sigmoid.

    The decay is a product of x, `f_proj`, and so is the gate, `g_proj`; or both have low rank: `f_a_proj`, `f_b_proj`, and so on.
    Their convolutions are apart, `q_conv1d` and so on, or one, `conv1d`.
    """

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        spec: LayerSpec,
        norm_eps: float,
        rank: int | None,
        decay_shape: tuple[int, ...],
    ) -> None:
        """spec: without `recurrent`, which is taken here. rank: of decay and gate, None for full. decay_shape: of `A_log`."""
        of, facts = recurrent_facts(context, spec)
        hidden, dim = context.facts.hidden_size, facts.value_dim
        whole, self.num_heads = of.value_heads * dim, facts.value_heads
        self._take_projections(weights, hidden, whole, rank, dim=dim)
        self.widen = None if rank is None else context.ops.bind_linear(self._widening(weights, whole, rank, dim=dim), None)
        own, is_joined = weights.share(of.value_heads), weights.has("conv1d.weight")
        recurrent = RecurrentWeights(
            conv=take_conv(weights, "conv1d", of)[0] if is_joined else _joined(context, weights, facts, whole),
            a_log=weights.take("A_log", decay_shape, dtype=torch.float32).flatten()[own.start : own.stop],
            dt_bias=weights.take("dt_bias", (whole,), dtype=torch.float32, cut=Cut.ROWS, unit=dim).view(-1, dim),
        )
        self.spec, self.norm_eps = dataclasses.replace(spec, recurrent=recurrent), norm_eps
        self.norm = weights.take("o_norm.weight", (dim,))
        self.out = take_out(weights, "o_proj", hidden=hidden, heads=whole // dim, dim=dim)
        self.gated_rms_norm, self.advance = context.ops.gated_rms_norm, context.advance

    def _take_projections(self, weights: WeightSource, hidden: int, whole: int, rank: int | None, *, dim: int) -> None:
        """One product for all that comes from the hidden state.

        What has low rank is whole on every rank. whole: the dims of all heads, of all ranks.
        """
        cut, ends = (Cut.ROWS,) * 4, ("f_proj", "g_proj") if rank is None else ("f_a_proj", "g_a_proj")
        of_ends = (Cut.ROWS,) * 2 if rank is None else (Cut.NONE,) * 2
        low, unit = (whole, dim) if rank is None else (rank, 1)
        self.entry = self.projected = weights.linear(
            LinearShape(
                names=("q_proj", "k_proj", "v_proj", "b_proj", *ends),
                rows=(whole, whole, whole, whole // dim, low, low),
                columns=hidden,
                cut=cut + of_ends,
                unit=(dim, dim, dim, 1, unit, unit),
            )
        )
        rows = self.projected.rows
        self.rows = [sum(rows[:3]), *rows[3:]]

    def _widening(self, weights: WeightSource, whole: int, rank: int, *, dim: int) -> torch.Tensor:
        """Of decay and gate of low rank: one product of (beta, decay, gate) as they come to (decay, beta, gate) as they go on.

        [H D + H + H D, H + 2 rank]: ones for beta, zeros where a part does not count.
        """
        decay, gate = (weights.take(f"{name}.weight", (whole, rank), cut=Cut.ROWS, unit=dim) for name in ("f_b_proj", "g_b_proj"))
        made, heads = decay.new_zeros(len(decay) + self.num_heads + len(gate), self.num_heads + 2 * rank), self.num_heads
        made[: len(decay), heads : heads + rank] = decay
        made[len(decay) : len(decay) + heads, :heads].fill_diagonal_(1.0)
        made[len(decay) + heads :, heads + rank :] = gate
        return made

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum. It has no positions."""
        made = self.projected(x)
        if self.widen is None:
            mixed, beta, decay, gate = torch.split(made, self.rows, dim=-1)
            gates = torch.cat((decay, beta), dim=-1)
        else:
            mixed, low = made[:, : self.rows[0]], made[:, self.rows[0] :]
            gates, gate = torch.tensor_split(self.widen(low), [self.num_heads * (len(self.norm) + 1)], dim=-1)
        out = torch.empty((len(x), self.num_heads, len(self.norm)), dtype=x.dtype, device=x.device)  # [T, H, D]
        self.advance(mixed, gates, self.spec, batch, out)
        return self.out(self.gated_rms_norm(out, gate.view(out.shape), self.norm, self.norm_eps, "sigmoid").view(len(x), -1))


def _joined(context: ModelContext, weights: WeightSource, facts: RecurrentFacts, whole: int) -> torch.Tensor:
    """The convolutions of queries, keys and values, [3 H D, W]. whole: H D of all ranks. Not by `torch.cat`, whose shapes alone
    bring torch's compiler in."""
    dim, taps = facts.value_dim, facts.conv_kernel
    made = torch.empty(3, facts.value_heads * dim, taps, dtype=context.dtype, device=context.device)
    for part, name in zip(made, "qkv", strict=True):
        part[:] = weights.take(f"{name}_conv1d.weight", (whole, 1, taps), cut=Cut.ROWS, unit=dim).squeeze(1)
    return made.flatten(0, 1)
