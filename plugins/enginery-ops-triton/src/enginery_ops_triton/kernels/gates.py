"""What becomes of an expert's gate and up, and its biases."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from enginery_ops_triton.kernels.launch import kernel

ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_2_BY_PI = tl.constexpr(0.7978845608028654)


@kernel
def gated(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """As `enginery.api.Activation` has it, float32; "squared": relu(gate)^2, there is no up. What is not a number stays none."""
    if KIND == "squared":
        gate = tl.where(gate < 0.0, 0.0, gate)
        up = gate
    elif KIND == "clamped_swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up) + 1.0
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    elif KIND == "gelu":
        gate = 0.5 * gate * (1.0 + tl.math.erf(gate * ROOT_HALF))
    elif KIND == "gelu_tanh":  # 1 + tanh(z) is 2 / (1 + exp(-2 z))
        gate = gate / (1.0 + tl.exp(-2.0 * ROOT_2_BY_PI * (gate + 0.044715 * gate * gate * gate)))
    else:
        tl.static_assert(KIND == "silu")
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up


@kernel
def biased(values: tl.tensor, at: tl.tensor, inside: tl.tensor, BIASED: tl.constexpr) -> tl.tensor:
    """values + what is there, float32. at, inside: of one shape with values."""
    if BIASED:
        values += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return values
