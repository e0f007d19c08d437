"""What a step brings to the device goes there by `to_device`: other copies may stop the host until the device is done."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "core" / "enginery"
WORKER = [path for path in sorted((CORE / "worker").rglob("*.py")) if path.parent.name != "weights" and path.name != "warm_up.py"]
FILES = [*WORKER, *sorted((CORE / "attention").glob("*.py"))]
AT_CAPTURES = {  # and at the start: functions that no step calls
    "decode_capture": ("_padding_alone",),
    "draft_graphs": ("_capture_steps",),
    "draws": ("__init__",),
    "mixed_graphs": ("provide",),
    "piecewise_capture": ("lent",),
    "trees": ("standing_in_comb",),
}
MAKERS = {"tensor", "as_tensor", "from_numpy"}  # of host values


def blocking_uploads(source: str, but: Collection[str] = ()) -> Iterator[int]:
    """Lines with `.to(device)`, or with a maker of host values that is given a device. but: functions that are left out."""
    tree = ast.parse(source)
    left_out = {
        each for found in ast.walk(tree) if isinstance(found, ast.FunctionDef) and found.name in but for each in ast.walk(found)
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call not in left_out:
            names = [ast.unparse(value).rpartition(".")[2] for value in call.args]
            makes_there = call.func.attr in MAKERS and any(keyword.arg == "device" for keyword in call.keywords)
            if makes_there or (call.func.attr == "to" and "device" in names):
                yield call.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_is_copied_to_the_device_while_the_host_waits(file: Path) -> None:
    assert not list(blocking_uploads(file.read_text(), AT_CAPTURES.get(file.stem, ())))


def test_what_is_left_out_copies_so() -> None:
    sources = {file.stem: file.read_text() for file in FILES if file.stem in AT_CAPTURES}
    assert {name for name, source in sources.items() if list(blocking_uploads(source))} == set(AT_CAPTURES)


@pytest.mark.parametrize("source", ["rows.to(self.device)", "x.to(device, non_blocking=True)", "torch.tensor([1], device=device)"])
def test_such_a_copy_is_found(source: str) -> None:
    assert list(blocking_uploads(source)) == [1]


@pytest.mark.parametrize("source", ["x.to(torch.float32)", 'x.to("cpu")', "torch.empty(3, device=device)", "to_device(x, device)"])
def test_others_are_not(source: str) -> None:
    assert not list(blocking_uploads(source))
