"""What `engine serve` hands to the server."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from enginery.cli.main import build_app
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch):
    """Runs `engine serve` with arguments; returns the options that would be served."""
    taken: list[EngineOptions] = []
    monkeypatch.setattr("enginery.serve.server.serve", lambda options, registry, settings: taken.append(options))

    def run(*arguments: str) -> EngineOptions:
        result = CliRunner().invoke(build_app(), ["serve", "--no-plugins", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return taken.pop()

    return run


def test_the_model_may_be_named_with_or_without_its_flag(served) -> None:
    assert served("folder").model == served("--model", "folder").model == served("-m", "folder").model == "folder"
    assert served().model is None


def test_two_models_are_refused(served) -> None:
    with pytest.raises(ConfigError, match="two models are named, a and b"):
        served("a", "-m", "b")
