"""MLPs and experts without a gate, down(relu(up(x))^2), as Nemotron-H has them.

T tokens, C hidden size, E experts, I an expert's inner size, L width of what experts are given, K experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from enginery.api import Cut, LinearShape, ModelContext, Routing, WeightSource


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
    """Each token's few of many such MLPs, weighted and summed, by grouped products.

    The host waits for no number, unless a rank has some of the experts alone.
    """

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
        width = latent or hidden
        self.router = weights.take("gate.weight", (count, hidden), dtype=torch.float32)
        self.bias = weights.take("gate.e_score_correction_bias", (count,), dtype=torch.float32)
        self.num_experts, self.own = count, (own := weights.own_experts(count))
        rows, columns = (Cut.ROWS, Cut.COLUMNS) if len(own) == count else (Cut.NONE, Cut.NONE)
        held = len(weights.share(inner)) if len(own) == count else inner  # of an expert's inner size
        self.up = torch.empty(len(own), held, width, dtype=context.dtype, device=context.device)  # [E, I, L]
        self.down = torch.empty(len(own), width, held, dtype=context.dtype, device=context.device)
        for index, up, down in zip(own, self.up, self.down, strict=True):
            expert = weights.scope(f"experts.{index}")
            up[:] = expert.take("up_proj.weight", (inner, width), cut=rows)
            down[:] = expert.take("down_proj.weight", (width, inner), cut=columns)
        self.before, self.behind = (
            weights.linear(LinearShape(names=(name,), rows=(rows,), columns=columns)) if latent else None
            for name, rows, columns in (("fc1_latent_proj", width, hidden), ("fc2_latent_proj", hidden, width))
        )
        self.route, self.routing = context.ops.route, routing

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        routed = self.route(F.linear(x.float(), self.router), self.bias, self.routing)
        given = x if self.before is None else self.before(x)  # [T, L]
        order, offsets = self._by_expert(routed.ids.flatten().long())
        hidden = F.grouped_mm(given[order // self.routing.top_k], self.up.transpose(1, 2), offs=offsets)
        made = F.grouped_mm(F.relu(hidden).square_(), self.down.transpose(1, 2), offs=offsets)
        made = made.float() * routed.weights.flatten()[order, None]
        out = torch.zeros_like(given, dtype=torch.float32).index_add_(0, order // self.routing.top_k, made).to(x.dtype)
        return out if self.behind is None else self.behind(out)

    def _by_expert(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T K] -> the pairs in the order of experts, and where each one's end: of all experts, or of this rank's."""
        ends = F.one_hot(ids, self.num_experts).sum(0).cumsum(0).to(torch.int32)
        order = ids.argsort(stable=True)
        if len(self.own) == self.num_experts:
            return order, ends
        first, last = (int(ends[place - 1]) if place else 0 for place in (self.own.start, self.own.stop))
        return order[first:last], ends[self.own.start : self.own.stop] - first
