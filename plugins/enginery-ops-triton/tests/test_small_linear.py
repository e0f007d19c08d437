"""Which shapes of blocks products of few rows get."""

from __future__ import annotations

import pytest

from enginery_ops_triton.small_linear import few_rows_shape


@pytest.mark.parametrize(
    ("outputs", "columns", "rows", "expected"),
    [
        (4096, 4096, 16, (64, 256, 4, 3)),  # 256 programs, two on each of 132 multiprocessors
        (6144, 4096, 16, (64, 256, 4, 2)),  # 384, three
        (6400, 4096, 16, None),  # 400 are too many
        (4096, 14336, 32, (32, 256, 1, 5)),
        (4096, 14336, 64, (64, 128, 2, 5)),
        (2880, 4096, 32, (32, 256, 1, 5)),  # 90 programs, two thirds of the multiprocessors
        (2880, 4096, 64, None),
        (128, 2880, 32, (16, 256, 12, 2)),  # a router
        (128, 2880, 64, None),
        (2048, 14336, 32, None),  # 64 programs leave half of the device idle
        (4096, 3072, 17, None),
        (1024, 2048, 16, (32, 512, 4, 3)),
        (28672, 4096, 64, None),
    ],
)
def test_all_programs_of_a_product_run_at_once(
    outputs: int, columns: int, rows: int, expected: tuple[int, int, int, int] | None
) -> None:
    found = few_rows_shape(outputs, columns, rows, multiprocessors=132)
    assert (None if found is None else (found.block_n, found.block_k, found.split, found.stages)) == expected
