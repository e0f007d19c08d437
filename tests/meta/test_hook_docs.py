"""Each hook is in the manual with its signature, and has a test of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from enginery.attention.hookspecs import BackendHooks
from enginery.plugin.hookspecs import EngineHooks

ROOT = Path(__file__).parents[2]


def hooks_of(scope: type) -> dict[str, Callable[..., object]]:
    """The hooks that a class of specifications declares."""
    return {name: member for name, member in vars(scope).items() if inspect.isfunction(member) and not name.startswith("_")}


def signature(hook: Callable[..., object]) -> str:
    """`name(arg1, arg2)`, as the manual's heading has it."""
    return f"{hook.__name__}({', '.join(name for name in inspect.signature(hook).parameters if name != 'self')})"


def undocumented(scope: type, manual: str) -> list[str]:
    """Signatures that the manual does not contain."""
    return [signature(hook) for hook in hooks_of(scope).values() if signature(hook) not in manual]


def untested(scope: type, tests: str) -> list[str]:
    """Hooks without a test named after them."""
    return [name for name in hooks_of(scope) if not re.search(rf"def test_hook_{name}(?:_\w+)?\(", tests)]


def test_every_hook_is_in_the_manual_with_its_signature() -> None:
    page = (ROOT / "docs" / "hooks.md").read_text()
    assert undocumented(EngineHooks, page) == []
    assert undocumented(BackendHooks, page) == []


def test_every_hook_has_a_test() -> None:
    sources = [path.read_text() for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]]
    assert untested(EngineHooks, "\n".join(sources)) == []


class Planted:
    """Two hooks, of which the texts below know one."""

    def register_things(self) -> None: ...

    def make_thing(self, name: str, context: object) -> None: ...


def test_a_hook_that_is_not_in_the_manual_is_reported() -> None:
    assert undocumented(Planted, "## register_things()\n## make_thing(name)\n") == ["make_thing(name, context)"]


def test_a_hook_without_a_test_is_reported() -> None:
    assert untested(Planted, "def test_hook_make_thing_once() -> None:\n") == ["register_things"]
