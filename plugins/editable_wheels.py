"""Make editable wheels of several projects in one process: python editable_wheels.py FOLDER PROJECT..

pip starts three processes for each project, a second of processor time; here a project takes a tenth of that. FOLDER is made anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

from setuptools import build_meta


def main(folder: Path, projects: list[Path]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for project in projects:
        told = io.StringIO()
        try:
            with contextlib.chdir(project), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                build_meta.build_editable(os.fspath(folder))
        except BaseException:
            print(f"{project} cannot be built\n{told.getvalue()}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), [Path(project).resolve() for project in sys.argv[2:]])
