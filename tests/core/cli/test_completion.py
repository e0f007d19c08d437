"""What the shell completes, how completion is installed, and how the help of engine serve is laid out."""

from __future__ import annotations

import os

import pytest
import quick_processes
from typer.testing import CliRunner

from enginery.bench.workloads import WORKLOADS, shapes
from enginery.cli.flags import completion
from enginery.cli.main import build_app

PANELS = ["Server", "Model", "Device and parts", "Memory and batching", "Plugins"]


# In a process that must not load torch; what is offered after each line ends with "--".
SHELL = """
import os, sys
from enginery.cli.main import main
for line in sys.argv[1:]:
    os.environ |= {"_ENGINE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    sys.argv = ["engine"]
    try:
        main([])
    except SystemExit as ended:
        assert not ended.code
    print("--")
assert "torch" not in sys.modules
"""


def test_the_shell_is_offered_names_and_values() -> None:
    offered = {
        "engine doc": {"doctor"},
        "engine serve --attention-b": {"--attention-backend"},
        "engine bench offline W2": {"W2", "W2s"},
        "engine bench serve llama-": {name for name in shapes() if name.startswith("llama-")},
        "engine serve --kv-dtype f": {"fp8", "float32", "float16"},
        "engine serve --schedule-policy f": {"fcfs"},
    }
    done = quick_processes.run_python("-c", SHELL, *offered, kind="light", capture_output=True, text=True, check=True)
    found = [set(told.split()) for told in done.stdout.split("--\n")[:-1]]
    assert dict(zip(offered, found, strict=True)) == offered


def test_what_plugins_offer_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name
            self.record = self

    class Registry:
        @classmethod
        def load(cls) -> type[Registry]:
            return cls

        @staticmethod
        def offers(kind: type) -> list[Named]:
            return [Named("fa"), Named("fb"), Named("x")]

    monkeypatch.setattr(completion, "Registry", Registry)
    monkeypatch.setattr(completion, "discover", lambda wanted: Registry.offers(object))
    assert completion.backends("f") == completion.policies("f") == completion.models("f") == ["fa", "fb"]
    assert completion.backends("a") == ["auto"]
    assert completion.coordinators("") == ["fa", "fb", "off", "x"]
    assert completion.blocks("no:f") == ["no:fa", "no:fb"]
    assert completion.bench_models("") == [*sorted(WORKLOADS), *sorted(shapes()), "fa", "fb", "x"]
    assert completion.one_of("a", "b", "ab")("a") == ["a", "ab"]


@pytest.mark.parametrize(
    ("name", "file"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", ".config/fish/completions/engine.fish")]
)
def test_completion_installs_itself(name: str, file: str, tmp_path) -> None:
    environ = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "import sys; from enginery.cli.main import main; sys.argv = ['engine', '--install-completion', sys.argv[1]]; main()"
    done = quick_processes.run_python("-c", code, name, capture_output=True, text=True, check=True, env=environ)
    assert f"{name} completion installed" in done.stdout
    assert (tmp_path / file).is_file()
    assert any("_ENGINE_COMPLETE" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_of_serve_is_grouped_and_fits(width: int) -> None:
    shown = CliRunner(env={"COLUMNS": str(width)}).invoke(build_app(), ["serve", "--help"]).output
    headings = [line.strip("╭╮─ ") for line in shown.splitlines() if line.startswith("╭")]
    assert [heading for heading in headings if heading in PANELS] == PANELS
    assert max(map(len, shown.splitlines())) <= width
    options = shown.partition("─ Options")[2].partition("╰")[0]
    assert options.count("--") == 1, "an option stands in no group"
    assert "--help" in options


def test_a_default_is_told_where_there_is_one() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(build_app(), ["serve", "--help"]).output
    (line,) = (line for line in shown.splitlines() if "--memory-fraction" in line)
    assert "[default: 0.85]" in line
