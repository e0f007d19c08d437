"""Plugins that were loaded once serve every test of a process, but not where anything about them is another."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from enginery.cli.main import build_app
from enginery.contracts.attention import AttnBackendSpec
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
    after = Registry.load(blocked=[before.offers(AttnBackendSpec)[0].plugin] if changed == "what is wanted" else ())
    assert after.manager is not before.manager


def test_an_absent_module_is_found_once_it_is_on_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert importlib.util.find_spec("a_module_of_this_test") is None
    (tmp_path / "a_module_of_this_test.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("a_module_of_this_test") is not None


@pytest.fixture
def apart() -> Iterator[logging.Logger]:
    """A logger that does not propagate, since before the test."""
    made = logging.getLogger("a logger of this test")
    made.propagate = False
    yield made
    made.propagate = True


def test_what_is_logged_apart_is_captured(apart: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    apart.warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


def test_an_app_that_is_built_again_has_the_flags_of_its_commands() -> None:
    first, second = (get_command(build_app()).commands["serve"].params for _ in range(2))
    assert [(one.name, one.opts, one.default) for one in first] == [(one.name, one.opts, one.default) for one in second]
    assert not {id(one) for one in first} & {id(one) for one in second}
