"""`engine replay`: recorded steps again, on one attention backend or on two, until they part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from enginery.cli.flags import completion

_NAME = "The model, where it is not where it was recorded."


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What engine serve --record-steps N FILE has written.")],
    *,
    attention_backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run on this one, instead of the recorded one.", autocompletion=completion.backends),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Compare with this one, call by call; without it, with the recorded tokens.",
            autocompletion=completion.backends,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help=_NAME)] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, if not where it was recorded: cpu or cuda.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="The largest difference, as a part of the largest value (0.001 in float32, else 0.1)."),
    ] = None,
) -> None:
    """Run recorded steps again from empty memory, eagerly, and say at which step, layer and request two backends part.

    Exits with 1 if they do, or if nothing was compared.
    """
    if not _agree(file, (attention_backend, against), model=model, device=device, tolerance=tolerance):
        raise typer.Exit(1)


def _agree(
    file: Path, backends: tuple[str | None, str | None], *, model: str | None, device: str | None, tolerance: float | None
) -> bool:
    """Replay, and print what was found. False if they part, or nothing was compared."""
    from enginery.config.sources import registry_for
    from enginery.engine.recording import read_recording
    from enginery.engine.replay import build_replica, compare_replicas, compare_tokens, replay_options

    recording, (backend, against) = read_recording(file), backends
    asked = recording.head.options
    registry = registry_for(asked)
    first = build_replica(replay_options(recording, backend, model=model, device=device), registry, recording)
    if against is None:
        other, outcome = "the recorded tokens", compare_tokens(recording, first, tolerance=tolerance)
    else:
        second = build_replica(replay_options(recording, against, model=model, device=device), registry, recording)
        other, outcome = second.name, compare_replicas(recording, first, second, tolerance=tolerance)
    if outcome.parting is not None:
        print(f"{first.name} and {other} part at {outcome.parting}")
        return False
    total = len(recording.steps)
    if outcome.largest is None:
        found = "nothing was compared: in none are all tokens greedy; give a backend with --against"
        print(f"{first.name} ran {total:,} steps, and {found}")
        return False
    calls = f" and {outcome.num_calls:,} calls of attention" if outcome.num_calls else ""
    steps = f"{outcome.num_steps:,} of {total:,} steps"
    print(f"{first.name} and {other} agree in {steps}{calls}; the largest difference is at {outcome.largest}")
    return True
