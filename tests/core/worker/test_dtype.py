"""Which type a checkpoint's weights are used in."""

from __future__ import annotations

import pytest

from enginery.config.resolve import DeviceFacts, resolve
from enginery.config.schema import EngineOptions
from enginery.contracts.model import ModelFacts

MODEL = ModelFacts(vocab_size=1, hidden_size=1, max_positions=4096, activation_width=1, layers=())


@pytest.mark.parametrize(
    ("kind", "has_bfloat16", "stated", "asked", "expected"),
    [
        ("cuda", True, "bfloat16", "auto", "bfloat16"),
        ("cuda", True, "float16", "auto", "float16"),
        ("cpu", True, "bfloat16", "auto", "bfloat16"),
        ("cpu", False, "bfloat16", "auto", "float32"),
        ("cpu", False, "bfloat16", "bfloat16", "bfloat16"),
        ("cpu", True, "float16", "auto", "float32"),
        ("cpu", True, None, "auto", "float32"),
    ],
)
def test_it_is_the_stated_one_unless_the_cpu_is_slow_in_it(
    kind: str, has_bfloat16: bool, stated: str | None, asked: str, expected: str
) -> None:
    device = DeviceFacts(kind=kind, name="a fake", available_bytes=1, num_threads=1, has_bfloat16=has_bfloat16)
    settings = resolve(EngineOptions(dtype=asked), device, MODEL, config={"torch_dtype": stated} if stated else {})
    assert settings.dtype == expected
    if stated is not None and stated != expected:
        (decision,) = [each for each in settings.decisions if each.setting == "dtype"]
        assert f"--dtype {stated}" in decision.reason


@pytest.mark.parametrize("stated", ["float64", "int4"])
def test_a_stated_type_that_no_engine_computes_in_is_named(stated: str) -> None:
    device = DeviceFacts(kind="cuda", name="a fake", available_bytes=1, num_threads=1, has_bfloat16=True)
    settings = resolve(EngineOptions(), device, MODEL, config={"dtype": stated})
    (decision,) = [each for each in settings.decisions if each.setting == "dtype"]
    assert settings.dtype == "float32"
    assert stated in decision.reason


@pytest.mark.parametrize(("kind", "has_bfloat16", "told"), [("cpu", False, True), ("cpu", True, False), ("cuda", False, False)])
def test_the_start_says_where_the_dtype_asked_for_is_the_slower_one(kind: str, has_bfloat16: bool, told: bool) -> None:
    device = DeviceFacts(kind=kind, name="a fake", available_bytes=1, num_threads=1, has_bfloat16=has_bfloat16)
    settings = resolve(EngineOptions(dtype="bfloat16"), device, MODEL, config={})
    (decision,) = [each for each in settings.decisions if each.setting == "dtype"]
    assert ("float32 is faster on this CPU" in decision.reason) is told


@pytest.mark.parametrize("dtype_from", ["config.json", "most weights"])
@pytest.mark.parametrize("stated", ["float32", "bfloat16", "float64"])
def test_the_start_says_what_said_it(stated: str, dtype_from: str) -> None:
    device = DeviceFacts(kind="cpu", name="a fake", available_bytes=1, num_threads=1)
    settings = resolve(EngineOptions(), device, MODEL, config={"dtype": stated}, dtype_from=dtype_from)
    (decision,) = [each for each in settings.decisions if each.setting == "dtype"]
    assert decision.reason.startswith(f"that of {dtype_from}")
