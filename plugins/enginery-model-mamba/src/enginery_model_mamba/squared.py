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
    """Each token's few of many such MLPs, weighted and summed, by grouped products. The host waits for no number."""

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
        ids = (routed.ids.long() - self.own.start) % self.num_experts  # [T, K]: this rank's are the first
        out = (self._each if given.is_cuda and given.dtype != torch.bfloat16 else self._grouped)(given, ids, routed.weights)
        return out.to(x.dtype) if self.behind is None else self.behind(out.to(x.dtype))

    def _grouped(self, given: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, L], [T, K], [T, K] -> [T, L] float32."""
        order = ids.flatten().argsort(stable=True)
        ends = F.one_hot(ids.flatten(), self.num_experts).sum(0).cumsum(0)[: len(self.own)].to(torch.int32)
        tokens = order // self.routing.top_k
        hidden = F.grouped_mm(given[tokens], self.up.transpose(1, 2), offs=ends)
        made = F.grouped_mm(F.relu(hidden).square_(), self.down.transpose(1, 2), offs=ends)
        made = made.float() * weights.flatten()[order, None]
        if len(self.own) < self.num_experts:  # behind this rank's pairs nothing was written
            made = made.where(torch.arange(len(order), device=order.device)[:, None] < ends[-1], 0)
        return torch.zeros_like(given, dtype=torch.float32).index_add_(0, tokens, made)

    def _each(self, given: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same by every expert for every token: on a GPU `grouped_mm` reads its offsets on the host, but of bfloat16."""
        out = torch.zeros_like(given, dtype=torch.float32)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            weight = torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
            out += weight * F.linear(F.relu(F.linear(given, up)).square_(), down)
        return out
