"""Calls of each operation of `OpTable` with inputs that follow from a seed, to compare a plugin's operations with the references.

Letters as in `enginery.contracts.ops`. Says nothing of how close results must be: that is the caller's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from enginery.contracts.ops import ExpertBiases, GatableLinear, LinearFn, NormGate, NormingLinear, Routed, Routing
from enginery.contracts.weights import SILU, Activation, ExpertNames, ExpertsShape, Scheme, StoredWeight
from enginery.nn.draw_cases import CUTS, MIXED, draw_mixed, draw_rows, sample_mixed, sample_rows
from enginery.nn.reference_ops import gated_silu, rms_norm
from enginery.nn.stored import check_widens

OpFn = Callable[..., Any]  # Any: every operation has arguments and results of its own
Results = Mapping[str, torch.Tensor]
_SEED: Final = 20_18
_LARGE: Final = 512.0  # as some channels of real models; its square is none of float16's


@dataclass(kw_only=True, eq=False)
class Inputs:
    """Makes the tensors of one call: of one dtype the same on every device. wide: the same rounded numbers as float64."""

    dtype: torch.dtype
    device: torch.device
    wide: bool = False
    _made: list[torch.Tensor] = field(default_factory=list)  # by randn
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(_SEED))

    def randn(self, *shape: int, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Normally distributed numbers in the dtype."""
        drawn = (torch.randn(shape, generator=self._generator) * scale).to(self.dtype)
        self._made.append(drawn.to(self.device, torch.float64 if self.wide else self.dtype))
        return self._made[-1]

    def rows(self, *shape: int) -> torch.Tensor:
        """The same, but a thousandth of it in the second row and 0 in the third, where an epsilon counts."""
        scale = torch.tensor([1.0, 1e-3, 0.0] + [1.0] * shape[0])[: shape[0]]
        return self.randn(*shape, scale=scale.view(-1, *[1] * (len(shape) - 1)))

    def rand(self, *shape: int) -> torch.Tensor:
        """Numbers in [0, 1), float32, on the host."""
        return torch.rand(shape, generator=self._generator)

    def weight(self, scheme: Scheme | None, *shape: int) -> torch.Tensor | StoredWeight:
        """[.., rows, columns] that keep the size of what they multiply; plain, or of a scheme that `widen` knows."""
        if scheme is None:
            return self.randn(*shape, scale=shape[-1] ** -0.5)
        blocks = [-(-size // (block or size)) for size, block in zip(shape[-2:], scheme.block, strict=True)]
        if scheme.values == "mxfp4":
            halves = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=self._generator, dtype=torch.uint8)
            exponents = torch.randint(-1, 1, (*shape[:-2], *blocks), generator=self._generator) - round(math.log2(shape[-1]) / 2)
            powers = torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)
            return StoredWeight(scheme=scheme, values=halves.to(self.device), scales=powers.to(self.device))
        dtype, unit = (torch.int8, 32) if scheme.values == "i8" else (torch.float8_e4m3fn, 1)
        values = (torch.randn(shape, generator=self._generator) * unit).clamp(-128, 127).to(dtype)
        scales = (self.rand(*shape[:-2], *blocks) + 0.5) * shape[-1] ** -0.5 / unit
        return StoredWeight(scheme=scheme, values=values.to(self.device), scales=scales.to(self.device))

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy without about half of the tokens of each row, as by grammars."""
        return logits.masked_fill((self.rand(*logits.shape) < 0.5).to(logits.device), -math.inf)

    def some_of(self, count: int, num: int) -> torch.Tensor:
        """`num` different whole numbers below `count`: int64."""
        return torch.randperm(count, generator=self._generator)[:num].to(self.device)

    def cos_sin(self, num_tokens: int, rotary_dim: int) -> torch.Tensor:
        """[T, R]: cosines, then sines, of angles."""
        angles = self.rand(num_tokens, rotary_dim // 2) * 6
        made = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.dtype)
        return made.to(self.device, torch.float64 if self.wide else self.dtype)


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One call. traits: its sizes. call: makes the inputs, calls the function, returns all that it computes, written tensors too.

    Tensors whose name ends in `ids` must be equal; others are numbers.
    """

    traits: Mapping[str, str]
    call: Callable[[OpFn, Inputs], Results]

    @property
    def name(self) -> str:
        """The sizes in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.traits.items())


def _embed(op: OpFn, given: Inputs, *, rows: int, size: int, num_ids: int) -> Results:
    """The first half of the ids comes again."""
    ids = given.some_of(rows, num_ids)
    return {"returned": op(given.randn(rows, size), torch.cat((ids, ids[: num_ids // 2])))}


def _bind_linear(
    op: OpFn, given: Inputs, *, rows: int, sizes: tuple[int, int], bias: bool, scheme: Scheme | None = None
) -> Results:
    """The first of two that are bound, then the second."""
    linear, other = (op(given.weight(scheme, sizes[1], sizes[0]), given.randn(sizes[1]) if bias else None) for _ in range(2))
    results = _products(linear, given, rows=rows, size=sizes[0]) | {"other": other(given.randn(rows, sizes[0]))}
    if sizes[1] % 2:
        return results
    gated = linear.with_gate(gated_silu) if isinstance(linear, GatableLinear) else lambda x: gated_silu(linear(x))
    return results | {f"gated {name}": each for name, each in _products(gated, given, rows=rows, size=sizes[0]).items()}


def _products(linear: LinearFn, given: Inputs, *, rows: int, size: int) -> dict[str, torch.Tensor]:
    """Of rows, and of the norm of a sum, which some products take with it."""
    product = linear(given.randn(rows, size + 8)[:, 8:])
    delta, residual, weight = (given.randn(*shape, size) for shape in ((rows,), (rows,), ()))
    normed = linear.add_rms_norm(delta, residual, weight, 0.1) if isinstance(linear, NormingLinear) else None
    if normed is None:
        normed = rms_norm(residual.add_(delta), weight, 0.1)
    return {"product": product, "residual": residual, "norm": normed, "product of it": linear(normed)}


def _rms_norm(op: OpFn, given: Inputs, *, shape: tuple[int, ...], weight: tuple[int, ...], scale: float = 1.0) -> Results:
    return {"returned": op(given.rows(*shape[:-1], shape[-1] + 8).mul_(scale)[..., 8:], given.randn(*weight), 1e-5)}


def _add_rms_norm(op: OpFn, given: Inputs, *, rows: int, size: int, scale: float = 1.0) -> Results:
    x, residual = given.rows(rows, size).mul_(scale), given.rows(rows, size).mul_(scale)
    return {"returned": op(x, residual, given.randn(size), 1e-5), "residual": residual}


def _gated_rms_norm(op: OpFn, given: Inputs, *, rows: int, heads: int, size: int, gating: NormGate) -> Results:
    x, wide = given.rows(rows, heads, size), given.randn(rows, heads * size + 16)
    return {"returned": op(x, wide[:, 16:].view(x.shape), given.randn(size), 1e-5, gating)}


def _gated_group_norm(
    op: OpFn, given: Inputs, *, rows: int, groups: int, size: int, gating: NormGate, gate_first: bool, gates: float = 1.0
) -> Results:
    x, wide = given.rows(rows, groups, size), given.randn(rows, groups * size + 16, scale=torch.tensor([gates]))
    return {"returned": op(x, wide[:, 16:].view(x.shape), given.randn(groups, size), 1e-5, gating, gate_first)}


def _qk_norm_rotary(op: OpFn, given: Inputs, *, rows: int, heads: int, dims: tuple[int, int], norm: bool) -> Results:
    merged = given.rows(rows, heads + 2, dims[0])
    op(merged[:, :heads], given.randn(heads, dims[0]) if norm else None, 1e-6, given.cos_sin(rows, dims[1]))
    return {"heads": merged}


def _qk_norm_rotary_write(
    op: OpFn, given: Inputs, *, rows: int, heads: tuple[int, int], dims: tuple[int, int], norm: bool, float8: bool = False
) -> Results:
    """float8: keys and values are stored so, and are numbers that it has, or beyond its largest."""
    query, kv = heads
    qkv = given.rows(rows, query + 2 * kv, dims[0])
    weight, cos_sin = given.randn(query + kv, dims[0]) if norm else None, given.cos_sin(rows, dims[1])
    keys, values, slots = given.randn(40, kv, dims[0]), given.randn(40, kv, dims[0]), given.some_of(40, rows)
    if float8:
        qkv.round_().mul_(256)
        cos_sin.round_()
        keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    op(qkv, weight, 1e-6, cos_sin, keys=keys, values=values, slots=slots)
    return {"queries": qkv[:, :query], "keys": keys, "values": values}


def _latent_norm_rotary_write(op: OpFn, given: Inputs, *, rows: int, heads: int, dims: tuple[int, int, int]) -> Results:
    rank, rope_dim, nope_dim = dims
    q, latents = given.randn(rows, heads, nope_dim + rope_dim), given.rows(rows, rank + rope_dim)
    stored, slots = given.randn(40, rank + rope_dim), given.some_of(40, rows)
    op(q, latents, given.randn(rank), 1e-6, given.cos_sin(rows, rope_dim), stored=stored, slots=slots)
    return {"queries": q, "stored": stored}


def _gated_halves(op: OpFn, given: Inputs, *, rows: int, size: int, gates: float = 1.0) -> Results:
    scale = torch.tensor([gates] * (size + 8) + [1.0] * size)
    return {"returned": op(given.randn(rows, 2 * size + 8, scale=scale)[:, 8:])}


def _gated_sigmoid(op: OpFn, given: Inputs, *, rows: int, size: int, gates: float = 1.0) -> Results:
    return {"returned": op(given.randn(rows, size), given.randn(rows, size + 8, scale=gates)[:, 8:])}


def _route(op: OpFn, given: Inputs, *, rows: int, experts: int, routing: Routing, bias: bool) -> Results:
    logits = (given.rand(rows, experts) * 8 - 4).to(given.device)
    return _routed(op(logits, given.rand(experts).to(given.device) if bias else None, routing))


def _route_gated(op: OpFn, given: Inputs, *, rows: int, experts: int, routing: Routing, bias: bool) -> Results:
    """No two logits of a token are equal, rounded too."""
    made = given.rand(rows, experts + 1).argsort(1) / 8 - 4
    made = made.to(given.device, torch.float64 if given.wide else given.dtype)
    return _routed(op(made, given.rand(experts).to(given.device) if bias else None, routing))


def _routed(found: Routed) -> Results:
    ids, order = found.ids.sort(dim=-1)
    return {"ids": ids, "weights": found.weights.gather(1, order)}


def _bind_router(op: OpFn, given: Inputs, *, rows: int, sizes: tuple[int, int]) -> Results:
    return _bind_linear(lambda weight, _: op(weight), given, rows=rows, sizes=sizes, bias=False)


def _bind_experts(
    op: OpFn,
    given: Inputs,
    *,
    rows: int,
    experts: int,
    sizes: tuple[int, int],
    top_k: int,
    activation: Activation = SILU,
    scheme: Scheme | None = None,
) -> Results:
    (outer, inner), bias = sizes, activation.kind == "clamped_swiglu"  # as gpt-oss has them
    shape = ExpertsShape(names=ExpertNames(), count=experts, inner=inner, hidden=outer, bias=bias, activation=activation)
    ids = given.rand(rows, experts).argsort(dim=-1)[:, :top_k].to(given.device, torch.int32)
    routed = Routed(ids, given.rand(rows, top_k).to(given.device))
    bound = {}
    for name in ("sum", "other"):  # the first of two that are bound, then the second
        gate_up, down = given.weight(scheme, experts, 2 * inner, outer), given.weight(scheme, experts, outer, inner)
        biases = ExpertBiases(given.randn(experts, 2 * inner), given.randn(experts, outer)) if bias else None
        bound[name] = op(gate_up, down, shape, biases)
    return {name: each(given.randn(rows, outer), routed) for name, each in bound.items()}


def _bind_squared_experts(op: OpFn, given: Inputs, *, rows: int, experts: int, sizes: tuple[int, int], top_k: int) -> Results:
    def bind(gate_up: torch.Tensor, down: torch.Tensor, shape: ExpertsShape, _: None) -> object:
        return op(gate_up[:, : shape.inner].contiguous(), down)

    return _bind_experts(bind, given, rows=rows, experts=experts, sizes=sizes, top_k=top_k)


def _greedy(op: OpFn, given: Inputs, *, rows: int, size: int, tied: bool = False) -> Results:
    """tied: many are largest, the first is to be taken, none is above 0, every other one is masked; else a row's is its last."""
    logits = given.randn(rows, size + 8)
    logits[1:2, -1] = 9.0
    return {"ids": op((given.masked(logits.clamp(max=-1.0)) if tied else logits)[:, 8:])}


def _cases(call: Callable[..., Results], names: str, *rows: Sequence[object]) -> tuple[OpCase, ...]:
    """One of each row: what the arguments `names` of `call` are."""
    cases = [dict(zip(names.split(), row, strict=True)) for row in rows]
    return tuple(
        OpCase(traits={name: _text(value) for name, value in case.items()}, call=functools.partial(call, **case)) for case in cases
    )


def _text(value: object) -> str:
    if isinstance(value, Routing):
        groups = f", {value.top_groups} of {value.num_groups} groups by {value.group_score}" if value.num_groups > 1 else ""
        return f"({value.scoring}, top {value.top_k}{groups}{', renormalised' if value.renormalise else ''})"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


_ROUTINGS: Final = (
    Routing(top_k=2),
    Routing(top_k=4, renormalise=True, scale=1.5, num_shared=2),
    Routing(top_k=3, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2", renormalise=True),
    Routing(top_k=3, num_groups=4, top_groups=2, scale=16.0),
)

_GATED_HALVES: Final = _cases(_gated_halves, "rows size", (2, 32), (1, 1024), (5, 768), (33, 17), (0, 64), (257, 24)) + _cases(
    _gated_halves, "rows size gates", (5, 512, 60.0)
)
# The first case of each is small and usual: it alone is run when a plugin's operations are loaded.
OP_CASES: Final[Mapping[str, tuple[OpCase, ...]]] = {
    "embed": _cases(_embed, "rows size num_ids", (40, 16, 3), (97, 768, 33), (8, 17, 1), (8, 64, 0)),
    "bind_linear": _cases(
        _bind_linear,
        "rows sizes bias",
        *((2, (32, 48), False), (1, (64, 96), True), (5, (768, 64), False), (33, (128, 256), True)),
        *((16, (17, 9), False), (130, (256, 512), False), (0, (32, 48), False)),
    ),
    "rms_norm": _cases(
        _rms_norm,
        "shape weight",
        *(((2, 32), (32,)), ((1, 1024), (1024,)), ((5, 768), (768,)), ((33, 17), (17,))),
        *(((2, 5000), (5000,)), ((3, 4, 16), (16,)), ((3, 4, 16), (4, 16)), ((0, 64), (64,)), ((257, 24), (24,))),
    )
    + _cases(_rms_norm, "shape weight scale", ((2, 96), (96,), _LARGE)),
    "add_rms_norm": _cases(_add_rms_norm, "rows size", (2, 32), (1, 1024), (5, 768), (33, 17), (2, 5000), (0, 64), (257, 24))
    + _cases(_add_rms_norm, "rows size scale", (2, 96, _LARGE)),
    "gated_rms_norm": _cases(
        _gated_rms_norm,
        "rows heads size gating",
        *((2, 4, 32, "silu"), (1, 32, 128, "sigmoid"), (5, 3, 24, "silu")),
        *((33, 9, 64, "sigmoid"), (2, 2, 300, "silu"), (0, 4, 16, "silu")),
    ),
    "gated_group_norm": _cases(
        _gated_group_norm,
        "rows groups size gating gate_first",
        *((2, 4, 32, "silu", True), (1, 1, 5120, "silu", True), (5, 3, 24, "sigmoid", False)),
        *((33, 8, 512, "silu", True), (2, 2, 300, "silu", False), (3, 1, 1000, "sigmoid", True), (0, 4, 16, "silu", True)),
    )
    + _cases(_gated_group_norm, "rows groups size gating gate_first gates", (5, 2, 512, "silu", True, 60.0)),
    "qk_norm_rotary": _cases(
        _qk_norm_rotary,
        "rows heads dims norm",
        *((2, 3, (32, 32), True), (9, 24, (128, 128), False), (1, 3, (64, 32), True)),
        *((4, 1, (48, 12), False), (0, 5, (20, 20), True)),
    ),
    "qk_norm_rotary_write": _cases(
        _qk_norm_rotary_write,
        "rows heads dims norm",
        *((2, (4, 2), (32, 32), True), (9, (16, 8), (128, 128), False), (3, (2, 1), (64, 32), True)),
        *((1, (3, 3), (20, 12), False), (0, (4, 2), (32, 32), False)),
    )
    + _cases(_qk_norm_rotary_write, "rows heads dims norm float8", (5, (4, 2), (32, 32), False, True)),
    "latent_norm_rotary_write": _cases(
        _latent_norm_rotary_write,
        "rows heads dims",
        *((2, 4, (32, 16, 32)), (9, 16, (512, 64, 128)), (1, 1, (64, 8, 24)), (0, 4, (32, 16, 32))),
    ),
    "gated_silu": _GATED_HALVES,
    "gated_gelu": _GATED_HALVES,
    "gated_sigmoid": _cases(_gated_sigmoid, "rows size", (2, 32), (1, 4096), (33, 17), (0, 64), (257, 24))
    + _cases(_gated_sigmoid, "rows size gates", (5, 512, 60.0)),
    "route": _cases(
        _route,
        "rows experts routing bias",
        *((*sizes, each, bias) for *sizes, bias in ((3, 16, False), (17, 64, False), (5, 32, True)) for each in _ROUTINGS),
    ),
    "route_gated": _cases(
        _route_gated,
        "rows experts routing bias",
        *(
            (rows, experts, dataclasses.replace(routing, num_shared=shared), bias)
            for rows, experts, shared, bias in ((3, 16, 1, False), (17, 64, 4, False), (5, 32, 2, True))
            for routing in (_ROUTINGS[0], *_ROUTINGS[2:])
        ),
    ),
    "bind_router": _cases(
        _bind_router, "rows sizes", (2, (32, 16)), (1, (2304, 256)), (9, (64, 60)), (70, (128, 8)), (0, (32, 16))
    ),
    "bind_experts": _cases(
        _bind_experts,
        "rows experts sizes top_k",
        *((2, 4, (32, 16), 2), (1, 8, (64, 96), 2), (33, 8, (128, 64), 4), (70, 4, (48, 32), 1)),
    )
    + _cases(
        _bind_experts,
        "rows experts sizes top_k activation",
        *((9, 4, (32, 16), 2, Activation(kind="gelu_tanh")), (9, 4, (32, 16), 2, Activation(kind="clamped_swiglu"))),
    ),
    "bind_squared_experts": _cases(
        _bind_squared_experts,
        "rows experts sizes top_k",
        *((2, 4, (32, 16), 2), (1, 8, (64, 96), 2), (33, 8, (128, 64), 4), (70, 4, (48, 32), 1)),
    ),
    "greedy": _cases(_greedy, "rows size", (2, 64), (1, 5), (3, 4096), (2, 10001), (0, 10))
    + _cases(_greedy, "rows size tied", (3, 64, True), (2, 10001, True)),
    "sample_rows": _cases(sample_rows, "rows size cuts", *((*sizes, cuts) for sizes in ((8, 64), (5, 4200)) for cuts in CUTS))
    + _cases(sample_rows, "rows size cuts place", *((5, size, CUTS[2], place) for size in (64, 4200) for place in (0.01, 0.99)))
    + _cases(sample_mixed, "size mixed", *((size, mixed) for size in (64, 4200) for mixed in MIXED)),
    "draw_rows": _cases(draw_rows, "rows size cuts", *((*sizes, cuts) for sizes in ((8, 64), (5, 4200)) for cuts in CUTS))
    + _cases(draw_mixed, "size mixed", *((size, mixed) for size in (64, 4200) for mixed in MIXED)),
}


def stored_cases(op: str, scheme: Scheme) -> tuple[OpCase, ...]:
    """Calls of `bind_linear` or `bind_experts` with weights of the scheme, of whole blocks and of others, experts with biases too.

    Raises `Unsupported` for a scheme that the references cannot compute.
    """
    check_widens(scheme)
    if op == "bind_linear":
        linear = ((2, (256, 384), False), (1, (200, 130), True), (33, (128, 256), False), (0, (128, 128), False))
        return _cases(_bind_linear, "rows sizes bias scheme", *((*row, scheme) for row in linear))
    plain = ((2, 4, (256, 128), 2), (1, 8, (200, 130), 2), (33, 8, (128, 64), 4), (70, 4, (384, 256), 1))
    clamped = (9, 4, (96, 40), 2, Activation(kind="clamped_swiglu"), scheme)
    return (
        *_cases(_bind_experts, "rows experts sizes top_k scheme", *((*row, scheme) for row in plain)),
        *_cases(_bind_experts, "rows experts sizes top_k activation scheme", clamped),
    )


def results_of(op: OpFn, case: OpCase, *, dtype: torch.dtype, device: torch.device, wide: bool = False) -> Results:
    """What `op` computes in the case, and its inputs behind it. wide: from the same ones as float64, for a reference."""
    given = Inputs(dtype=dtype, device=device, wide=wide)
    return {**case.call(op, given), **{f"input {index} after the call": each for index, each in enumerate(given._made)}}
