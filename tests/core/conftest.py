"""A site directory of fake distributions, which is all that discovery sees."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import quick_processes

from enginery.plugin import discovery

BACKEND = """
from enginery.api import AttnBackendSpec, Capabilities, hookimpl

@hookimpl
def register_attn_backends():
    can = Capabilities(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), kv_dtypes=frozenset({"float32"}))
    return [AttnBackendSpec(name="NAME", api=(2, 0), priority=PRIORITY, capabilities=can, summary="a fake")]

@hookimpl
def create_attn_backend(name, context):
    return ("PACKAGE", name, context)
"""


class Site:
    """Installs fake distributions below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packages: list[str] = []

    @staticmethod
    def backend(name: str, *, priority: int = 1, package: str = "somewhere") -> str:
        """The source of a plugin that offers one attention backend."""
        return BACKEND.replace("NAME", name).replace("PRIORITY", str(priority)).replace("PACKAGE", package)

    def install(
        self,
        distribution: str,
        code: str = "",
        *,
        name: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
        value: str | None = None,
        metadata: str | None = None,
        where: Path | None = None,
    ) -> str:
        """Write a package with `code` and its .dist-info; returns the package's name. The plugin is `name`, or the distribution."""
        where = where or self.path
        package = distribution.replace("-", "_")
        self.packages.append(package)
        (where / package).mkdir(parents=True, exist_ok=True)
        (where / package / "__init__.py").write_text(textwrap.dedent(code))
        info = where / f"{package}-{version}.dist-info"
        info.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {distribution}",
            f"Version: {version}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n" if metadata is None else metadata)
        (info / "entry_points.txt").write_text(f"[enginery]\n{name or distribution} = {value or package}\n")
        return package

    def run(self, code: str, *, is_fresh: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in a process that has the site on its path. is_fresh: it is about what is imported."""
        path = os.pathsep.join([str(self.path), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": path} | environ
        kind, how = "light" if is_fresh else "whole", {"capture_output": True, "text": True, "timeout": 150, "check": False}
        return quick_processes.run_python("-c", textwrap.dedent(code), kind=kind, env=env, **how)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site directory, on sys.path; nothing else is discovered."""
    here = Site(tmp_path / "site")
    here.path.mkdir()
    monkeypatch.syspath_prepend(str(here.path))
    monkeypatch.setattr(discovery, "distributions", lambda: importlib.metadata.distributions(path=[str(here.path)]))
    for name in ("ENGINERY_BLOCKED_PLUGINS", "ENGINERY_NO_PLUGINS", "ENGINERY_STRICT_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    yield here
    for module in [name for name in sys.modules if name.partition(".")[0] in here.packages]:
        del sys.modules[module]
    importlib.invalidate_caches()
