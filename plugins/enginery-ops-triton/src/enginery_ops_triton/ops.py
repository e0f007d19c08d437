"""The operations as the core calls them: shapes, strides, block sizes. What a kernel cannot take goes to the core's reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from enginery.api import ExpertBiases, ExpertsFn, ExpertsShape, LinearFn, NormGate, Routed, Routing, SamplingTensors, StoredWeight
from enginery.nn import reference_ops
from enginery_ops_triton.experts import bind_experts, bind_squared_experts
from enginery_ops_triton.kernels import activation, embedding, latents, norm, rotary
from enginery_ops_triton.kernels.launch import next_power_of_2
from enginery_ops_triton.routing import route, route_gated
from enginery_ops_triton.sampling import draw_rows, greedy_sample
from enginery_ops_triton.small_linear import bind_router, bind_small_linear

GATE_BLOCK: Final = 1024
EMBED_BLOCK: Final = 2048
HEADS_PER_PROGRAM: Final = 8
MANY_TOKENS, VALUES_PER_PROGRAM = 256, 2048
NORM_BLOCK: Final = 1024


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [N, C] with adjacent columns; a view where there can be one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _are_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel reads them: [T, H, D], without gaps in a token, of one type."""
    beside = all(given.stride()[1:] == (x.shape[-1], 1) for given in (x, gate))
    return beside and x.dtype == weight.dtype == gate.dtype


def rotated_together(num_tokens: int, num_heads: int, dim: int) -> int:
    """Heads that a program rotates, a power of two: of few tokens few, for more programs; of many tokens 16 values a thread."""
    most = HEADS_PER_PROGRAM
    if num_tokens >= MANY_TOKENS:
        most = max(most, VALUES_PER_PROGRAM // next_power_of_2(dim))
    return min(most, next_power_of_2(num_heads))


@dataclass(frozen=True, kw_only=True)
class TritonOps:
    """dependent_launch: kernels start while the one before them still runs (compute capability 9.0)."""

    dependent_launch: bool

    def bind_linear(self, weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
        """Own kernels for a few rows, torch for more."""
        if isinstance(weight, StoredWeight):
            return reference_ops.bind_linear(weight, bias)
        return bind_small_linear(weight, bias, dependent_launch=self.dependent_launch)

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the table, which must exist: nothing checks ids."""
        if table.stride(1) != 1 or ids.dim() != 1:
            return reference_ops.embed(table, ids)
        columns = table.shape[1]
        out = torch.empty((len(ids), columns), dtype=table.dtype, device=table.device)
        block = min(EMBED_BLOCK, next_power_of_2(columns))
        if len(ids):
            embedding.embed[(len(ids), -(-columns // block))](
                table,
                ids.contiguous(),
                out,
                table.stride(0),
                COLUMNS=columns,
                BLOCK=block,
                CHAINED=self.dependent_launch,
                num_warps=4,
                launch_pdl=self.dependent_launch,
            )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension; a weight per head broadcasts, by the reference."""
        if weight.dim() != 1:
            return reference_ops.rms_norm(x, weight, eps)
        rows = _rows(x)
        return self._norm(rows, None, weight, eps).view(x.shape)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The norm of residual + x; residual keeps the sum."""
        if residual.dim() != 2 or residual.stride(-1) != 1:
            return reference_ops.add_rms_norm(x, residual, weight, eps)
        return self._norm(_rows(x), residual, weight, eps)

    def _norm(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        num_rows, columns = x.shape
        summed = x if residual is None else residual
        out = torch.empty((num_rows, columns), dtype=torch.promote_types(summed.dtype, weight.dtype), device=x.device)
        block = next_power_of_2(columns)
        norm.rms_norm[(num_rows,)](
            x,
            summed,
            weight.contiguous(),
            out,
            x.stride(0),
            summed.stride(0),
            eps,
            COLUMNS=columns,
            BLOCK=block,
            ADD=residual is not None,
            CHAINED=self.dependent_launch,
            num_warps=min(max(block // 512, 1), 16),
            launch_pdl=self.dependent_launch,
        )
        return out

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gating: NormGate
    ) -> torch.Tensor:
        """The heads of a token stand side by side."""
        if not _are_gated(x, gate, weight):
            return reference_ops.gated_rms_norm(x, gate, weight, eps, gating)
        return self._gated_norm(x, gate, weight, eps, gating)

    def gated_group_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gating: NormGate, gate_first: bool
    ) -> torch.Tensor:
        """The groups of a token stand side by side."""
        if not _are_gated(x, gate, weight):
            return reference_ops.gated_group_norm(x, gate, weight, eps, gating, gate_first)
        return self._gated_norm(x, gate, weight, eps, gating, gate_first=gate_first)

    def _gated_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        gating: NormGate,
        *,
        gate_first: bool = False,
    ) -> torch.Tensor:
        num_tokens, num_heads, dim = x.shape
        out = torch.empty((num_tokens, num_heads, dim), dtype=x.dtype, device=x.device)
        block_dim = next_power_of_2(dim)
        per_program = min(next_power_of_2(num_heads), max(1, NORM_BLOCK // block_dim))
        if num_tokens:
            norm.gated_rms_norm[(num_tokens, -(-num_heads // per_program))](
                x,
                gate,
                weight.contiguous(),
                out,
                x.stride(0),
                gate.stride(0),
                eps,
                HEADS=num_heads,
                DIM=dim,
                BLOCK_HEADS=per_program,
                BLOCK_DIM=block_dim,
                BY_HEAD=weight.dim() == 2,
                SIGMOID=gating == "sigmoid",
                GATE_FIRST=gate_first,
                CHAINED=self.dependent_launch,
                num_warps=min(max(per_program * block_dim // 512, 4), 16),
                launch_pdl=self.dependent_launch,
            )
        return out

    def qk_norm_rotary(self, qk: torch.Tensor, weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor) -> None:
        """In place on [T, N, D], whose tokens and heads may be any distance apart."""
        if qk.stride(-1) != 1 or cos_sin.stride(-1) != 1:
            reference_ops.qk_norm_rotary(qk, weight, eps, cos_sin)
            return
        self._rotate(qk, weight, eps, cos_sin, num_query=qk.shape[1], num_rotated=qk.shape[1])

    def qk_norm_rotary_write(
        self,
        qkv: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        *,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """`qk_norm_rotary` on the first H + K heads of qkv [T, H + 2K, D], then keys and values into their slots.

        keys, values: [num_slots, K, D], of one layout; slots: [T] int64.
        """
        num_kv = keys.shape[1]
        if qkv.stride(-1) != 1 or cos_sin.stride(-1) != 1 or keys.stride() != values.stride() or keys.stride(-1) != 1:
            raise ValueError(
                f"heads, angles, keys and values must have adjacent dims: {qkv.stride()=}, {keys.stride()=}, {values.stride()=}"
            )
        num_rotated = qkv.shape[1] - num_kv
        self._rotate(
            qkv, weight, eps, cos_sin, num_query=num_rotated - num_kv, num_rotated=num_rotated, stored=(keys, values, slots)
        )

    def _rotate(
        self,
        heads: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        *,
        num_query: int,
        num_rotated: int,
        stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        num_tokens, num_heads, dim = heads.shape
        rotary_dim = cos_sin.shape[-1]
        keys, values, slots = stored or (heads, heads, heads)
        per_program = rotated_together(num_tokens, num_heads, dim)
        scale = heads if weight is None else weight.expand(num_rotated, dim)
        if scale.stride(-1) != 1:
            scale = scale.contiguous()
        rotary.rotate_heads[(num_tokens, -(-num_heads // per_program))](
            heads,
            scale,
            cos_sin,
            keys,
            values,
            slots,
            heads.stride(0),
            heads.stride(1),
            scale.stride(0),
            cos_sin.stride(0),
            keys.stride(0),
            keys.stride(1),
            eps,
            NUM_HEADS=num_heads,
            NUM_ROTATED=num_rotated,
            NUM_QUERY=num_query,
            DIM=dim,
            ROTARY=rotary_dim,
            BLOCK_HEADS=per_program,
            BLOCK_HALF=next_power_of_2(rotary_dim // 2),
            BLOCK_REST=next_power_of_2(dim - rotary_dim) if dim > rotary_dim else 0,
            NORM=weight is not None,
            WRITE=stored is not None,
            CHAINED=self.dependent_launch,
            num_warps=4 if per_program * dim >= 512 else 1,
            launch_pdl=self.dependent_launch,
        )

    def latent_norm_rotary_write(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        *,
        stored: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """q: [T, H, N + P], rows: the latents [T, R + P], any distance apart; stored: [num_slots, R + P]; slots: [T] int64."""
        num_tokens, num_heads, dim = q.shape
        rank, rotary_dim = len(weight), cos_sin.shape[-1]
        if any(each.stride(-1) != 1 for each in (q, rows, weight, cos_sin, stored)):
            raise ValueError(
                f"heads, latents and angles must have adjacent dims: {q.stride()=}, {rows.stride()=}, {stored.stride()=}"
            )
        per_program = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
        if num_tokens:
            latents.norm_rotate_write[(num_tokens, 1 + -(-num_heads // per_program))](
                q,
                rows,
                weight,
                cos_sin,
                stored,
                slots,
                q.stride(0),
                q.stride(1),
                rows.stride(0),
                cos_sin.stride(0),
                stored.stride(0),
                eps,
                NUM_HEADS=num_heads,
                NOPE=dim - rotary_dim,
                RANK=rank,
                ROTARY=rotary_dim,
                BLOCK_HEADS=per_program,
                BLOCK_HALF=next_power_of_2(rotary_dim // 2),
                BLOCK_RANK=next_power_of_2(rank),
                CHAINED=self.dependent_launch,
                num_warps=4,
                launch_pdl=self.dependent_launch,
            )

    def gated_silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        return self._gated_halves(x, gelu=False)

    def gated_gelu(self, x: torch.Tensor) -> torch.Tensor:
        """The same with GELU by tanh."""
        return self._gated_halves(x, gelu=True)

    def _gated_halves(self, x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        rows = _rows(x)
        num_rows, columns = rows.shape[0], rows.shape[1] // 2
        out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
        block = min(GATE_BLOCK, next_power_of_2(columns))
        activation.gated_halves[(num_rows, -(-columns // block))](
            rows,
            out,
            rows.stride(0),
            COLUMNS=columns,
            BLOCK=block,
            GELU=gelu,
            CHAINED=self.dependent_launch,
            num_warps=4,
            launch_pdl=self.dependent_launch,
        )
        return out

    def gated_sigmoid(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gate)."""
        if x.dim() != 2 or x.stride(1) != 1 or gate.stride(1) != 1 or x.dtype != gate.dtype:
            return reference_ops.gated_sigmoid(x, gate)
        num_rows, columns = x.shape
        out = torch.empty((num_rows, columns), dtype=x.dtype, device=x.device)
        block = min(GATE_BLOCK, next_power_of_2(columns))
        activation.gated_sigmoid[(num_rows, -(-columns // block))](
            x,
            gate,
            out,
            x.stride(0),
            gate.stride(0),
            COLUMNS=columns,
            BLOCK=block,
            CHAINED=self.dependent_launch,
            num_warps=4,
            launch_pdl=self.dependent_launch,
        )
        return out

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> Routed:
        """One program a token."""
        return route(logits, bias, routing, dependent_launch=self.dependent_launch)

    def route_gated(self, made: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> Routed:
        """The same kernel."""
        return route_gated(made, bias, routing, dependent_launch=self.dependent_launch)

    def bind_router(self, weight: torch.Tensor) -> LinearFn:
        """Own kernels for a few rows, torch for more."""
        return bind_router(weight, dependent_launch=self.dependent_launch)

    def bind_experts(
        self,
        gate_up: torch.Tensor | StoredWeight,
        down: torch.Tensor | StoredWeight,
        shape: ExpertsShape,
        biases: ExpertBiases | None = None,
    ) -> ExpertsFn:
        """A few tokens read the weights of each one's experts; more are sorted by expert and share them."""
        return bind_experts(gate_up, down, shape, biases, dependent_launch=self.dependent_launch)

    def bind_squared_experts(self, up: torch.Tensor, down: torch.Tensor) -> ExpertsFn:
        """The same kernels."""
        return bind_squared_experts(up, down, dependent_launch=self.dependent_launch)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Several programs a row."""
        return greedy_sample(logits, dependent_launch=self.dependent_launch)

    def draw_rows(self, logits: torch.Tensor, draws: SamplingTensors) -> torch.Tensor:
        """Several programs a row, one of a row that drops tokens."""
        return draw_rows(logits, draws, dependent_launch=self.dependent_launch)
