"""Pages that lead to a plugin, followed to the letter: their files are written out and installed on a site."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import quick_processes

DOCS = Path(__file__).parents[3] / "docs"


def files_of(page: str) -> dict[str, str]:
    """The blocks of docs/`page` that follow a line with a path, by that path."""
    text = (DOCS / page).read_text()
    return dict(re.findall(r"^`([\w./-]+)`\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def drawn_in(page: str) -> set[str]:
    """The files in the drawing of a folder with which docs/`page` begins."""
    drawing = re.search(r"^```text\n[\w-]+/\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert drawing is not None
    names, folder = set(), ""
    for line in drawing[1].splitlines():
        name, nested = line.split()[0], line.startswith(" " * 8)
        if name.endswith("/"):
            folder = name
        else:
            names.add(folder + name if nested else name)
    return names


def install_page(page: str, site, parent: Path) -> Path:
    """Write the page's distribution below `parent` and install it; returns its folder."""
    files = files_of(page)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    folder = parent / project["name"]
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    ((name, package),) = project["entry-points"]["enginery"].items()
    site.install(project["name"], name=name, version=project["version"], requires=project["dependencies"], value=package)
    for path, text in files.items():
        if path.startswith("src/"):
            (site.path / path.removeprefix("src/")).write_text(text)
    return folder


def own_tests(folder: Path, *flags: str) -> str:
    """Code that runs a distribution's tests, and nothing but them. flags: of pytest, besides the usual ones."""
    own = ["--rootdir", str(folder), str(folder / "tests")]
    arguments = ["-q", "-p", "no:cacheprovider", *quick_processes.WITHOUT_PLUGINS, *flags, *own]
    return f"import sys, pytest\nsys.exit(pytest.main({arguments!r}))"
