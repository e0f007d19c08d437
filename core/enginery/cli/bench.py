"""`engine bench`: how fast this machine runs a model, and its parts."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Final

import typer

from enginery.bench.report import Report
from enginery.cli.bench_serve import LoadFlags, bench_running, bench_started, with_load_flags
from enginery.cli.flags import completion
from enginery.cli.flags.bench import with_report_flags
from enginery.cli.flags.engine import naming, with_engine_flags
from enginery.cli.flags.plugins import BlockFlags, blocked_names
from enginery.cli.tables import console, print_table
from enginery.config.resolve import DTYPES
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError

bench_app = typer.Typer(no_args_is_help=True, help="Measure how fast this machine runs a model.")

_Repeats = Annotated[int, typer.Option(min=1, help="Passes that count, after one that does not.")]
_MODEL: Final = typer.Argument(
    metavar="MODEL", help="A shape or workload of engine bench offline, or any model.", autocompletion=completion.bench_models
)


@bench_app.command()
@with_engine_flags
@with_report_flags
def offline(
    options: EngineOptions,
    *,
    workload: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKLOAD",
            help="Names of workloads: W1..W7 for a GPU, C1, C16, CP for a CPU; or SHAPE:STREAMS, requests of 512 in and 256 out.",
            autocompletion=completion.workloads,
        ),
    ],
    repeats: _Repeats = 3,
    force_acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="With --drafter: how often each guess is to be right, as 0.78,0.74, whatever it is. Answers mean nothing.",
        ),
    ] = None,
) -> Report:
    """Run workloads with random weights and without a tokenizer, and print how near they come to what the device can do."""
    from enginery.bench.offline import bench_offline
    from enginery.bench.workloads import find_workload

    if options.model is not None:
        raise ConfigError(
            f"a workload has a shape of its own; leave out the model {options.model} (--model, ENGINERY_MODEL, --config)"
        )
    workloads = [find_workload(name) for name in workload]
    if force_acceptance is not None:
        from enginery.bench.forced import bench_forced, parse_rates

        return bench_forced(workloads, options, parse_rates(force_acceptance), repeats=repeats)
    return bench_offline(workloads, options, repeats=repeats)


@bench_app.command()
@with_engine_flags
@with_report_flags
def latency(
    options: EngineOptions,
    *,
    named: Annotated[str, _MODEL],
    input_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt; the workload's, or 128.")] = None,
    output_len: Annotated[int | None, typer.Option(min=1, help="Tokens to generate; the workload's, or 128.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once. Repeatable.")] = None,
    repeats: _Repeats = 3,
) -> Report:
    """Run equal requests, a batch at a time, and print how long the first token takes, and each further one's share of its step."""
    from enginery.bench.latency import bench_latency
    from enginery.bench.workloads import WORKLOADS, equal_requests

    workload = WORKLOADS.get(named)
    lengths = workload.lengths[0] if workload else (128, 128)
    options = dataclasses.replace(naming(options, workload.shape if workload else named), wait_for_kernels=True)
    batches = [
        equal_requests(count, input_len=input_len or lengths[0], output_len=output_len or lengths[1]) for count in batch_size or [1]
    ]
    return bench_latency(options, batches, repeats=repeats)


@bench_app.command()
@with_engine_flags
@with_report_flags
def startup(
    options: EngineOptions,
    *,
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A shape of engine bench offline, or any model.", autocompletion=completion.bench_models
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Processes to start, one after the other.")] = 3,
) -> Report:
    """Start fresh processes, and print how long each takes from its start to its first token, and with what."""
    from enginery.bench.startup import bench_startup

    return bench_startup(naming(options, named), repeats=repeats, input_len=input_len)


@bench_app.command()
@with_engine_flags
@with_load_flags
@with_report_flags
def serve(
    load: LoadFlags,
    options: EngineOptions,
    *,
    named: Annotated[str | None, _MODEL] = None,
    url: Annotated[
        str | None, typer.Option(help="Of a server with OpenAI's API, whose key is ENGINERY_API_KEY; one is started if left out.")
    ] = None,
) -> Report:
    """Send requests over HTTP, and print what their senders see: times to the first token, between tokens and in all, and rates.

    With --url, MODEL or --model is a name of that server's, and other settings are refused. The status is 1 if a request failed.
    """
    return bench_started(load, options, named) if url is None else bench_running(load, options, url, named)


@bench_app.command()
@with_report_flags
def kernels(
    *,
    attention_backend: Annotated[
        list[str] | None,
        typer.Option(
            help="A name of engine list-backends. Repeatable; all that can run here if left out.",
            autocompletion=completion.backends,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quick: Annotated[bool | None, typer.Option("--quick/--full", help="Small sizes, as on a CPU, or large ones.")] = None,
    plugin_options: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME.KEY=VALUE", help="An option of a plugin's part. Repeatable.")
    ] = None,
    block: BlockFlags = None,
) -> Report:
    """Time attention backends and operations alone, beside what the device can do."""
    from enginery.bench.kernels import bench_kernels
    from enginery.plugin.registry import Registry
    from enginery.worker.device import torch_device

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}")
    registry = Registry.load(blocked=blocked_names(block or ()), options=plugin_options or ())
    small = torch_device(device).type == "cpu" if quick is None else quick
    options = EngineOptions(device=device, dtype=dtype, plugin_options=tuple(plugin_options or ()))
    return bench_kernels(registry, options, attention_backend or [], quick=small)


@bench_app.command()
def hooks(
    repeats: Annotated[int, typer.Option(min=1, help="Steps that are planned of each kind.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers.")] = False,
) -> None:
    """Plan steps through the deepest nest of attention composites, and print what its hooks cost: microseconds per step."""
    from enginery.bench.hooks import measure_hooks

    measured = measure_hooks(repeats=repeats)
    if as_json:
        typer.echo(json.dumps(measured, indent=1))
        return
    shown = {"planned through hooks": "through_hooks_us", "planned directly": "directly_us", "hooks": "hooks_us"}
    rows = [
        {"step": step, **{heading: f"{times[name]:.1f} us" for heading, name in shown.items()}} for step, times in measured.items()
    ]
    print_table(console(), rows, right=shown)
