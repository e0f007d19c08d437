"""Each operation equals the core's reference."""

from __future__ import annotations

import pytest
import torch

from enginery.api import OpNeeds
from enginery.nn import reference_ops
from enginery_ops_cpu import ops
from enginery_ops_cpu.spec import COMPILED, CPU

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[actual.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 300])
@pytest.mark.parametrize(("columns", "outputs"), [(64, 96), (17, 5), (128, 1)])
def test_packed_linear_equals_the_reference(dtype: torch.dtype, bias: bool, rows: int, columns: int, outputs: int) -> None:
    if CPU.refuse(OpNeeds(device="cpu", dtype=str(dtype).removeprefix("torch."))):
        pytest.skip("this CPU has no instructions for it, and the plugin says so")
    torch.manual_seed(0)
    weight = (torch.randn(outputs, columns) * columns**-0.5).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    x = torch.randn(rows, columns).to(dtype)
    close(ops.bind_linear(weight.clone(), offset)(x), reference_ops.bind_linear(weight, offset)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 768), (3, 4, 16)])
def test_norms_equal_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1]).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), reference_ops.rms_norm(x, weight, 1e-5))
    mine, theirs = residual.clone(), residual.clone()
    close(ops.add_rms_norm(x, mine, weight, 1e-5), reference_ops.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(mine, theirs)


def test_a_weight_per_head_broadcasts() -> None:
    x, weight = torch.randn(3, 4, 16), torch.randn(4, 16)
    close(ops.rms_norm(x, weight, 1e-6), reference_ops.rms_norm(x, weight, 1e-6))


def test_it_refuses_everything_but_a_cpu_and_gives_what_it_promises() -> None:
    assert CPU.refuse(OpNeeds(device="cuda", dtype="float32"))[0].rule == "device"
    needs = OpNeeds(device="cpu", dtype="float32")
    assert CPU.refuse(needs) == []
    assert sorted(CPU.load(needs)) == sorted(CPU.provides)
    assert COMPILED.refuse(OpNeeds(device="cuda", dtype="float32"))[0].rule == "device"
    if not COMPILED.refuse(needs):
        assert sorted(COMPILED.load(needs)) == sorted(COMPILED.provides)


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_is_refused_where_the_cpu_cannot_pack_it(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginery_ops_cpu.spec._packs_bfloat16", lambda: supported)
    reasons = CPU.refuse(OpNeeds(device="cpu", dtype="bfloat16"))
    assert [reason.rule for reason in reasons] == ([] if supported else ["dtype"])
    assert CPU.refuse(OpNeeds(device="cpu", dtype="float32")) == []
