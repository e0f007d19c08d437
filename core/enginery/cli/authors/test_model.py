"""`engine test-model`: a checkpoint by an installed family against transformers, and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from enginery.cli.authors.report import OnlyFlag, ReportFlag, StopFlag, finish, watched
from enginery.errors import CheckpointError
from enginery.plugin.registry import Registry


def check_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint in Hugging Face's layout; a small one is best.")],
    *,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run it.")] = "cpu",
    load_format: Annotated[Literal["auto", "dummy"], typer.Option(help="dummy: draw weights; no parity to check then.")] = "auto",
    only: OnlyFlag = "",
    stop_first: StopFlag = False,
    as_json: ReportFlag = False,
) -> None:
    """Check that a model gives transformers' numbers, and the same in chunks, in batches, and after a cached prefix."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give the folder of a checkpoint")
    from enginery.testing.kits.checks import run_checks
    from enginery.testing.kits.models import ModelSubject, model_checks

    subject = ModelSubject(folder=folder, device=device, options={"load_format": load_format})
    family, why = Registry.load().find_model(subject.config)
    with watched(as_json=as_json) as (console, on_row):
        console.print(f"{family.name} of {family.source} {why}", markup=False, soft_wrap=True)
        report = run_checks(str(folder), model_checks(subject), only=only, stop_first=stop_first, on_row=on_row)
    finish(console, report, f"{folder} on {device}", as_json=as_json)
