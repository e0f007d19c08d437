"""What must be quick to start loads neither torch nor transformers, each in a process that had nothing of the engine before."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path

import pytest
import quick_processes

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers"}
PLUGIN_PACKAGES = sorted(
    package
    for path in ROOT.glob("plugins/*/pyproject.toml")
    for package in tomllib.loads(path.read_text())["project"]["entry-points"]["enginery"].values()
)
MODULES = ["", ".api", ".cli.main", ".config", ".contracts", ".errors", ".plugin", ".serve", ".serve.app", ".text"]
MODULES += [".serve.server", ".serve.engine.process"]
# ops-cpu and --dtype auto ask torch what the CPU has.
WHY = ["list-backends", "--why", "enginery-tiny", "--device", "cpu", "--dtype", "float32", "-p", "no:ops-cpu"]
COMMANDS = [["--help"], ["serve", "--help"], ["list-backends"], WHY, ["plugins"], ["test-backend", "--help"]]


def loaded_by(code: str, heavy: Collection[str] = HEAVY, *, behind: str = "light") -> set[str]:
    """The heavy packages that a process has loaded after running `code`. behind: what it had before, of `quick_processes.KINDS`.
    Raises with its stderr if it fails."""
    report = f"import json, sys; print(json.dumps(sorted({set(heavy)!r} & sys.modules.keys())))"
    how = {"capture_output": True, "text": True, "timeout": 150, "check": False}
    done = quick_processes.run_python("-c", f"{code}\n{report}", kind=behind, **how)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", [f"enginery{name}" for name in MODULES])
def test_importing_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from enginery.cli.main import main
sys.argv = {["engine", *arguments]!r}
try:
    main()
except SystemExit as stop:
    assert not stop.code, f"exit status {{stop.code}}"
"""
    assert loaded_by(code) == set()


def test_a_new_checkpoint_is_written_without_what_is_heavy(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from enginery.cli.authors import new_plugin; path = Path({str(tmp_path)!r})"
    assert loaded_by(f"{code}; new_plugin.write_plugin('checkpoint', 'a', path)", {*HEAVY, "pytest", "enginery.llm"}) == set()


def test_importing_all_plugins_loads_nothing_heavy() -> None:
    assert loaded_by("import " + ", ".join(["enginery", *PLUGIN_PACKAGES])) == set()


def test_norms_that_have_no_memory_yet_do_not_load_torchs_compiler() -> None:
    """At each start a model is built of such first; the import takes seconds."""
    code = """
import torch
from enginery.nn.norm import take_norm

class Weights:
    def take(self, name, shape):
        return torch.empty(shape, device="meta")

take_norm(Weights(), "norm", 4, offset=1.0)
"""
    assert loaded_by(code, {"torch", "torch._dynamo"}, behind="torch") == {"torch"}


@pytest.mark.parametrize("kit", ["conformance", "kits.ops", "kits.models"])
def test_the_kits_commands_need_no_pytest(kit: str) -> None:
    """Who installs the engine alone has none: `engine test-backend`, `test-op` and `test-model` run there too."""
    loaded_by(f"import sys; sys.modules['pytest'] = None; import enginery.testing.{kit}", behind="torch")


def test_what_they_are_forked_from_has_neither_the_engine_nor_what_is_heavy() -> None:
    ours = "import sys; [sys.modules.setdefault('ours', sys) for name in list(sys.modules) if name.startswith('enginery')]"
    heavy = {*HEAVY, "pytest", "ours", "torch._dynamo"}
    assert loaded_by(ours, heavy) == set()
    assert loaded_by(f"import torch; {ours}", heavy, behind="torch") == {"torch"}


def test_a_heavy_import_is_noticed() -> None:
    assert loaded_by("import sys; sys.modules['torch'] = sys") == {"torch"}


def test_a_model_with_norms_of_heads_starts_without_torchs_compiler(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from enginery.testing.fixtures import TINY_CONFIG, open_tiny_llm, write_tiny_checkpoint

config = TINY_CONFIG | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
open_tiny_llm(write_tiny_checkpoint(Path({str(tmp_path)!r}), config), load_format="dummy").close()
"""
    assert loaded_by(code, {"torch", "torch._dynamo"}, behind="torch") == {"torch"}
