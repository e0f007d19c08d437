"""Products with weights equal the core's reference, interpreted and compiled."""

from __future__ import annotations

import pytest
import torch
from compared_ops import DTYPES, close, ops, part_of_wider, random
from pairwise import pairwise
from triton_devices import DEVICES

from enginery.nn import reference_ops
from enginery_ops_triton.matvec import Matvec, MatvecShape
from enginery_ops_triton.small_linear import FEW_ROWS, MOST_ROWS, FewRows, FewRowsShape

pytestmark = pytest.mark.parametrize("device", DEVICES)


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


def test_other_inputs_go_to_torch(device: str) -> None:
    weight = random(8, 16, 2, dtype=torch.float32, device=device)[..., 0]
    x = random(2, 3, 16, dtype=torch.float32, device=device)
    close(ops(device).bind_linear(weight, None)(x), reference_ops.bind_linear(weight, None)(x))
    contiguous = weight.contiguous()
    close(ops(device).bind_linear(contiguous, None)(x), reference_ops.bind_linear(weight, None)(x))
    close(ops(device).bind_linear(contiguous, None)(x[0].T.contiguous().T), reference_ops.bind_linear(weight, None)(x[0]))
