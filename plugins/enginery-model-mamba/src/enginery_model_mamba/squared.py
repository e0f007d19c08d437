"""MLPs and experts without a gate, down(relu(up(x))^2), as Nemotron-H has them.

T tokens, C hidden size, E experts, I an expert's inner size, L width of what experts are given, K experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from enginery.api import Cut, LinearShape, ModelContext, Routing, WeightSource
from enginery.nn.moe import OwnExperts, take_wide_router


class SquaredMLP:
    """down(relu(up(x))^2)."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, inner: int, bias: bool) -> None:
        hidden, weights = context.facts.hidden_size, weights.over_lanes()
        self.up = weights.linear(LinearShape(names=("up_proj",), rows=(inner,), columns=hidden, cut=Cut.ROWS, bias=bias))
        self.down = weights.linear(
            LinearShape(names=("down_proj",), rows=(hidden,), columns=inner, cut=Cut.COLUMNS, bias=bias, complete=False)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        return self.down(F.relu(self.up(x)).square_())


class SquaredExperts:
    """Each token's few of many such MLPs, weighted and summed."""

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        count: int,
        inner: int,
        latent: int | None,
        routing: Routing,
    ) -> None:
        """latent: L, where experts are given a projection of x; None: x itself."""
        hidden, weights = context.facts.hidden_size, weights.over_lanes()
        width, own = latent or hidden, weights.own_experts(count)
        self.router = take_wide_router(context, weights, "gate", (count, hidden))
        self.bias = weights.take("gate.e_score_correction_bias", (count,), dtype=torch.float32)
        rows, columns = (Cut.ROWS, Cut.COLUMNS) if len(own) == count else (Cut.NONE, Cut.NONE)
        held = len(weights.share(inner)) if len(own) == count else inner  # of an expert's inner size
        up = torch.empty(len(own), held, width, dtype=context.dtype, device=context.device)  # [E, I, L]
        down = torch.empty(len(own), width, held, dtype=context.dtype, device=context.device)
        for index, of_up, of_down in zip(own, up, down, strict=True):
            expert = weights.scope(f"experts.{index}")
            of_up[:] = expert.take("up_proj.weight", (inner, width), cut=rows)
            of_down[:] = expert.take("down_proj.weight", (width, inner), cut=columns)
        bound = context.ops.bind_squared_experts(up, down)
        self.experts = bound if len(own) == count else OwnExperts(bound, own)
        self.before, self.behind = (
            weights.linear(LinearShape(names=(name,), rows=(rows,), columns=columns)) if latent else None
            for name, rows, columns in (("fc1_latent_proj", width, hidden), ("fc2_latent_proj", hidden, width))
        )
        self.route, self.routing = context.ops.route, routing

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        out = self.experts(x if self.before is None else self.before(x), self.route(self.router(x), self.bias, self.routing))
        return out if self.behind is None else self.behind(out)
