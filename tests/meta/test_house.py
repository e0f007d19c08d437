"""The core stays in order: `house.py` measures, and the limits are here. `pytest -s` prints the table.

Lowering a limit needs no reason, raising one is a commit of its own with its reason.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

import pytest
from meta.house import CORE, House, complexity, cycles, measure, probes_in, room_imports, table

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

WALK: Final = CORE.parents[1] / "docs" / "how-a-request-runs.md"

MOST_ANY: Final = 60
MOST_SHORT_DOCSTRINGS: Final = 4
MOST_MODULES: Final = 17  # of a folder, without its __init__: the contracts are one for each hook group, and drafters came
MOST_FUNCTIONS_OVER_40_LINES: Final = 7
MOST_COMPLEX: Final = 10
MOST_COMPLEX_WITHOUT_A_REASON: Final = 0
MOST_FRAMES: Final = 7  # from Engine.step to a backend's attend, both counted
MOST_TYPES: Final = 18  # made for one decoding step: with a view for each kind of memory, and what the ways to run a step share

# "file:function": why this function of complexity 11 or more is better whole.
WHY_COMPLEX: Final[dict[str, str]] = {
    "text/template_process.py:render": "whatever a template may raise is caught around all that is done with it",
}


@pytest.fixture(scope="module")
def house() -> House:
    return measure()


def test_any_is_named_seldom(house: House) -> None:
    assert sum(house.num_any.values()) <= MOST_ANY, house.num_any


def test_complex_functions_are_few_and_have_a_reason(house: House) -> None:
    found = house.complex_functions
    unexplained = {place: value for place, value in found.items() if place not in WHY_COMPLEX}
    assert len(found) <= MOST_COMPLEX, found
    assert len(unexplained) <= MOST_COMPLEX_WITHOUT_A_REASON, unexplained
    assert all(WHY_COMPLEX.values())


def test_a_reason_is_given_for_complex_functions_alone(house: House) -> None:
    assert [place for place in WHY_COMPLEX if place not in house.complex_functions] == [], "no longer complex; take it off the list"


def test_functions_are_short(house: House) -> None:
    long = [function.place for function in house.functions if function.lines > 40]
    assert len(long) <= MOST_FUNCTIONS_OVER_40_LINES, long


def test_docstrings_that_say_nothing_are_few(house: House) -> None:
    assert len(house.short_docstrings) <= MOST_SHORT_DOCSTRINGS, house.short_docstrings


def test_everything_is_typed_and_most_of_what_is_public_explained(house: House) -> None:
    assert [function.place for function in house.functions if not function.typed] == []
    assert house.documented >= 0.9 * house.public_definitions


def test_no_room_is_a_drawer(house: House) -> None:
    assert {folder: count for folder, count in house.modules.items() if count > MOST_MODULES} == {}


def test_rooms_do_not_import_each_other_in_a_circle(house: House) -> None:
    assert house.cycles == ()


def test_there_is_no_global_and_no_probe(house: House) -> None:
    assert house.globals_ == ()
    assert house.probes == ()


class Watched:
    """A small engine that runs a request. stacks: of each call of `attend`, the places of our code from `Engine.step` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = pytest.importorskip("enginery_attn_torch.backend").TorchAttention
        attend, self.stacks = backend.attend, list[list[str]]()

        @functools.wraps(attend)
        def watched(*given: object) -> None:
            self.stacks.append([*stack_to(sys._getframe(1), Engine.step), attend.__qualname__])
            attend(*given)

        monkeypatch.setattr(backend, "attend", watched)
        asked = EngineOptions(device="cpu", attention_backend="torch", num_pages=64)
        self.engine = Engine.build(asked, Registry.load(blocked=(), no_plugins=False, options={}))
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        self.engine.submit(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), params=params))
        self.engine.step()  # the prompt


def stack_to(frame: FrameType | None, last: Callable[..., object]) -> list[str]:
    """The functions of Enginery, plugins too, from `last` down to `frame`. torch's own frames and decorators are left out."""
    found: list[str] = []
    while frame is not None:
        if "enginery" in str(frame.f_globals.get("__name__")):
            found.append(frame.f_code.co_qualname)
        if frame.f_code.co_qualname == last.__qualname__:
            return found[::-1]
        frame = frame.f_back
    raise AssertionError(f"nothing on the stack is {last.__qualname__}: {found}")


def types_made(call: Callable[[], object]) -> set[str]:
    """Classes of Enginery of which `call` makes objects in Python."""
    made: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        name, variables = frame.f_code.co_name, frame.f_code.co_varnames
        if event == "call" and (name in ("__init__", "__new__") or variables[:1] == ("_cls",)):  # named tuples have a lambda
            first = frame.f_locals[variables[0]]
            kind = first if isinstance(first, type) else type(first)
            if kind.__module__.split(".")[0].startswith("enginery"):
                made.add(kind.__name__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return made


def test_a_step_reaches_the_kernel_in_few_frames_and_types(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    prefill = watched.stacks[-1]
    outputs = []
    made = types_made(lambda: outputs.extend(watched.engine.step()))
    types = sorted(made | {type(output).__name__ for output in outputs})
    decode = watched.stacks[-1]
    print(f"\n{table(house, frames=len(decode), types=len(types))}")
    print(f"frames: {' > '.join(decode)}\ntypes: {', '.join(types)}")
    assert outputs[0].token_ids
    assert prefill == decode
    assert len(decode) <= MOST_FRAMES
    assert " > ".join(decode) in WALK.read_text(), "docs/how-a-request-runs.md has another way"
    assert len(types) <= MOST_TYPES


def test_the_script_prints_the_table() -> None:
    command = [sys.executable, Path(__file__).with_name("house.py"), CORE / "kv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("| | here |\n")
    assert f"({len(list((CORE / 'kv').rglob('*.py')))}) |" in done.stdout


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1", 1),
        ("if a and b or c:\n  pass\nelif d:\n  pass\nelse:\n  pass", 5),
        ("for x in a:\n  pass\nwhile a:\n  pass\nassert a", 4),
        ("try:\n  pass\nexcept A:\n  pass\nexcept B:\n  pass", 3),
        ("return [x if x else y for x in a if x if y]", 5),
        ("match a:\n  case 1:\n    pass\n  case _:\n    pass", 2),
        ("def inner():\n  if a:\n    pass\nreturn lambda: a or b", 1),
    ],
)
def test_complexity_is_counted(body: str, expected: int) -> None:
    (function,) = ast.parse("def f():\n" + "".join(f" {line}\n" for line in body.splitlines())).body
    assert complexity(function) == expected


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c", "torch"}, "c": {"a"}, "d": {"a"}}) == (("a", "b", "c"),)
    assert cycles({"a": {"b"}, "b": set()}) == ()


def test_imports_of_rooms_and_probes_are_found() -> None:
    source = "import enginery.kv.pool\nfrom enginery import nn\nfrom ..text import x\ndef f():\n    from .b import y\n"
    assert room_imports(ast.parse(source), "engine/a.py") == {"kv", "nn", "text", "engine"}
    assert probes_in(ast.parse("hasattr(a, 'b')\ngetattr(a, 'b', 0)\ngetattr(a, 'b')\n")) == [1, 2]
