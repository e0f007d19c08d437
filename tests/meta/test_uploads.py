"""What a step brings to the device goes there by `to_device`: other copies may stop the host until the device is done."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "core" / "enginery"
OF_STEPS = [CORE / "worker" / f"{name}.py" for name in ("runner", "sampling", "token_feed", "page_tables", "layout")]
FILES = [*OF_STEPS, *sorted((CORE / "attention").glob("*.py"))]
MAKERS = {"tensor", "as_tensor", "from_numpy"}  # of host values


def blocking_uploads(source: str) -> Iterator[int]:
    """Lines with `.to(device)`, or with a maker of host values that is given a device."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            names = [ast.unparse(value).rpartition(".")[2] for value in call.args]
            makes_there = call.func.attr in MAKERS and any(keyword.arg == "device" for keyword in call.keywords)
            if makes_there or (call.func.attr == "to" and "device" in names):
                yield call.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_is_copied_to_the_device_while_the_host_waits(file: Path) -> None:
    assert not list(blocking_uploads(file.read_text()))


@pytest.mark.parametrize("source", ["rows.to(self.device)", "x.to(device, non_blocking=True)", "torch.tensor([1], device=device)"])
def test_such_a_copy_is_found(source: str) -> None:
    assert list(blocking_uploads(source)) == [1]


@pytest.mark.parametrize("source", ["x.to(torch.float32)", 'x.to("cpu")', "torch.empty(3, device=device)", "to_device(x, device)"])
def test_others_are_not(source: str) -> None:
    assert not list(blocking_uploads(source))
