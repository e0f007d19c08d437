"""MLPs and experts without a gate, down(relu(up(x))^2), as Nemotron-H has them.

T tokens, C hidden size, E experts, I an expert's inner size, L width of what experts are given, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from enginery.api import Cut, ForwardBatch, LinearShape, ModelContext, Routing, WeightSource


class WithoutPositions:
    """A block of a layer that has no memory."""

    def __init__(self, block: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._block = block

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self._block(x)


class SquaredMLP:
    """down(relu(up(x))^2)."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, inner: int, bias: bool) -> None:
        hidden = context.facts.hidden_size
        self.up = weights.linear(LinearShape(names=("up_proj",), rows=(inner,), columns=hidden, cut=Cut.ROWS, bias=bias))
        self.down = weights.linear(
            LinearShape(names=("down_proj",), rows=(hidden,), columns=inner, cut=Cut.COLUMNS, bias=bias, complete=False)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        return self.down(F.relu(self.up(x)).square_())


class SquaredExperts:
    """Each token's few of many such MLPs, weighted and summed, by grouped products: the host waits for no number."""

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
        hidden = context.facts.hidden_size
        width = latent or hidden
        self.router = weights.take("gate.weight", (count, hidden), dtype=torch.float32)
        self.bias = weights.take("gate.e_score_correction_bias", (count,), dtype=torch.float32)
        each = [weights.scope(f"experts.{index}") for index in range(count)]
        self.up = torch.stack([expert.take("up_proj.weight", (inner, width), cut=Cut.ROWS) for expert in each])  # [E, I, L]
        self.down = torch.stack([expert.take("down_proj.weight", (width, inner), cut=Cut.COLUMNS) for expert in each])
        self.before, self.behind = (
            weights.linear(LinearShape(names=(name,), rows=(rows,), columns=columns)) if latent else None
            for name, rows, columns in (("fc1_latent_proj", width, hidden), ("fc2_latent_proj", hidden, width))
        )
        self.route, self.routing = context.ops.route, routing

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        routed = self.route(F.linear(x.float(), self.router), self.bias, self.routing)
        given = x if self.before is None else self.before(x)  # [T, L]
        order = routed.ids.flatten().argsort(stable=True)  # [T K]
        counts = F.one_hot(routed.ids.flatten().long(), len(self.up)).sum(0)
        offsets = counts.cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(given[order // self.routing.top_k], self.up.transpose(1, 2), offs=offsets)
        made = F.grouped_mm(F.relu(hidden).square_(), self.down.transpose(1, 2), offs=offsets)
        made = made.float() * routed.weights.flatten()[order, None]
        out = torch.zeros_like(given, dtype=torch.float32).index_add_(0, order // self.routing.top_k, made).to(x.dtype)
        return out if self.behind is None else self.behind(out)
