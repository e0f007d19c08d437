"""Plugins that were loaded once serve every test of a process, but not where anything about them is another."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from enginery.plugin.registry import Registry


def test_what_was_loaded_serves_again() -> None:
    assert Registry.load().manager is Registry.load().manager


@pytest.mark.parametrize("changed", ["a name", "the environment", "a path", "what is wanted"])
def test_it_is_loaded_anew_where_something_is_another(changed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = Registry.load()
    if changed == "a name":
        plugin = before.manager.get_plugin("core")
        assert plugin is not None
        monkeypatch.setattr(plugin, "__doc__", "another")
    if changed == "the environment":
        monkeypatch.setenv("TRITON_INTERPRET", "another")
    if changed == "a path":
        monkeypatch.syspath_prepend(str(tmp_path))
    after = Registry.load(blocked=[before.attn_backends[0].plugin] if changed == "what is wanted" else ())
    assert after.manager is not before.manager


def test_an_absent_module_is_found_once_it_is_on_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert importlib.util.find_spec("a_module_of_this_test") is None
    (tmp_path / "a_module_of_this_test.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("a_module_of_this_test") is not None
