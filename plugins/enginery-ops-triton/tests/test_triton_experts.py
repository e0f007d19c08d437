"""Experts equal the core's reference, in the interpreter on a CPU and compiled on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import compile_only
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import HAS_CUDA, crossed, in_turn, pairwise
from triton_devices import NEEDS_INTERPRETER, chained, on_devices

from enginery.api import ExpertNames, ExpertsShape, Routed, Routing, StoredWeight
from enginery.nn import reference_experts
from enginery_ops_triton.expert_blocks import PARTS, ExpertSizes, PairBlocks, ProductBlock, RowBlock, TileBlocks, blocks_for
from enginery_ops_triton.expert_pairs import sort_by_expert
from enginery_ops_triton.experts import Experts, bind_experts, bind_squared_experts
from enginery_ops_triton.routing import route
from enginery_ops_triton.spec import FLOAT8_BLOCKS

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FLOAT8 = torch.float8_e4m3fn
FLOAT8_ON_CPU = (1, 5, 33, 300)  # of the numbers of tokens, those with float8 in the interpreter; the others with bfloat16

SCRIPTS = (
    "hopper_draws.py",
    "hopper_parts.py",
    "hopper_routers.py",
    "hopper_rows.py",
    "hopper_stream_k.py",
    "less_shared_memory.py",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_kernels_compile_without_a_gpu(script: str) -> None:
    compile_only.run(Path(__file__).with_name(script))


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, C] in float8 and its scales [E, N / 128, C / 128]."""
    rows, columns = weight.shape[1:]
    padded = F.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))  # [E, N / 128, 128, C / 128, 128]
    scale = blocks.abs().amax((2, 4)) / 448
    small = (blocks / scale[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)
    return small[:, :rows, :columns].to(FLOAT8).contiguous(), scale


Weights = tuple[torch.Tensor, torch.Tensor] | tuple[StoredWeight, StoredWeight]
SHAPE = ExpertsShape(names=ExpertNames(), count=0, inner=0, hidden=0)  # sizes are those of the tensors


def make_weights(num_experts: int, columns: int, inner: int, *, dtype: torch.dtype, device: str, float8: bool) -> Weights:
    gate_up = (torch.randn(num_experts, 2 * inner, columns) * columns**-0.5).to(dtype)
    down = (torch.randn(num_experts, columns, inner) * inner**-0.5).to(dtype)
    if not float8:
        return gate_up.to(device), down.to(device)
    return stored(*quantised(gate_up), device), stored(*quantised(down), device)


def stored(values: torch.Tensor, scales: torch.Tensor, device: str) -> StoredWeight:
    return StoredWeight(scheme=FLOAT8_BLOCKS, values=values.to(device), scales=scales.to(device))


def on_cpu_and_wide(weight: torch.Tensor | StoredWeight) -> torch.Tensor | StoredWeight:
    return stored(weight.values, weight.scales, "cpu") if isinstance(weight, StoredWeight) else weight.cpu().float()


def make_routed(num_tokens: int, num_experts: int, top_k: int, device: str) -> Routed:
    """Experts from 1 on, with a liking for a few."""
    scores = torch.randn(num_tokens, num_experts) + torch.linspace(3, 0, num_experts)
    scores[:, 0] = float("-inf")
    weights, ids = scores.softmax(-1).topk(top_k, dim=-1)
    return Routed(ids.int().to(device), weights.to(device))


def assert_as_the_reference(actual: torch.Tensor, x: torch.Tensor, weights: Weights, routed: Routed) -> None:
    """Of the reference in float32, on the same numbers."""
    on_cpu = Routed(routed.ids.cpu(), routed.weights.cpu())
    expected = reference_experts.bind_experts(*map(on_cpu_and_wide, weights), SHAPE)(x.cpu().float(), on_cpu)
    assert actual.dtype == x.dtype
    assert actual.shape == x.shape
    error = (actual.cpu().float() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < DTYPES[x.dtype]


def computed(bound: Experts, x: torch.Tensor, routed: Routed, blocks: PairBlocks | TileBlocks) -> torch.Tensor:
    """In these blocks, if the device can load them."""
    if isinstance(blocks, TileBlocks) and blocks.described and not bound.has_descriptors:
        pytest.skip("the device loads nothing by tensor descriptors")
    return bound.of_blocks(x, routed, blocks)


PAIRS = PairBlocks(gate_up=RowBlock(n=8, k=64, num_warps=4, ahead=2), down=RowBlock(n=64, k=64, num_warps=4, ahead=3))
EXACT_PAIRS = PairBlocks(gate_up=RowBlock(n=8, k=128, num_warps=1, ahead=2), down=RowBlock(n=32, k=32, num_warps=1, ahead=1))
BLOCK = ProductBlock(n=64, k=64, num_warps=4, stages=2)
TILES = TileBlocks(m=16, gate_up=BLOCK, down=ProductBlock(n=32, k=32, num_warps=4, stages=2, group=2))
WIDE_TILES = TileBlocks(m=32, gate_up=ProductBlock(n=64, k=32, num_warps=4, stages=3, group=1), down=BLOCK)
DESCRIBED_TILES = TileBlocks(m=64, gate_up=BLOCK, down=ProductBlock(n=128, k=64, num_warps=4, stages=3), described=True)
TILINGS = {"pairs": PAIRS, "tiles": TILES, "wide tiles": WIDE_TILES, "described tiles": DESCRIBED_TILES}


@on_devices
@in_turn(
    ("tiling, float8", crossed(TILINGS, [False, True])),
    ("num_tokens, top_k", [(0, 2), (1, 1), (1, 4), (3, 2), (11, 3)]),
    ("dtype", DTYPES),
)
def test_experts_equal_the_reference(
    num_tokens: int, top_k: int, tiling: str, dtype: torch.dtype, float8: bool, device: str
) -> None:
    blocks = TILINGS[tiling]
    torch.manual_seed(0)
    num_experts, columns, inner = 6, 160, 80  # of no whole number of blocks
    weights = make_weights(num_experts, columns, inner, dtype=dtype, device=device, float8=float8)
    routed = make_routed(num_tokens, num_experts, top_k, device)
    x = torch.randn(num_tokens, columns + 16).to(device=device, dtype=dtype)[:, 8:-8]
    bound = Experts(*weights, dependent_launch=chained(device))
    actual = computed(bound, x, routed, blocks)
    assert_as_the_reference(actual, x, weights, routed)


@on_devices
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("tiling", ["wide tiles", "described tiles"])
def test_last_tiles_of_few_pairs_equal_the_reference(tiling: str, float8: bool, device: str) -> None:
    """Experts have 8, 16, 17, 40, 64, 65 and 90 pairs: of whole tiles, of few, of both, and of one more."""
    torch.manual_seed(9)
    counts, dtype = (8, 16, 17, 40, 64, 65, 90), torch.float32 if device == "cpu" else torch.bfloat16
    weights = make_weights(len(counts), 160, 80, dtype=dtype, device=device, float8=float8)
    ids = torch.cat([torch.full((count,), expert, dtype=torch.int32) for expert, count in enumerate(counts)])
    ids = ids[torch.randperm(len(ids))].view(-1, 1).to(device)
    routed = Routed(ids, torch.rand(ids.shape).to(device))
    x = torch.randn(len(ids), 160).to(device=device, dtype=dtype)
    bound, blocks = Experts(*weights, dependent_launch=chained(device)), TILINGS[tiling]
    assert isinstance(blocks, TileBlocks)
    assert_as_the_reference(computed(bound, x, routed, replace(blocks, few=16)), x, weights, routed)


@on_devices
@pytest.mark.parametrize("dtype", PARTS)
def test_parts_of_an_activation_add_up_to_it(dtype: torch.dtype, device: str) -> None:
    """Blocks of columns with a large number, of small numbers, of zeros, and one that is not whole."""
    torch.manual_seed(11)
    x = torch.randn(5, 528)[:, 3:-3]
    x[:, 7] *= 1000
    x[:, 128:256] *= 2.0**-12
    x[:, 256:384] = 0
    x = x.to(device=device, dtype=dtype)
    parts, scales = Experts(*make_weights(2, 522, 16, dtype=dtype, device=device, float8=True), dependent_launch=False).split(x)
    assert parts.shape == (5, PARTS[dtype], 522)
    assert scales.shape == (5, 5)
    scale = scales.double().repeat_interleave(128, 1)[:, :522]
    assert ((parts.double().sum(1) * scale - x.double()).abs() <= 2.0**-9 * scale).all()
    largest = F.pad(x.float().abs(), (0, 118)).unflatten(1, (-1, 128)).amax(-1)
    assert (scales[:, [0, 1, 3, 4]] <= largest[:, [0, 1, 3, 4]] * 2.0**-7).all()


@on_devices
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("spoilt", [float("inf"), float("nan")])
def test_what_is_no_number_stays_none_through_parts(spoilt: float, device: str) -> None:
    torch.manual_seed(12)
    bound = Experts(*make_weights(2, 160, 48, dtype=torch.bfloat16, device=device, float8=True), dependent_launch=chained(device))
    x = torch.randn(40, 160).to(device=device, dtype=torch.bfloat16)
    x[3, 130] = spoilt
    out = bound(x, make_routed(40, 2, 1, device))
    assert out[3].isnan().all()
    assert out[torch.arange(40) != 3].isfinite().all()


@on_devices
@in_turn(("tiling", TILINGS), ("dtype", DTYPES), ("num_tokens, top_k", [(1, 4), (11, 3)]))
def test_experts_without_a_gate_equal_the_reference(
    num_tokens: int, top_k: int, tiling: str, dtype: torch.dtype, device: str
) -> None:
    blocks = TILINGS[tiling]
    torch.manual_seed(6)
    gate_up, down = make_weights(6, 160, 80, dtype=dtype, device=device, float8=False)
    up = gate_up[:, :80].contiguous()
    routed, x = make_routed(num_tokens, 6, top_k, device), torch.randn(num_tokens, 160).to(device=device, dtype=dtype)
    bound = bind_squared_experts(up, down, dependent_launch=chained(device))
    assert isinstance(bound, Experts)
    actual = computed(bound, x, routed, blocks)
    on_cpu = Routed(routed.ids.cpu(), routed.weights.cpu())
    expected = reference_experts.bind_squared_experts(up.cpu().float(), down.cpu().float())(x.cpu().float(), on_cpu)
    assert actual.dtype == x.dtype
    assert (actual.cpu().float() - expected).norm() / expected.norm() < DTYPES[dtype]


@on_devices
@pairwise(("columns, inner", [(33, 17), (256, 128), (130, 264)]), ("blocks", [EXACT_PAIRS, TILES]), ("float8", [False, True]))
def test_sizes_may_be_odd_or_whole_blocks(
    columns: int, inner: int, blocks: PairBlocks | TileBlocks, float8: bool, device: str
) -> None:
    torch.manual_seed(1)
    weights = make_weights(3, columns, inner, dtype=torch.float32, device=device, float8=float8)
    routed = make_routed(2, 3, 2, device)
    x = torch.randn(2, columns).to(device)
    bound = Experts(*weights, dependent_launch=chained(device))
    actual = computed(bound, x, routed, blocks)
    assert_as_the_reference(actual, x, weights, routed)


@on_devices
@pytest.mark.parametrize(
    ("num_tokens", "float8"),
    [
        (count, float8)
        for count in (0, 1, 2, 5, 16, 33, 70, 300)
        for float8 in (False, True)
        if HAS_CUDA or float8 == (count in FLOAT8_ON_CPU)
    ],
)
def test_any_number_of_tokens_equals_the_reference_with_the_blocks_that_are_chosen(
    num_tokens: int, float8: bool, device: str
) -> None:
    torch.manual_seed(2)
    weights = make_weights(16, 128, 96, dtype=torch.bfloat16, device=device, float8=float8)
    routed = make_routed(num_tokens, 16, 4, device)
    x = torch.randn(num_tokens, 128).to(device=device, dtype=torch.bfloat16)
    actual = bind_experts(*weights, SHAPE, dependent_launch=chained(device))(x, routed)
    assert_as_the_reference(actual, x, weights, routed)


@on_devices
@pytest.mark.parametrize("columns", [64, 200])
def test_experts_that_are_expected_and_others_in_their_places_equal_the_reference(columns: int, device: str) -> None:
    torch.manual_seed(5)
    weights = make_weights(7, columns, 24, dtype=torch.bfloat16, device=device, float8=False)
    ids = torch.tensor([[1, 4, 5, 6], [0, 2, 5, 6], [3, 1, 6, 5], [2, 0, 4, 6], [5, 6, 0, 1]], dtype=torch.int32, device=device)
    x, routed = torch.randn(5, columns).to(device=device, dtype=torch.bfloat16), Routed(ids, torch.rand(5, 4).to(device))
    bound = Experts(*weights, joined=2, dependent_launch=chained(device))
    assert_as_the_reference(bound.of_pairs(x, routed, PAIRS), x, weights, routed)


@on_devices
def test_all_tokens_may_go_to_one_expert(device: str) -> None:
    torch.manual_seed(3)
    weights = make_weights(9, 64, 64, dtype=torch.bfloat16, device=device, float8=False)
    x = torch.randn(70, 64).to(device=device, dtype=torch.bfloat16)
    for expert in (0, 4, 8):
        routed = Routed(torch.full((70, 1), expert, dtype=torch.int32, device=device), torch.rand(70, 1).to(device))
        assert_as_the_reference(Experts(*weights, dependent_launch=chained(device)).of_tiles(x, routed, TILES), x, weights, routed)


@on_devices
def test_a_row_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    torch.manual_seed(4)
    weights = make_weights(4, 128, 64, dtype=torch.bfloat16, device=device, float8=False)
    x = torch.randn(40, 128).to(device=device, dtype=torch.bfloat16)
    routed = make_routed(40, 4, 2, device)
    bound = Experts(*weights, dependent_launch=chained(device))
    whole = bound.of_tiles(x, routed, TILES)
    part = bound.of_tiles(x[29:], Routed(routed.ids[29:], routed.weights[29:]), TILES)
    assert torch.equal(whole[29:], part)


@NEEDS_INTERPRETER
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=40),
    st.sampled_from([2, 4, 16]),
)
def test_every_pair_is_in_one_tile_of_its_expert(ids: list[list[int]], block_m: int) -> None:
    check_sorted(torch.tensor(ids, dtype=torch.int32), 7, block_m=block_m, device="cpu")


@on_devices
@pytest.mark.parametrize(("num_tokens", "num_experts", "block_m"), [(1025, 3, 16), (1111, 60, 128), (1700, 512, 64), (4200, 8, 32)])
def test_many_pairs_are_counted(num_tokens: int, num_experts: int, block_m: int, device: str) -> None:
    """Some experts have none, and one has half of all."""
    torch.manual_seed(num_tokens)
    ids = torch.randint(num_experts, (num_tokens, 4), dtype=torch.int32)
    ids[ids % 7 == 5] = 0
    ids[::2] = num_experts // 2
    check_sorted(ids, num_experts, block_m=block_m, device=device)


def check_sorted(ids: torch.Tensor, num_experts: int, *, block_m: int, device: str) -> None:
    """Pairs are in their experts' order and each expert's in their own, and each is in one tile of its expert."""
    order, tiles = sort_by_expert(ids.to(device), num_experts, block_m=block_m, dependent_launch=chained(device))
    order, flat = order.cpu(), ids.flatten()
    assert order.tolist() == flat.sort(stable=True).indices.tolist()
    seen = []
    for expert, first, end in tiles.tolist():
        if expert >= 0:
            mine = order[first : min(first + block_m, end)]
            assert (flat[mine.long()] == expert).all()
            seen += mine.tolist()
    assert sorted(seen) == list(range(flat.numel()))


@on_devices
def test_what_the_kernels_cannot_take_the_reference_does(device: str) -> None:
    gate_up, down = make_weights(2, 16, 16, dtype=torch.float32, device=device, float8=False)
    double = bind_experts(gate_up.double(), down.double(), SHAPE, dependent_launch=False)
    x, routed = torch.randn(3, 16, dtype=torch.float64).to(device), make_routed(3, 2, 1, device)
    assert not isinstance(double, Experts)
    assert torch.equal(double(x, routed), reference_experts.bind_experts(gate_up.double(), down.double(), SHAPE)(x, routed))
    assert not isinstance(bind_experts(gate_up.to("meta"), down.to("meta"), SHAPE, dependent_launch=False), Experts)


def test_blocks_fit_the_shared_memory_of_a_multiprocessor_and_divide_blocks_of_scales() -> None:
    for num_experts, columns, inner, top_k in [(64, 2048, 1408, 6), (8, 4096, 14336, 2), (256, 7168, 2048, 8), (5, 48, 7, 2)]:
        for dtype in DTYPES:
            for weight_dtype, has_descriptors in ((dtype, False), (dtype, True), (FLOAT8, True)):
                sizes = ExpertSizes(
                    num_experts=num_experts,
                    columns=columns,
                    inner=inner,
                    dtype=dtype,
                    weight_dtype=weight_dtype,
                    has_descriptors=has_descriptors,
                )
                for num_tokens in (1, 2, 16, 100, 256, 512, 4096, 16384):
                    blocks = blocks_for(num_tokens * top_k, top_k, sizes)
                    if isinstance(blocks, PairBlocks):
                        assert inner % blocks.gate_up.n == 0
                        assert 128 % blocks.down.n == 0
                        continue
                    for block, weights in ((blocks.gate_up, 2), (blocks.down, 1)):
                        parts = PARTS[dtype] if weight_dtype is FLOAT8 and dtype in PARTS else dtype.itemsize
                        stage = block.k * (weights * block.n * weight_dtype.itemsize + blocks.m * parts)
                        assert stage * block.stages <= 227 * 1024
                        assert 128 % block.k == 0


@pytest.mark.parametrize(
    ("weight_dtype", "tiles"),
    [
        (torch.bfloat16, {192: 16, 208: 32, 416: 32, 448: 64, 896: 64, 1024: 128}),
        (FLOAT8, {192: 16, 208: 32, 576: 32, 592: 64, 1024: 64, 16384: 64}),
    ],
)
def test_tiles_have_room_for_more_pairs_than_experts_have_on_average(weight_dtype: torch.dtype, tiles: dict[int, int]) -> None:
    """Qwen3-30B-A3B's experts, by the tokens of a step."""
    sizes = ExpertSizes(num_experts=128, columns=2048, inner=768, dtype=torch.bfloat16, weight_dtype=weight_dtype)
    found = {num_tokens: blocks_for(8 * num_tokens, 8, sizes) for num_tokens in tiles}
    assert {num_tokens: blocks.m for num_tokens, blocks in found.items() if isinstance(blocks, TileBlocks)} == tiles


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 48])
@pytest.mark.parametrize("float8", [False, True])
def test_a_captured_layer_gives_the_same_with_other_routing_on_replay(num_tokens: int, float8: bool) -> None:
    torch.manual_seed(5)
    weights = make_weights(16, 256, 128, dtype=torch.bfloat16, device="cuda", float8=float8)
    bound = bind_experts(*weights, SHAPE, dependent_launch=chained("cuda"))
    routing = Routing(top_k=4, renormalise=True)
    x = torch.randn(num_tokens, 256, device="cuda").to(torch.bfloat16)
    logits = torch.randn(num_tokens, 16, device="cuda")

    def layer() -> torch.Tensor:
        return bound(x, route(logits, None, routing, dependent_launch=chained("cuda")))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(4):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits) * torch.linspace(1, 5, 16, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, layer())
        assert_as_the_reference(out, x, weights, reference_experts.route(logits, None, routing))
