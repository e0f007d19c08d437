"""Make editable wheels of several projects: python editable_wheels.py FOLDER PROJECT..

pip starts three processes for each project, a second of processor time; here a project takes a tenth of that. Those that compile
something take half a minute each, so there are as many processes as cores, and such projects come first. FOLDER is made anew.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from setuptools import build_meta


def build(project: Path, folder: Path) -> None:
    told = io.StringIO()
    try:
        with contextlib.chdir(project), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            build_meta.build_editable(os.fspath(folder))
    except BaseException:
        print(f"{project} cannot be built\n{told.getvalue()}", file=sys.stderr)
        raise


def main(folder: Path, projects: list[Path]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    projects.sort(key=lambda project: not (project / "setup.py").exists())
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        for built in [pool.submit(build, project, folder) for project in projects]:
            built.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), [Path(project).resolve() for project in sys.argv[2:]])
