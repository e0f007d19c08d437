"""`engine bench`: how fast this machine runs a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

bench_app = typer.Typer(no_args_is_help=True, help="Measure how fast this machine runs a model.")


@bench_app.command()
def offline(
    workload: Annotated[list[str], typer.Argument(help="Names of workloads: W1..W7 for a GPU, C1, C16, CP for a CPU.")],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = "auto",
    attention_backend: Annotated[str, typer.Option(help="A name of `engine list-backends`, or auto.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Passes that count, after one that does not.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of reports.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the reports as JSON to this file too.")] = None,
) -> None:
    """Run workloads in this process, with random weights and without a tokenizer, and print tokens per second."""
    from enginery.run.bench import report, run_workload, serving
    from enginery.run.workloads import find_workload

    reports = []
    for chosen in [find_workload(name) for name in workload]:
        with serving(chosen, dtype=dtype, device=device, attention_backend=attention_backend) as llm:
            reports.append(report(llm, chosen, run_workload(llm, chosen, repeats=repeats)))
    if output is not None:
        output.write_text(json.dumps(reports, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(reports, indent=1))
        return
    table = Table("workload", "what", "dtype", "seconds", "out tok/s", "in tok/s")
    for entry in reports:
        rates = (f"{entry[key]:,.1f}" for key in ("total_s", "output_tokens_per_s", "prompt_tokens_per_s"))
        table.add_row(entry["workload"], f"{entry['shape']}: {entry['summary']}", entry["dtype"], *rates)
    Console().print(table)


@bench_app.command()
def hooks(
    repeats: Annotated[int, typer.Option(min=1, help="Steps that are planned of each kind.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers.")] = False,
) -> None:
    """Plan steps through the deepest nest of attention composites, and print what its hooks cost: microseconds per step."""
    from enginery.run.bench_hooks import measure_hooks

    measured = measure_hooks(repeats=repeats)
    if as_json:
        typer.echo(json.dumps(measured, indent=1))
        return
    table = Table("step", "planned through hooks", "planned directly", "hooks")
    for step, times in measured.items():
        table.add_row(step, *(f"{times[name]:.1f} us" for name in ("through_hooks_us", "directly_us", "hooks_us")))
    Console().print(table)
