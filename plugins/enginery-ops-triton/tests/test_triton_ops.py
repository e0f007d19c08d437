"""Each operation equals the core's reference, in the interpreter on a CPU and compiled on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise

from enginery.api import NormingLinear, OpNeeds
from enginery.nn import reference_ops
from enginery_ops_triton import matvec
from enginery_ops_triton import ops as triton_ops
from enginery_ops_triton.kernels.precision import INTERPRETED
from enginery_ops_triton.matvec import Matvec, MatvecShape
from enginery_ops_triton.ops import TritonOps, rotated_together
from enginery_ops_triton.small_linear import FEW_ROWS, MOST_ROWS, FewRows, FewRowsShape
from enginery_ops_triton.spec import TRITON

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED.value, reason="triton was imported for the compiler in this process")
DEVICES = [pytest.param("cpu", marks=NEEDS_INTERPRETER), pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def ops(device: str) -> TritonOps:
    return TritonOps(dependent_launch=device == "cuda" and torch.cuda.get_device_capability() >= (9, 0))


def close(actual: torch.Tensor, expected: torch.Tensor, *, scale: float = 1) -> None:
    tolerance = DTYPES[expected.dtype] * scale
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype, device: str, scale: float = 1) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(device=device, dtype=dtype)


def part_of_wider(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a slice of rows that are wider than it."""
    wider = torch.full((*x.shape[:-1], x.shape[-1] + 24), 7.0, dtype=x.dtype, device=x.device)
    wider[..., 8:-16] = x
    return wider[..., 8:-16]


@pairwise(
    ("dtype", DTYPES),
    ("shape", [(0, 64), (1, 1024), (5, 768), (33, 17), (2, 5000), (3, 4, 16)]),
    ("strided", [False, True]),
)
def test_norm_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...], strided: bool, device: str) -> None:
    torch.manual_seed(0)
    x, weight = random(*shape, dtype=dtype, device=device), random(shape[-1], dtype=dtype, device=device)
    given = part_of_wider(x) if strided else x
    close(ops(device).rms_norm(given, weight, 1e-5), reference_ops.rms_norm(x, weight, 1e-5))


def test_a_norm_weight_per_head_broadcasts(device: str) -> None:
    x, weight = (random(*shape, dtype=torch.float32, device=device) for shape in ((3, 4, 16), (4, 16)))
    close(ops(device).rms_norm(x, weight, 1e-6), reference_ops.rms_norm(x, weight, 1e-6))


@pairwise(
    ("dtype", DTYPES),
    ("shape", [(0, 64), (1, 1024), (5, 768), (33, 17)]),
    ("strided", [False, True]),
)
def test_add_and_norm_updates_the_residual_exactly(dtype: torch.dtype, shape: tuple[int, ...], strided: bool, device: str) -> None:
    torch.manual_seed(0)
    x, residual = (random(*shape, dtype=dtype, device=device) for _ in range(2))
    weight = random(shape[-1], dtype=dtype, device=device)
    expected_sum = residual.clone()
    expected = reference_ops.add_rms_norm(x, expected_sum, weight, 1e-5)
    given = part_of_wider(residual) if strided else residual
    surroundings = given._base.clone() if strided else None
    close(ops(device).add_rms_norm(part_of_wider(x) if strided else x, given, weight, 1e-5), expected)
    assert torch.equal(given, expected_sum)
    if surroundings is not None:
        surroundings[..., 8:-16] = expected_sum
        assert torch.equal(given._base, surroundings)


@pairwise(
    ("dtype", DTYPES),
    ("num_tokens", [0, 1, 9]),
    ("heads, unrotated, dim, rotary", [(24, 8, 128, 128), (3, 1, 64, 32), (1, 0, 48, 12), (5, 2, 20, 20)]),
    ("norm", [False, True]),
)
def test_rotary_turns_a_slice_of_the_merged_projection_in_place(
    dtype: torch.dtype, num_tokens: int, heads: int, unrotated: int, dim: int, rotary: int, norm: bool, device: str
) -> None:
    torch.manual_seed(0)
    merged = random(num_tokens, heads + unrotated, dim, dtype=dtype, device=device)
    weight = random(heads, dim, dtype=dtype, device=device) if norm else None
    angles = torch.rand(num_tokens, rotary // 2) * 6
    cos_sin = part_of_wider(torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype))
    expected = merged.clone()
    reference_ops.qk_norm_rotary(expected[:, :heads], weight, 1e-6, cos_sin)
    ops(device).qk_norm_rotary(merged[:, :heads], weight, 1e-6, cos_sin)
    close(merged, expected, scale=2)
    assert torch.equal(merged[:, heads:], expected[:, heads:])


def test_of_many_tokens_a_program_rotates_more_heads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rotated_together(tokens, 37, 64) for tokens in (1, 255, 256)] == [8, 8, 32]
    assert [rotated_together(4096, heads, dim) for heads, dim in ((80, 96), (80, 128), (20, 256), (5, 16))] == [16, 16, 8, 8]
    monkeypatch.setattr(triton_ops, "MANY_TOKENS", 3)
    torch.manual_seed(0)
    merged = random(3, 37, 64, dtype=torch.bfloat16, device=device)
    weight = random(33, 64, dtype=torch.bfloat16, device=device)
    angles = torch.rand(3, 32) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=torch.bfloat16)
    expected = merged.clone()
    reference_ops.qk_norm_rotary(expected[:, :33], weight, 1e-6, cos_sin)
    ops(device).qk_norm_rotary(merged[:, :33], weight, 1e-6, cos_sin)
    close(merged, expected, scale=2)
    assert torch.equal(merged[:, 33:], expected[:, 33:])


def test_rotary_takes_dims_that_are_apart_and_a_weight_that_all_heads_share(device: str) -> None:
    torch.manual_seed(0)
    weight = random(16, dtype=torch.float32, device=device).expand(3, 16)
    angles = torch.rand(4, 4) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    for heads in (random(4, 3, 16, dtype=torch.float32, device=device), random(4, 16, 3, dtype=torch.float32, device=device).mT):
        expected = heads.clone()
        reference_ops.qk_norm_rotary(expected, weight, 1e-6, cos_sin)
        ops(device).qk_norm_rotary(heads, weight, 1e-6, cos_sin)
        close(heads, expected)


@pairwise(
    ("dtype", DTYPES),
    ("num_tokens", [0, 3]),
    ("query, kv, dim, rotary", [(16, 8, 128, 128), (2, 1, 64, 32), (3, 3, 20, 12)]),
    ("norm", [False, True]),
)
def test_rotary_with_the_kv_write_equals_rotary_and_then_the_write(
    dtype: torch.dtype, num_tokens: int, query: int, kv: int, dim: int, rotary: int, norm: bool, device: str
) -> None:
    torch.manual_seed(0)
    qkv = random(num_tokens, query + 2 * kv, dim, dtype=dtype, device=device)
    weight = random(query + kv, dim, dtype=dtype, device=device) if norm else None
    angles = torch.rand(num_tokens, rotary // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype)
    keys, values = (random(12, kv, dim, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(12)[:num_tokens].to(device)
    together, expected_keys, expected_values = qkv.clone(), keys.clone(), values.clone()
    ops(device).qk_norm_rotary(qkv[:, : query + kv], weight, 1e-6, cos_sin)
    expected_keys.index_copy_(0, slots, qkv[:, query : query + kv])
    expected_values.index_copy_(0, slots, qkv[:, query + kv :])
    ops(device).qk_norm_rotary_write(together, weight, 1e-6, cos_sin, keys=keys, values=values, slots=slots)
    assert torch.equal(together, qkv)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


def test_keys_and_values_are_narrowed_to_the_memory(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter of triton 3.6 rounds some numbers to the wrong float8")
    torch.manual_seed(0)
    qkv, cos_sin = random(3, 8, 32, dtype=torch.bfloat16, device=device) * 300, random(3, 32, dtype=torch.bfloat16, device=device)
    keys, values = (torch.zeros(4, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    slots = torch.tensor([2, 0, 3], device=device)
    ops(device).qk_norm_rotary_write(qkv, None, 0, cos_sin, keys=keys, values=values, slots=slots)  # rotates them in place too
    assert values.float().abs().max() == 448
    for stored, wide in ((keys, qkv[:, 4:6]), (values, qkv[:, 6:])):
        assert torch.equal(stored[slots].float(), wide.float().clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pairwise(
    ("dtype", DTYPES),
    ("num_tokens", [0, 3]),
    ("heads, nope, rank, rotary", [(16, 128, 512, 64), (3, 20, 24, 12)]),
)
def test_latents_are_normed_rotated_and_written_as_the_reference_does(
    dtype: torch.dtype, num_tokens: int, heads: int, nope: int, rank: int, rotary: int, device: str
) -> None:
    torch.manual_seed(0)
    merged = random(num_tokens, heads * (nope + rotary) + rank + rotary, dtype=dtype, device=device)
    weight, stored = random(rank, dtype=dtype, device=device), random(12, rank + rotary, dtype=dtype, device=device)
    angles = torch.rand(num_tokens, rotary // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype)
    slots = torch.randperm(12)[:num_tokens].to(device)
    results = []
    for table in (reference_ops, ops(device)):
        mine, memory = merged.clone(), stored.clone()
        q, latents = mine[:, : -(rank + rotary)].view(num_tokens, heads, nope + rotary), mine[:, -(rank + rotary) :]
        table.latent_norm_rotary_write(q, latents, weight, 1e-6, cos_sin, stored=memory, slots=slots)
        assert torch.equal(memory[slots], latents)
        results.append((mine, memory))
    (expected, expected_memory), (actual, actual_memory) = results
    close(actual, expected, scale=2)
    close(actual_memory, expected_memory, scale=2)
    assert torch.equal(actual[:, :nope], merged[:, :nope])


def test_a_latent_memory_that_the_kernel_cannot_write_is_refused(device: str) -> None:
    q, latents, weight, cos_sin = (torch.zeros(shape, device=device) for shape in ((1, 2, 12), (1, 20), (16,), (1, 4)))
    stored, slots = torch.zeros(20, 4, device=device).T, torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="adjacent dims"):
        ops(device).latent_norm_rotary_write(q, latents, weight, 1e-6, cos_sin, stored=stored, slots=slots)


def test_a_kv_layout_that_the_kernel_cannot_write_is_refused(device: str) -> None:
    qkv, cos_sin = (torch.zeros(shape, device=device) for shape in ((1, 3, 16), (1, 16)))
    keys, values, slots = torch.zeros(4, 1, 16, device=device), torch.zeros(1, 4, 16, device=device), torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="adjacent dims"):
        ops(device).qk_norm_rotary_write(
            qkv, None, 0, cos_sin, keys=keys, values=values.transpose(0, 1), slots=slots.to(torch.int64)
        )


@pairwise(
    ("dtype", DTYPES),
    ("tokens, columns", [(0, 64), (1, 4096), (33, 34)]),
    ("strided", [False, True]),
)
def test_an_embedding_is_the_rows_of_its_table(dtype: torch.dtype, tokens: int, columns: int, strided: bool, device: str) -> None:
    torch.manual_seed(0)
    table = random(50, columns, dtype=dtype, device=device)
    ids = torch.randint(50, (tokens,), device=device)
    assert torch.equal(ops(device).embed(part_of_wider(table) if strided else table, ids), reference_ops.embed(table, ids))


@pairwise(
    ("dtype", DTYPES),
    ("shape", [(0, 64), (1, 6144), (33, 34), (3, 2, 1536)]),
    ("strided", [False, True]),
)
def test_gated_silu_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...], strided: bool, device: str) -> None:
    torch.manual_seed(0)
    x = random(*shape, dtype=dtype, device=device, scale=3)
    close(ops(device).gated_silu(part_of_wider(x) if strided else x), reference_ops.gated_silu(x))


@pairwise(
    ("dtype", DTYPES),
    ("bias", [False, True]),
    ("rows", [0, 1, 3, FEW_ROWS, FEW_ROWS + 1, MOST_ROWS + 1]),
    ("columns, outputs", [(256, 96), (17, 5), (5, 3), (1000, 33)]),
)
def test_linear_equals_the_reference(dtype: torch.dtype, bias: bool, rows: int, columns: int, outputs: int, device: str) -> None:
    torch.manual_seed(0)
    weight = random(outputs, columns, dtype=dtype, device=device, scale=columns**-0.5)
    offset = random(outputs, dtype=dtype, device=device) if bias else None
    x = random(rows, columns, dtype=dtype, device=device)
    linear = ops(device).bind_linear(part_of_wider(weight), offset)
    for given in (x, part_of_wider(x)):
        close(linear(given), reference_ops.bind_linear(weight, offset)(x))


@pytest.mark.parametrize(("block_n", "block_k"), [(1, 256), (2, 128), (8, 64), (2, 512)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_a_matrix_vector_product_equals_the_reference_whatever_its_blocks(
    block_n: int, block_k: int, rows: int, device: str
) -> None:
    torch.manual_seed(0)
    for columns in (256, 200):
        weight = random(9, columns, dtype=torch.bfloat16, device=device, scale=columns**-0.5)
        x, bias = (random(*shape, dtype=torch.bfloat16, device=device) for shape in ((rows, columns), (9,)))
        shape = MatvecShape(block_n=block_n, block_k=block_k, num_warps=2)
        product = Matvec(weight, bias, shape, dependent_launch=ops(device).dependent_launch)
        close(product(x), reference_ops.bind_linear(weight, bias)(x))


@pytest.mark.parametrize(("split", "rows"), [(1, 40), (2, 5), (5, 17)])
@pytest.mark.parametrize("columns", [640, 600])
def test_a_split_product_is_the_same_each_time(split: int, rows: int, columns: int, device: str) -> None:
    torch.manual_seed(0)
    weight = random(50, columns, dtype=torch.bfloat16, device=device, scale=columns**-0.5)
    x, bias = (random(*shape, dtype=torch.bfloat16, device=device) for shape in ((rows, columns), (50,)))
    shape = FewRowsShape(block_n=16, block_k=64, split=split, stages=3)
    product = FewRows(weight, bias, shape, dependent_launch=ops(device).dependent_launch)
    first = product(x)
    close(first, reference_ops.bind_linear(weight, bias)(x))
    for _ in range(3):
        assert torch.equal(product(x), first)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "columns"), [(4096, 4096), (6144, 4096), (4096, 14336), (5120, 2880), (2880, 4096)])
@pytest.mark.parametrize("rows", [2, 8, 9, 16, 17, 32, 33, 64])
def test_products_of_models_equal_the_reference(outputs: int, columns: int, rows: int, device: str) -> None:
    if device == "cpu":
        pytest.skip("these are too large for the interpreter")
    torch.manual_seed(0)
    weight = random(outputs, columns, dtype=torch.bfloat16, device=device, scale=columns**-0.5)
    x = random(rows, columns, dtype=torch.bfloat16, device=device)
    close(ops(device).bind_linear(weight, None)(x), reference_ops.bind_linear(weight, None)(x))


LARGE = [pytest.param(*size, marks=pytest.mark.gpu) for size in ((2048, 1030), (2880, 1025))]


@pytest.mark.parametrize(("columns", "outputs"), [(64, 40), (320, 96), (2304, 12), (2048, 14), (2880, 13), *LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_one_row_norms_the_row(
    monkeypatch: pytest.MonkeyPatch, columns: int, outputs: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    monkeypatch.setattr(matvec, "MOST_ROUTED", 13)  # as many and more outputs are cut as those of layers are
    torch.manual_seed(columns)
    weight = random(outputs, columns, dtype=dtype, device=device, scale=columns**-0.5)
    product = ops(device).bind_linear(weight, random(outputs, dtype=dtype, device=device) if bias else None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale = (random(*size, columns, dtype=dtype, device=device) for size in ((1,), (1,), ()))
    given, was, view = residual.clone(), residual.clone(), residual[0]
    normed = product.add_rms_norm(delta, residual, scale, 1e-5)
    assert normed is not None
    close(normed, reference_ops.add_rms_norm(delta, given, scale, 1e-5))
    assert torch.equal(residual, given)
    assert torch.equal(view, was[0]), "the sum has memory of its own"
    made = product(normed)
    close(made, product(given.new_tensor(normed.tolist())))
    assert product(normed) is not made, "it is handed out once"


@pytest.mark.parametrize("columns", [64, 320, 2304])
def test_a_row_that_is_normed_may_be_a_part_of_a_wider_one(columns: int, device: str) -> None:
    """Its columns have to be adjacent; the sum is no part of anything."""
    torch.manual_seed(columns)
    weight = random(40, columns, dtype=torch.bfloat16, device=device, scale=columns**-0.5)
    product = ops(device).bind_linear(part_of_wider(weight), None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale = (random(*size, columns, dtype=torch.bfloat16, device=device) for size in ((1,), (1,), ()))
    wide, apart = part_of_wider(residual), delta.repeat(2, 1).T.contiguous().T[:1]
    before = wide.clone()
    assert apart.stride(1) == 2
    assert product.add_rms_norm(apart, wide, scale, 1e-5) is None, "its columns are not adjacent"
    assert torch.equal(wide, before)
    normed = product.add_rms_norm(part_of_wider(delta), wide, part_of_wider(scale), 1e-5)
    assert normed is not None
    close(normed, reference_ops.add_rms_norm(delta, residual, scale, 1e-5))
    assert torch.equal(wide, residual)
    assert wide.untyped_storage().nbytes() == residual.nbytes
    close(product(normed), reference_ops.bind_linear(weight, None)(normed))


def test_a_router_norms_the_row(device: str) -> None:
    weight = random(12, 320, dtype=torch.bfloat16, device=device, scale=0.1)
    router = ops(device).bind_router(weight)
    assert isinstance(router, NormingLinear)
    delta, residual, scale = (random(*size, 320, dtype=torch.bfloat16, device=device) for size in ((1,), (1,), ()))
    given = residual.clone()
    normed = router.add_rms_norm(delta, residual, scale, 1e-5)
    assert normed is not None
    close(normed, reference_ops.add_rms_norm(delta, given, scale, 1e-5))
    logits = router(normed)
    assert logits.dtype == torch.float32
    close(logits, reference_ops.bind_router(weight)(normed), scale=2e3)  # whose row was rounded


def test_what_a_product_made_of_a_norm_is_of_that_norm_alone(device: str) -> None:
    product = ops(device).bind_linear(random(40, 64, dtype=torch.float32, device=device), None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale, other = (random(*size, 64, dtype=torch.float32, device=device) for size in ((1,), (1,), (), (1,)))
    normed = product.add_rms_norm(delta, residual, scale, 1e-5)
    assert normed is not None
    close(product(other), reference_ops.bind_linear(product.weight, None)(other))
    close(product(normed), reference_ops.bind_linear(product.weight, None)(normed))


@pytest.mark.parametrize("rows", [0, 2])
def test_norms_of_other_rows_are_left_to_others(rows: int, device: str) -> None:
    product = ops(device).bind_linear(random(40, 64, dtype=torch.float32, device=device), None)
    assert isinstance(product, NormingLinear)
    delta, residual, scale = (random(*size, 64, dtype=torch.float32, device=device) for size in ((rows,), (rows,), ()))
    before = residual.clone()
    assert product.add_rms_norm(delta, residual, scale, 1e-5) is None
    wide = ops(device).bind_linear(random(4, 4608, dtype=torch.float32, device=device), None)
    assert isinstance(wide, NormingLinear)
    assert wide.add_rms_norm(*random(2, 1, 4608, dtype=torch.float32, device=device), scale, 1e-5) is None, "too wide"
    assert product.add_rms_norm(delta[:1], residual[:1], scale.double(), 1e-5) is None, "the weight is of another type"
    assert torch.equal(residual, before)


def test_other_inputs_go_to_torch(device: str) -> None:
    weight = random(8, 16, 2, dtype=torch.float32, device=device)[..., 0]
    x = random(2, 3, 16, dtype=torch.float32, device=device)
    close(ops(device).bind_linear(weight, None)(x), reference_ops.bind_linear(weight, None)(x))
    contiguous = weight.contiguous()
    close(ops(device).bind_linear(contiguous, None)(x), reference_ops.bind_linear(weight, None)(x))
    close(ops(device).bind_linear(contiguous, None)(x[0].T.contiguous().T), reference_ops.bind_linear(weight, None)(x[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_a_layer_of_operations_is_captured_in_a_graph(rows: int, device: str) -> None:
    if device == "cpu":
        pytest.skip("graphs are of CUDA devices")
    torch.manual_seed(0)
    mine, dtype = ops(device), torch.bfloat16
    weights = [random(*shape, dtype=dtype, device=device, scale=0.03) for shape in ((6144, 1024), (1024, 3072))]
    norm = random(1024, dtype=dtype, device=device)
    gate_up, down = (mine.bind_linear(weight, None) for weight in weights)
    x, residual = (random(rows, 1024, dtype=dtype, device=device) for _ in range(2))

    def run(table: TritonOps | None, residual: torch.Tensor) -> torch.Tensor:
        if table is None:
            normed = reference_ops.add_rms_norm(x, residual, norm, 1e-6)
            return reference_ops.gated_silu(normed @ weights[0].T) @ weights[1].T
        return down(table.gated_silu(gate_up(table.add_rms_norm(x, residual, norm, 1e-6))))

    static = residual.clone()
    run(mine, static.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(mine, static)
    for _ in range(3):
        x.copy_(random(rows, 1024, dtype=dtype, device=device))
        static.copy_(residual)
        graph.replay()
        expected_sum = residual.clone()
        expected = run(None, expected_sum)
        assert torch.equal(static, expected_sum)
        assert (out - expected).float().norm() < 1e-2 * expected.float().norm()


def test_the_spec_gives_what_it_promises(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
    needs = OpNeeds(device=device, dtype="bfloat16", compute_capability=(9, 0) if device == "cuda" else None)
    assert TRITON.refuse(needs) == []
    assert sorted(TRITON.load(needs)) == sorted(TRITON.provides)


@pytest.mark.parametrize(
    ("needs", "interpret", "rule"),
    [
        (OpNeeds(device="cpu", dtype="float32"), "0", "device"),
        (OpNeeds(device="mps", dtype="float32"), "0", "device"),
        (OpNeeds(device="cuda", dtype="float32"), "1", "device"),
        (OpNeeds(device="cuda", dtype="float64"), "0", "dtype"),
        (OpNeeds(device="cuda", dtype="float16", compute_capability=(7, 5)), "0", "compute_capability"),
    ],
)
def test_the_rest_is_refused(needs: OpNeeds, interpret: str, rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    (reason,) = TRITON.refuse(needs)
    assert reason.rule == rule


def test_a_machine_without_triton_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if device == "cpu" else "0")
    monkeypatch.setattr("enginery_ops_triton.spec.find_spec", lambda name: None)
    needs = OpNeeds(device=device, dtype="bfloat16", compute_capability=(9, 0) if device == "cuda" else None)
    assert [reason.rule for reason in TRITON.refuse(needs)] == ["installed"]
