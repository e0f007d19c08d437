"""Norms of groups of heads that are divided among ranks, as a family gets them, beside the same norm in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from enginery.contracts.ops import NormGate
from enginery.contracts.parallel import ParallelFacts
from enginery.nn.norm import GroupedNorm
from enginery.nn.reference_ops import reference_ops
from enginery.testing.kits.ranks import Meeting, ThreadCollectives
from enginery.testing.kits.weights import WholeTensors, weights_of

DIM, EPS = 8, 1e-3


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"),
    [(4, 1, 1), (4, 1, 2), (4, 2, 4), (4, 4, 4), (2, 1, 4), (2, 1, 8), (4, 2, 8), (6, 3, 2), (1, 1, 4)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize(("gating", "gate_first"), [("silu", True), ("sigmoid", False)], ids=str)
def test_a_group_is_normed_as_one_however_many_ranks_have_its_heads(
    heads: int, groups: int, ranks: int, gating: NormGate, gate_first: bool
) -> None:
    size = heads * DIM
    x, gate, weight = torch.randn((11, size), generator=torch.Generator().manual_seed(0)).split([5, 5, 1])
    opened = gate.double().sigmoid() * (gate.double() if gating == "silu" else 1)
    wide = (x.double() * opened if gate_first else x.double()).view(5, groups, -1)
    expected = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).view(5, size) * weight.double()
    expected = expected if gate_first else expected * opened
    meeting, ops = Meeting(ranks), reference_ops()

    def on(rank: int) -> tuple[range, torch.Tensor]:
        place = ParallelFacts(tensor_size=ranks, tensor_rank=rank)
        comm = ThreadCollectives(place, meeting, meeting, ops, 0)
        source = weights_of(WholeTensors({"norm.weight": weight[0]}, torch.float32), ops=ops, comm=comm, parallel=place)
        context = cast(Any, SimpleNamespace(comm=comm, device="cpu", ops=ops))
        norm = GroupedNorm(context, source, "norm", size=size, groups=groups, unit=DIM, eps=EPS)
        own = source.share(size, unit=DIM)
        columns = slice(own.start, own.stop)
        return own, norm(x[:, columns], gate[:, columns], gating, gate_first=gate_first)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(on, range(ranks)))
    assert {column for own, _ in found for column in own} == set(range(size))
    for own, normed in found:
        assert torch.allclose(normed.double(), expected[:, own.start : own.stop], atol=1e-6, rtol=1e-5)
