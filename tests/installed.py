"""Plugins that are installed for a test: what pip leaves of a distribution, in a folder that the test puts on the path."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, distribution: str, module: str, code: str | None = None, *, name: str | None = None) -> None:
    """The plugin `name`, or of the distribution's name, is `module`, which is written to the folder if there is code of it."""
    if code is not None:
        (site / f"{module}.py").write_text(code)
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[enginery]\n{name or distribution} = {module}\n")
