"""Norms, gates and embeddings equal the core's reference, interpreted and compiled; what the plugin refuses."""

from __future__ import annotations

import pytest
import torch
from compared_ops import DTYPES, close, ops, part_of_wider, random
from pairwise import pairwise
from triton_devices import DEVICES

from enginery.api import OpNeeds
from enginery.nn import reference_ops
from enginery_ops_triton.ops import TritonOps
from enginery_ops_triton.spec import TRITON

pytestmark = pytest.mark.parametrize("device", DEVICES)


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
    ("op", ["gated_silu", "gated_gelu"]),
)
def test_gated_halves_equal_the_reference(dtype: torch.dtype, shape: tuple[int, ...], strided: bool, op: str, device: str) -> None:
    torch.manual_seed(0)
    x = random(*shape, dtype=dtype, device=device, scale=3)
    close(getattr(ops(device), op)(part_of_wider(x) if strided else x), getattr(reference_ops, op)(x))


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
