"""Routing equals the core's reference, in the interpreter on a CPU and compiled on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise
from triton_devices import chained, on_devices

from enginery.api import Routing
from enginery.nn import reference_experts
from enginery_ops_triton.routing import route

ROUTERS = {
    "mixtral": (8, Routing(top_k=2, renormalise=True)),
    "qwen3": (128, Routing(top_k=8, renormalise=True)),
    "qwen2": (60, Routing(top_k=4)),
    "deepseek-v2": (160, Routing(top_k=6, num_groups=8, top_groups=3, scale=16.0)),
    "deepseek-v3": (
        256,
        Routing(top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_score="top2", renormalise=True, scale=2.5),
    ),
    "glm4": (128, Routing(top_k=8, scoring="sigmoid", renormalise=True)),
    "odd": (21, Routing(top_k=5, scoring="sigmoid", num_groups=3, top_groups=2, group_score="max", scale=0.5)),
    "softmax of groups by their two best": (20, Routing(top_k=3, num_groups=5, top_groups=2, group_score="top2")),
    "largest": (512, Routing(top_k=16)),
    "one expert": (1, Routing(top_k=1)),
    "shared ones behind": (64, Routing(top_k=6, scale=2.0, num_shared=2)),
}


@on_devices
@pairwise(("name", ROUTERS), ("corrected", [False, True]), ("num_tokens", [1, 7]))
def test_routing_equals_the_reference(name: str, corrected: bool, num_tokens: int, device: str) -> None:
    torch.manual_seed(num_tokens)
    num_experts, routing = ROUTERS[name]
    logits = torch.randn(num_tokens, num_experts + 3)[:, :num_experts]
    bias = torch.rand(num_experts) if corrected else None
    expected = reference_experts.route(logits, bias, routing)
    wide = torch.zeros(num_tokens, num_experts + 3, device=device)
    wide[:, :num_experts] = logits
    actual = route(wide[:, :num_experts], None if bias is None else bias.to(device), routing, dependent_launch=chained(device))
    assert actual.ids.dtype == torch.int32
    assert torch.equal(actual.ids.cpu(), expected.ids)
    torch.testing.assert_close(actual.weights.cpu(), expected.weights, atol=1e-6, rtol=1e-5)


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_widens_logits_of_the_models_type(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, 128).to(dtype)
    expected = reference_experts.route(logits, None, ROUTERS["qwen3"][1])
    actual = route(logits.to(device), None, ROUTERS["qwen3"][1], dependent_launch=chained(device))
    assert torch.equal(actual.ids.cpu(), expected.ids)
    torch.testing.assert_close(actual.weights.cpu(), expected.weights, atol=1e-6, rtol=1e-5)


@on_devices
@pytest.mark.parametrize("name", ROUTERS)
def test_no_tokens_have_no_experts(name: str, device: str) -> None:
    num_experts, routing = ROUTERS[name]
    found = route(torch.empty(0, num_experts, device=device), None, routing, dependent_launch=chained(device))
    assert found.ids.shape == found.weights.shape == (0, routing.top_k + routing.num_shared)


@on_devices
def test_of_equal_scores_the_first_experts_are_taken_and_of_equal_groups_the_first(device: str) -> None:
    logits = torch.zeros(3, 16, device=device)
    logits[1, [9, 14]] = 1
    routing = Routing(top_k=4, num_groups=4, top_groups=2)
    found = route(logits, None, routing, dependent_launch=chained(device))
    assert found.ids.tolist() == [[0, 1, 2, 3], [9, 14, 8, 10], [0, 1, 2, 3]]


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_two_bytes_are_ranked_by_size_and_of_equal_ones_the_first_expert(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(2)
    logits = torch.randint(-3, 4, (5, 512)).to(dtype) / 2  # each number some 70 times, also negative
    routing = Routing(top_k=100, renormalise=True)
    expected = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :100]
    found = route(logits.to(device), None, routing, dependent_launch=chained(device))
    assert torch.equal(found.ids.cpu().long(), expected)
    shares = logits.double().softmax(1).gather(1, expected)
    torch.testing.assert_close(found.weights.cpu().double(), shares / shares.sum(1, keepdim=True), atol=1e-7, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_numbers_still_give_experts_that_exist_and_are_different(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(4, 24, device=device).to(dtype)
    logits[0] = float("nan")
    logits[1, ::2] = float("nan")
    logits[2] = float("-inf")
    logits[3] = float("inf")
    for _, routing in ROUTERS.values():
        if routing.top_k <= 8 and 24 % routing.num_groups == 0 and routing.num_groups <= 8:
            ids = route(logits, None, routing, dependent_launch=chained(device)).ids.cpu()
            assert ((ids >= 0) & (ids < 24 + routing.num_shared)).all()
            assert all(len(set(row)) == routing.top_k + routing.num_shared for row in ids.tolist())
