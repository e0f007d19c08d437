"""Layers of experts in MXFP4, what they are given, and what they give in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton_devices import chained

from enginery.api import Activation, ExpertBiases, ExpertNames, ExpertsShape, Routed, Routing, StoredWeight
from enginery.nn import reference_experts
from enginery.nn.stored import widen
from enginery_ops_triton.expert_blocks import ProductBlock
from enginery_ops_triton.experts import Experts, bind_experts
from enginery_ops_triton.experts_float4 import Float4Experts
from enginery_ops_triton.spec import FLOAT4_BLOCKS

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CLAMPED = Activation(kind="clamped_swiglu", alpha=1.702, limit=7.0)
TIGHT = Activation(kind="clamped_swiglu", alpha=1.3, limit=0.4)  # most values are beyond it
ACTIVATIONS = [Activation(), TIGHT, CLAMPED, Activation(kind="gelu"), Activation(kind="gelu_tanh")]
GPT_OSS = Routing(top_k=4, renormalise=True)


class Layer(NamedTuple):
    """Experts with all that binds them."""

    gate_up: torch.Tensor | StoredWeight
    down: torch.Tensor | StoredWeight
    shape: ExpertsShape
    biases: ExpertBiases | None

    def bound(self) -> Experts | Float4Experts:
        values = self.down.values if isinstance(self.down, StoredWeight) else self.down
        found = bind_experts(*self, dependent_launch=chained(values.device.type))
        assert isinstance(found, Experts | Float4Experts)
        return found

    def exact(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """In float64, from the same numbers."""
        weights = [widen(each, torch.float64) if isinstance(each, StoredWeight) else each.double() for each in self[:2]]
        biases = None if self.biases is None else ExpertBiases(*(each.double() for each in self.biases))
        return reference_experts.bind_experts(*weights, self.shape, biases)(x.double(), routed)


def float4(*shape: int, device: str, exponents: tuple[int, int] | None = None) -> StoredWeight:
    """[E, N, C]: every code is as likely; scales keep the size of what is multiplied, or have exponents in this range."""
    *rows, columns = shape
    usual = 126 - round(torch.tensor(float(columns)).log2().item() / 2)
    low, high = exponents or (usual - 1, usual + 1)
    values = torch.randint(256, (*rows, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(low, high, (*rows, -(-columns // 32)), dtype=torch.uint8, device=device)
    return StoredWeight(scheme=FLOAT4_BLOCKS, values=values, scales=scales.view(torch.float8_e8m0fnu))


def make_layer(
    num_experts: int,
    columns: int,
    inner: int,
    *,
    device: str,
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    biased: bool = True,
    activation: Activation = CLAMPED,
) -> Layer:
    """Biases are as large as what they are added to."""
    shape = ExpertsShape(names=ExpertNames(), count=num_experts, inner=inner, hidden=columns, bias=biased, activation=activation)
    biases = None
    if biased:
        biases = ExpertBiases(*(torch.randn(num_experts, rows).to(device, dtype) for rows in (2 * inner, columns)))
    if packed:
        return Layer(
            float4(num_experts, 2 * inner, columns, device=device),
            float4(num_experts, columns, inner, device=device),
            shape,
            biases,
        )
    gate_up = torch.randn(num_experts, 2 * inner, columns, dtype=dtype, device=device).mul_(columns**-0.5)
    down = torch.randn(num_experts, columns, inner, dtype=dtype, device=device).mul_(inner**-0.5)
    return Layer(gate_up, down, shape, biases)


def make_routed(num_tokens: int, num_experts: int, top_k: int, device: str) -> Routed:
    """With a liking for a few; the first expert has no tokens."""
    scores = torch.randn(num_tokens, num_experts) + torch.linspace(3, 0, num_experts)
    scores[:, 0] = float("-inf")
    weights, ids = scores.softmax(-1).topk(top_k, dim=-1)
    return Routed(ids.int().to(device), weights.to(device))


def assert_close(actual: torch.Tensor, layer: Layer, x: torch.Tensor, routed: Routed) -> None:
    expected = layer.exact(x, routed)
    assert (actual.dtype, actual.shape) == (x.dtype, x.shape)
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < DTYPES[x.dtype]


def block(n: int, stages: int = 2, group: int = 8, split: int = 1) -> ProductBlock:
    return ProductBlock(n=n, k=128, num_warps=4, stages=stages, group=group, split=split)
