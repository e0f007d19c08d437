"""A machine on which nothing is wrong for `engine doctor`, and what it says there."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import quick_processes
from typer.testing import CliRunner

from enginery.cli import doctor as doctor_module
from enginery.cli import doctor_checks
from enginery.cli.main import build_app

Rows = dict[str, dict[str, str]]
PLUGIN = """
from enginery.api import ModelSpec, hookimpl

@hookimpl
def register_models():
    return [ModelSpec(name="NAME", api=(2, 0), architectures=("ARCHITECTURE",), describe=print, build=print)]
"""
ALL_FINE = {"version": "2.13", "cuda": None, "devices": ["a GPU"], "why": "", "gloo": True, "nccl": "", "apart": []}


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs plugins that are all that the doctor's own processes find."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    only = "from enginery.plugin import discovery\nimport importlib.metadata as m\n"
    only += f"discovery.distributions = lambda: m.distributions(path=[{str(site)!r}])\n"
    for code in ("_ASK_PLUGINS", "_ASK_MODEL"):
        monkeypatch.setattr(doctor_module, code, only + vars(doctor_module)[code])

    def install(distribution: str, code: str, *, name: str | None = None) -> None:
        package = distribution.replace("-", "_")
        (site / package).mkdir()
        (site / package / "__init__.py").write_text(code)
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[enginery]\n{name or distribution} = {package}\n")

    with quick_processes.code_too():
        yield install


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with torch, the plugins and this machine, and no process is needed to see that."""
    found = {
        doctor_module._ASK_TORCH: ALL_FINE,
        doctor_module._ASK_PLUGINS: {"records": [], "default": {"name": "m", "folder": "/nowhere"}},
    }
    asked = doctor_module._ask
    monkeypatch.setattr(
        doctor_module, "_ask", lambda code, *rest, **more: (found[code], "") if code in found else asked(code, *rest, **more)
    )
    monkeypatch.setattr(doctor_module, "_default_model", lambda found: doctor_checks.Check(name="model", status="ok", detail="m"))
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (65536, 65536))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))


def examine(*arguments: str, code: int) -> Rows:
    done = CliRunner().invoke(build_app(), ["doctor", "--json", "--port", "0", *arguments])
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.exit_code == code, done.output
    return rows


def failed(rows: Rows) -> set[str]:
    return {name for name, row in rows.items() if row["status"] == "fail"}
