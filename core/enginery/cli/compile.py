"""`engine compile`: a model's kernels, compiled before its first start."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from enginery.cli.flags.engine import with_engine_flags
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError

if TYPE_CHECKING:
    from enginery.config.resolve import DeviceFacts


@with_engine_flags
def compile_model(
    options: EngineOptions,
    *,
    compute_capability: Annotated[
        str | None, typer.Option(metavar="X.Y", help="Of the device to compile for, where this machine has none: 9.0 for an H200.")
    ] = None,
) -> None:
    """Compile a model's kernels ahead of its first start, for instance into a container image.

    On a machine with the device everything is compiled; without one, given --compute-capability, what nvcc compiles. Triton's
    kernels take a device, and some 20 s at the first start.
    """
    from enginery.config.sources import registry_for
    from enginery.engine.compile_process import compile_kernels
    from enginery.engine.engine import Engine
    from enginery.worker.choice import choose

    console = Console(highlight=False)
    registry = registry_for(options)
    device = None if compute_capability is None else _device_of(compute_capability)
    options = dataclasses.replace(options, load_format="dummy", device="cuda" if device else options.device)
    choice = choose(options, registry, device)
    console.print(f"attention of {choice.checkpoint.name} on {choice.device_facts.name}: {choice.attention.name}")
    if choice.to_compile:
        began, count = time.monotonic(), sum(len(wish.missing) for wish in choice.to_compile)
        for wish in choice.to_compile:
            console.print(f"{wish.backend} lacks {', '.join(wish.missing)}", soft_wrap=True)
        with console.status(f"compiling {count} modules, which takes minutes"):
            compile_kernels(registry, [(wish.backend, wish.needs) for wish in choice.to_compile])
        console.print(f"compiled {count} modules in {time.monotonic() - began:.0f} s")
    else:
        console.print("no attention kernel is missing")
    if device is None and choice.device_facts.kind == "cuda":
        began = time.monotonic()
        with console.status("running each kind of step once"):
            Engine.build(dataclasses.replace(options, wait_for_kernels=True), registry).close()
        console.print(f"ran each kind of step once in {time.monotonic() - began:.0f} s")


def _device_of(compute_capability: str) -> DeviceFacts:
    """A device that is not here."""
    from enginery.config.resolve import DeviceFacts

    if not re.fullmatch(r"\d{1,2}\.\d", compute_capability):
        raise ConfigError(f"--compute-capability is {compute_capability!r}, but must be two numbers, for instance 9.0")
    major, minor = map(int, compute_capability.split("."))
    name = f"a device of compute capability {compute_capability}"
    return DeviceFacts(kind="cuda", name=name, available_bytes=0, num_threads=1, compute_capability=(major, minor))
