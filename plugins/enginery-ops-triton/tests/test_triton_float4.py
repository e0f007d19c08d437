"""Experts in MXFP4, with biases, with other activations: equal to float64, in the interpreter and compiled on a CUDA device."""

from __future__ import annotations

import re
from pathlib import Path

import compile_only
import pytest
import torch
from float4_layers import (
    ACTIVATIONS,
    CLAMPED,
    DTYPES,
    GPT_OSS,
    Layer,
    assert_close,
    block,
    float4,
    make_layer,
    make_routed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import crossed, in_turn, pairwise
from triton_devices import NEEDS_INTERPRETER, chained, on_devices

from enginery.api import Activation, ExpertBiases, ExpertNames, ExpertsShape, Routed, StoredWeight
from enginery.nn import reference_experts
from enginery.nn.stored import widen
from enginery_ops_triton.expert_blocks import ExpertSizes, Float4Blocks, float4_blocks_for
from enginery_ops_triton.experts import Experts, bind_experts
from enginery_ops_triton.experts_float4 import Float4Experts
from enginery_ops_triton.float4_groups import Float4Groups
from enginery_ops_triton.kernels import experts_float4 as kernels
from enginery_ops_triton.routing import route
from enginery_ops_triton.spec import FLOAT4_BLOCKS

TILINGS = {
    "alone": Float4Blocks(m=16, gate_up=block(64), down=block(128, stages=3), alone=True),
    "split": Float4Blocks(m=8, gate_up=block(32, split=2), down=block(64, split=3), alone=True),
    "tiles": Float4Blocks(m=16, gate_up=block(64, stages=3), down=block(64, group=1)),
    "wide tiles": Float4Blocks(m=32, gate_up=block(128), down=block(128, group=2), few=16),
}


@on_devices
@in_turn(
    (
        "num_tokens, top_k, tiling",
        [
            *((0, 2, "tiles"), (3, 2, "tiles"), (12, 2, "tiles"), (1, 3, "wide tiles"), (12, 2, "wide tiles")),
            *((1, 1, "alone"), (1, 3, "alone"), (3, 2, "alone"), (1, 3, "split"), (2, 2, "split")),
        ],
    ),
    ("dtype", DTYPES),
    ("biased, activation", crossed([False, True], ACTIVATIONS[:2])),
)
def test_experts_in_mxfp4_equal_float64(
    num_tokens: int, top_k: int, tiling: str, dtype: torch.dtype, biased: bool, activation: Activation, device: str
) -> None:
    torch.manual_seed(num_tokens)
    columns, inner = 160, 44  # of no whole number of groups, of blocks, or of rows by turns
    layer = make_layer(4, columns, inner, device=device, dtype=dtype, biased=biased, activation=activation)
    routed = make_routed(num_tokens, 4, top_k, device)
    x = torch.randn(num_tokens, columns + 16).to(device, dtype)[:, 8:-8]
    bound = layer.bound()
    assert isinstance(bound, Float4Experts)
    assert_close(bound.of_blocks(x, routed, TILINGS[tiling]), layer, x, routed)


@on_devices
@pairwise(("num_tokens", [1, 9]), ("biased", [False, True]), ("activation", ACTIVATIONS), ("dtype", DTYPES))
def test_plain_experts_take_biases_and_every_activation(
    num_tokens: int, biased: bool, activation: Activation, dtype: torch.dtype, device: str
) -> None:
    """One token's pairs read their own weights, nine tokens' are sorted."""
    torch.manual_seed(num_tokens)
    layer = make_layer(5, 72, 40, device=device, dtype=dtype, packed=False, biased=biased, activation=activation)
    routed, x = make_routed(num_tokens, 5, 2, device), torch.randn(num_tokens, 72).to(device, dtype)
    bound = layer.bound()
    assert isinstance(bound, Experts)
    assert_close(bound(x, routed), layer, x, routed)


@on_devices
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 16), (2, 16), (40, 3)])
def test_any_number_of_tokens_equals_float64_with_the_blocks_that_are_chosen(
    num_tokens: int, num_experts: int, device: str
) -> None:
    torch.manual_seed(3)
    layer = make_layer(num_experts, 96, 32, device=device, dtype=torch.bfloat16)
    routed, x = make_routed(num_tokens, num_experts, 2, device), torch.randn(num_tokens, 96).to(device, torch.bfloat16)
    assert_close(layer.bound()(x, routed), layer, x, routed)


@on_devices
@pytest.mark.parametrize(("columns", "inner"), [(2, 2), (130, 6), (128, 64)])
def test_sizes_may_be_odd_or_whole_groups(columns: int, inner: int, device: str) -> None:
    torch.manual_seed(4)
    layer = make_layer(3, columns, inner, device=device)
    routed, x = make_routed(2, 3, 2, device), torch.randn(2, columns).to(device)
    assert_close(layer.bound()(x, routed), layer, x, routed)


@on_devices
def test_all_tokens_may_go_to_one_expert_and_take_several_tiles(device: str) -> None:
    torch.manual_seed(5)
    layer = make_layer(7, 64, 32, device=device, dtype=torch.bfloat16)
    x = torch.randn(37, 64).to(device, torch.bfloat16)
    for expert in (0, 6) if device == "cuda" else (3,):
        routed = Routed(torch.full((37, 1), expert, dtype=torch.int32, device=device), torch.rand(37, 1).to(device))
        assert_close(layer.bound().of_blocks(x, routed, TILINGS["tiles"]), layer, x, routed)


@on_devices
def test_a_row_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    torch.manual_seed(6)
    layer = make_layer(4, 64, 32, device=device, dtype=torch.bfloat16)
    x, routed = torch.randn(24, 64).to(device, torch.bfloat16), make_routed(24, 4, 2, device)
    bound = layer.bound()
    whole = bound.of_blocks(x, routed, TILINGS["tiles"])
    part = bound.of_blocks(x[19:], Routed(routed.ids[19:], routed.weights[19:]), TILINGS["tiles"])
    assert torch.equal(whole[19:], part)


@on_devices
@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [
        *((torch.float32, (118, 124)), (torch.float32, (126, 140))),
        *((torch.bfloat16, (118, 124)), (torch.bfloat16, (3, 7)), (torch.bfloat16, (120, 129)), (torch.bfloat16, (126, 140))),
    ],
    ids=str,
)
def test_every_code_and_scale_is_widened_exactly(dtype: torch.dtype, exponents: tuple[int, int], device: str) -> None:
    """Biases make one value of a token's inner ones 7 and the others zero: each output is one weight times what that gives."""
    torch.manual_seed(7)
    columns, inner = 32, 160
    gate_up = torch.zeros(1, 2 * inner, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.full((1, 2 * inner, 1), 127, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    down = float4(1, columns, inner, device=device, exponents=exponents)
    down.values[0, :16, :16] = torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)
    chosen = torch.zeros(1, 2 * inner, device=device, dtype=dtype)
    places = range(inner) if device == "cuda" else (5, 38, 80, 127, 159)
    shape = ExpertsShape(names=ExpertNames(), count=1, inner=inner, hidden=columns, bias=True, activation=CLAMPED)
    zero = torch.zeros(1, columns, device=device, dtype=dtype)
    empty = StoredWeight(scheme=FLOAT4_BLOCKS, values=gate_up, scales=scales)
    bound = bind_experts(empty, down, shape, ExpertBiases(chosen, zero), dependent_launch=chained(device))
    routed = Routed(torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, 1, device=device))
    x = torch.zeros(1, columns, device=device, dtype=dtype)
    wide = widen(down, dtype)[0]
    for place in places:
        chosen.zero_()
        chosen[0, place], chosen[0, inner + place] = 7.0, 1.0
        bound.gate_up_bias.copy_(chosen)
        outcome = reference_experts.gated(chosen.double(), CLAMPED)[0, place].to(dtype)
        expected = (wide[:, place].double() * outcome.double()).to(dtype)
        torch.testing.assert_close(bound(x, routed)[0], expected, atol=0, rtol=1e-6 if dtype is torch.float32 else 8e-3)


def run_assembly(text: str, word: int) -> int:
    """What a few lines of PTX make of $1, as $0."""
    names = {"$1": word}
    for step in re.findall(r"(and|or|shl|shr)\.b32 +(\S+), (\S+), (\S+);", text):
        operation, target, *given = step
        a, b = (names[each] if each in names else int(each, 0) for each in given)
        match operation:
            case "and":
                names[target] = a & b
            case "or":
                names[target] = a | b
            case "shl":
                names[target] = a << b & 0xFFFFFFFF
            case "shr":
                names[target] = a >> b
    return names["$0"]


@pytest.mark.parametrize("place", range(4))
def test_the_assembly_takes_the_bits_that_the_words_have_of_a_place(place: int) -> None:
    """Both halves of a register, each with every code at the place and any others beside it."""
    text = (kernels.FIRST, kernels.SECOND, kernels.THIRD, kernels.FOURTH)[place].value
    torch.manual_seed(place)
    codes = torch.randint(16, (2, 64, 4, 32), dtype=torch.uint8)  # of two rows: the halves of a register
    codes[:, :16, place] = torch.arange(16, dtype=torch.uint8)[:, None]
    flat = codes.flatten(1)
    values = (flat[:, ::2] | flat[:, 1::2] << 4)[None]  # [1, 2, C / 2]
    scales = torch.full((1, 2, values.shape[2] // 16), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    stored = StoredWeight(scheme=FLOAT4_BLOCKS, values=values, scales=scales)
    words = Float4Groups.of(stored, gate_up=False).words[0].int() & 0xFFFF  # [G, 2, 32]
    wide = widen(stored, torch.float64)[0].view(2, 64, 4, 32)[:, :, place].transpose(0, 1)  # [G, 2, 32]
    for low, high, expected in zip(*words.unbind(1), wide, strict=True):
        for lane in range(0, 32, 5):
            found = run_assembly(text, int(low[lane]) | int(high[lane]) << 16)
            halves = torch.tensor([found & 0xFFFF, found >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(halves.double() * 2.0**126, expected[:, lane])


@NEEDS_INTERPRETER
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 3), st.integers(1, 40), st.integers(1, 24), st.booleans())
def test_any_layer_equals_float64(seed: int, num_tokens: int, top_k: int, half_columns: int, half_inner: int, packed: bool) -> None:
    torch.manual_seed(seed)
    layer = make_layer(4, 2 * half_columns, 2 * half_inner, device="cpu", packed=packed)
    routed, x = make_routed(num_tokens, 4, top_k, "cpu"), torch.randn(num_tokens, 2 * half_columns)
    assert_close(layer.bound()(x, routed), layer, x, routed)


@on_devices
def test_weights_stay_packed_in_memory_and_those_that_were_given_are_not_changed(device: str) -> None:
    layer = make_layer(2, 256, 128, device=device)
    given = [each.values.clone() for each in layer[:2]]
    bound = layer.bound()
    for made, stored in ((bound.gate_up, layer.gate_up), (bound.down, layer.down)):
        assert made.words.nbytes == stored.values.nbytes
        assert made.exponents.nbytes == stored.scales.nbytes
    assert all(torch.equal(before, each.values) for before, each in zip(given, layer[:2], strict=True))
    on_meta = [StoredWeight(scheme=each.scheme, values=each.values.to("meta"), scales=each.scales.to("meta")) for each in layer[:2]]
    assert not isinstance(bind_experts(*on_meta, *layer[2:], dependent_launch=False), Experts | Float4Experts)


def test_blocks_fit_the_shared_memory_of_a_multiprocessor() -> None:
    for dtype in DTYPES:
        sizes = ExpertSizes(num_experts=128, columns=2880, inner=2880, dtype=dtype, weight_dtype=torch.uint8)
        for num_tokens in (1, 2, 4, 32, 256, 512, 2048, 16384):
            blocks = float4_blocks_for(4 * num_tokens, 4, sizes)
            assert blocks.alone == (num_tokens <= 2 and dtype is not torch.float32)
            for product in (blocks.gate_up, blocks.down):
                assert product.n % 16 == 0
                assert product.stages * (product.n * (64 + 4) + 128 * blocks.m * dtype.itemsize) <= 227 * 1024


def test_tiles_have_room_for_more_pairs_than_experts_have_on_average() -> None:
    """gpt-oss-20b's experts, by the tokens of a step."""
    sizes = ExpertSizes(num_experts=32, columns=2880, inner=2880, dtype=torch.bfloat16, weight_dtype=torch.uint8)
    tiles = {96: 16, 104: 32, 200: 32, 256: 64, 384: 64, 512: 64, 640: 128}
    assert {num_tokens: float4_blocks_for(4 * num_tokens, 4, sizes).m for num_tokens in tiles} == tiles


def test_kernels_compile_for_hopper_without_a_gpu() -> None:
    compile_only.run(Path(__file__).with_name("hopper_kernels.py"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 32, 256, 600, 1000, 4096])
@pytest.mark.parametrize("packed", [True, False])
def test_gpt_oss_120b_equals_float64(num_tokens: int, packed: bool) -> None:
    """128 experts of 2880 x 2880 and 4 of them for each token; of many tokens the first and last ones are looked at."""
    torch.manual_seed(8)
    layer = make_layer(128, 2880, 2880, device="cuda", dtype=torch.bfloat16, packed=packed)
    x = torch.randn(num_tokens, 2880).to("cuda", torch.bfloat16)
    routed = route(torch.randn(num_tokens, 128, device="cuda"), None, GPT_OSS, dependent_launch=chained("cuda"))
    actual = layer.bound()(x, routed)
    some = sorted({*range(min(num_tokens, 24)), *range(max(num_tokens - 24, 0), num_tokens)})
    picked = Routed(routed.ids[some], routed.weights[some])
    one_by_one = torch.zeros(len(some), 2880, dtype=torch.float64, device="cuda")
    for expert in torch.unique(picked.ids).tolist():  # not all of them are wide at once
        only = Routed(torch.zeros_like(picked.ids), torch.where(picked.ids == expert, picked.weights, 0.0))
        one_by_one += of_one(layer, expert).exact(x[some], only)
    error = (actual[some].double() - one_by_one).norm() / one_by_one.norm()
    assert error < DTYPES[torch.bfloat16]


def of_one(layer: Layer, expert: int) -> Layer:
    """Of a layer: the one expert as the only one."""
    own = slice(expert, expert + 1)
    gate_up, down = (
        StoredWeight(scheme=each.scheme, values=each.values[own], scales=each.scales[own])
        if isinstance(each, StoredWeight)
        else each[own]
        for each in layer[:2]
    )
    return Layer(gate_up, down, layer.shape, None if layer.biases is None else ExpertBiases(*(each[own] for each in layer.biases)))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 48])
@pytest.mark.parametrize("packed", [False, True])
def test_a_captured_layer_gives_the_same_with_other_routing_on_replay(num_tokens: int, packed: bool) -> None:
    torch.manual_seed(9)
    layer = make_layer(16, 288, 160, device="cuda", dtype=torch.bfloat16, packed=packed)
    bound = layer.bound()
    x = torch.randn(num_tokens, 288, device="cuda").to(torch.bfloat16)
    logits = torch.randn(num_tokens, 16, device="cuda")

    def run() -> torch.Tensor:
        return bound(x, route(logits, None, GPT_OSS, dependent_launch=chained("cuda")))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(4):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits) * torch.linspace(1, 5, 16, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run())
        assert_close(out, layer, x, reference_experts.route(logits, None, GPT_OSS))
