"""Which shapes of blocks products of few rows get, and those whose weights go straight to the matrix units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compared_products import TOLERANCE, assert_equals_float64
from gluon_by_interpreter import interpreted
from triton_devices import NEEDS_INTERPRETER

from enginery.api import OpNeeds
from enginery_ops_triton import gluon_kernels as versions
from enginery_ops_triton import small_linear
from enginery_ops_triton.gluon_kernels import gluon_kernels
from enginery_ops_triton.kernels import linear_few
from enginery_ops_triton.kernels.precision import INTERPRETED
from enginery_ops_triton.matvec import normed_shape
from enginery_ops_triton.persistent_rows import serves_few
from enginery_ops_triton.small_linear import DirectRows, DirectShape, direct_shape, few_rows_shape
from enginery_ops_triton.spec import TRITON

DIRECT = {
    "few outputs": DirectShape(block_n=16, block_k=64, num_warps=8, ahead=4, x_ahead=4, registers=128),
    "more outputs": DirectShape(block_n=32, block_k=32, num_warps=16, ahead=2, x_ahead=1, registers=128),
    "more x ahead": DirectShape(block_n=16, block_k=128, num_warps=4, ahead=1, x_ahead=2, registers=128),
}


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


@pytest.mark.parametrize(
    ("outputs", "columns", "rows", "expected"),
    [
        (2048, 4096, 1, (16, 16, 4)),
        (2048, 512, 1, (16, 16, 1)),
        (1024, 3072, 1, (16, 16, 3)),
        (896, 3072, 1, None),
        (2048, 10944, 1, None),
        (2304, 4096, 1, (32, 8, 5)),
        (4096, 4096, 1, (32, 16, 2)),
        (4096, 4096, 8, (32, 16, 2)),
        (12288, 2048, 1, (32, 8, 2)),
        (6144, 4096, 1, None),  # as matvec
        (6144, 4096, 8, (32, 8, 2)),
        (4096, 14336, 1, None),
        (4096, 14336, 8, (16, 16, 4)),
        (28672, 4096, 8, None),  # cuBLAS
        (21888, 2048, 2, (32, 8, 2)),
        (21888, 2048, 1, None),  # as matvec
        (32784, 2048, 8, None),
        (21888, 2304, 8, None),
        (1056, 2880, 8, (16, 16, 3)),
        (128, 2880, 8, None),
        (4096, 1024, 8, None),
    ],
)
def test_direct_products_where_they_are_fastest(
    outputs: int, columns: int, rows: int, expected: tuple[int, int, int] | None
) -> None:
    found = direct_shape(outputs, columns, rows, multiprocessors=132)
    assert (None if found is None else (found.block_n, found.num_warps, found.ahead)) == expected


@pytest.mark.parametrize(
    ("outputs", "columns", "expected"),
    [
        (28672, 4096, ["Matvec", "Persistent", "Shares", "Shares", "Shares"]),
        (4096, 4096, ["DirectRows", "Persistent", "Shares", "Shares", "FewRows"]),
        (4096, 14336, ["Matvec", "Shares", "Shares", "Shares", "Shares"]),
        (6144, 4096, ["Matvec", "Persistent", "Shares", "Shares", "partial"]),
        (2048, 8192, ["DirectRows", "DirectRows", "Shares", "Shares", "partial"]),
        (21888, 2048, ["Matvec", "DirectRows", "Shares", "Shares", "partial"]),
        (1024, 2048, ["DirectRows", "Persistent", "FewRows", "partial", "partial"]),
        (1000, 2048, ["DirectRows", "FewRows", "FewRows", "partial", "partial"]),
    ],
)
def test_what_serves_each_number_of_rows_on_hopper(
    outputs: int, columns: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shares:
        programs = 128

    class Persistent:
        pass

    def bind_persistent(weight: torch.Tensor, _: None, *, is_direct: bool, multiprocessors: int) -> Persistent | None:
        return Persistent() if serves_few(*weight.shape, is_direct=is_direct) else None

    monkeypatch.setattr(small_linear, "bind_stream_k", lambda *_, **__: Shares())
    monkeypatch.setattr(small_linear, "bind_persistent", bind_persistent)
    product = small_linear.bind_small_linear(torch.empty(outputs, columns, dtype=torch.bfloat16), None, dependent_launch=True)
    assert isinstance(product, small_linear.Product)
    assert [type(product.by_rows[most]).__name__ for most in (1, 8, 16, 32, 64)] == expected
    assert list(product.by_rows) == sorted(product.by_rows), "the first that is for so many rows is taken"


@pytest.mark.parametrize(
    ("experts", "columns", "rows", "own"),
    [
        (64, 2048, 2, True),  # DeepSeek-V2-Lite
        (6, 2880, 3, True),  # gpt-oss's columns, in one block
        (9, 2304, 8, True),  # Kimi-Linear's, in nine
        (5, 200, 7, True),
        (8, 256, 9, False),
        (4, 5120, 1, True),
        (4, 5120, 2, False),  # more columns than a program has at once
    ],
)
def test_what_serves_a_router_of_few_rows(
    experts: int, columns: int, rows: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of NaN lie around those that are given: only these are read, and nothing is written behind those that are told."""
    torch.manual_seed(rows)
    device = "cpu" if INTERPRETED.value else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("triton was imported for the compiler in this process")
    asked, room = list[int](), torch.full((16, experts), -1.0, device=device)

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return x.float() @ weight.float().T

    weight = (torch.randn(experts, columns) * columns**-0.5).to(device, torch.bfloat16)
    monkeypatch.setattr(small_linear.reference_ops, "bind_router", lambda _: of_torch)
    router = small_linear.bind_router(weight, dependent_launch=device == "cuda")
    wider = torch.full((rows + 2, columns), float("nan"), dtype=torch.bfloat16, device=device)
    x = wider[1:-1].copy_(torch.randn(rows, columns))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda shape, **_: room[: shape[0]])
        logits = router(x)
    assert logits.dtype == torch.float32
    assert logits.shape == (rows, experts)
    assert (room[rows:] == -1).all()
    assert asked == ([] if own else [rows])
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-4)


def test_a_product_that_norms_its_row_has_all_columns_at_once() -> None:
    for columns in range(16, 4097):
        for outputs in (8, 1024):
            shape = normed_shape(outputs, columns)
            assert shape is not None
            assert shape.ahead * shape.block_k >= columns
    assert normed_shape(1024, 4097) is None


def make_direct(outputs: int, columns: int, shape: DirectShape, *, biased: bool, dtype: torch.dtype, device: str) -> DirectRows:
    kernels = gluon_kernels("linear_few")
    assert kernels is not None
    weight = (torch.randn(outputs, columns) * columns**-0.5).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if biased else None
    return DirectRows(weight, bias, shape, kernels=kernels, dependent_launch=device == "cuda")


@NEEDS_INTERPRETER
@pytest.mark.parametrize("shape", DIRECT.values(), ids=DIRECT)
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "biased", "dtype"),
    [(2, 48, 1024, False, torch.bfloat16), (8, 40, 1544, True, torch.float16), (5, 33, 200, True, torch.bfloat16)],
)
def test_what_direct_products_compute_equals_float64(
    rows: int,
    outputs: int,
    columns: int,
    biased: bool,
    dtype: torch.dtype,
    shape: DirectShape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Triton in place of Gluon: see gluon_by_interpreter.py."""
    torch.manual_seed(rows)
    product = make_direct(outputs, columns, shape, biased=biased, dtype=dtype, device="cpu")
    product.kernels = interpreted(monkeypatch, Path(str(linear_few.__file__)), num_warps=shape.num_warps)
    assert_equals_float64(product, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", DIRECT.values(), ids=DIRECT)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("outputs", "columns", "biased"), [(1056, 4096, False), (2887, 2880, True), (2048, 2056, True)])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_direct_products_equal_float64(
    rows: int, outputs: int, columns: int, biased: bool, dtype: torch.dtype, shape: DirectShape
) -> None:
    torch.manual_seed(rows)
    product = make_direct(outputs, columns, shape, biased=biased, dtype=dtype, device="cuda")
    assert_equals_float64(product, rows)


def test_a_device_that_does_without_kernels_in_gluon_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When operations are loaded; older devices and CPUs have no such kernels."""
    told = []
    with monkeypatch.context() as patched:
        patched.setattr(versions, "warn_without_gluon", lambda: told.append(True))
        for device, capability in (("cuda", (9, 0)), ("cuda", (8, 0)), ("cpu", None)):
            TRITON.load(OpNeeds(device=device, dtype="bfloat16", compute_capability=capability))
            assert told == [True]
    versions.warn_without_gluon("3.6.0")
    versions.warn_without_gluon("3.7.1")
    assert not caplog.records
    versions.warn_without_gluon("3.8.0")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "triton 3.8.0 is installed" in caplog.text
    assert "torch 2.11 comes with triton 3.6, torch 2.13 with 3.7" in caplog.text
