"""`engine bench serve`: its flags, and the server that it starts where none is named."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from enginery.bench.report import Report, Row, make_report
from enginery.bench.workloads import WORKLOADS, Workload, checkpoint_folder, equal_requests, write_tokenizer
from enginery.cli.flags.engine import model_of_server, naming
from enginery.cli.flags.signature import ResultT, flags_of, option, with_flags
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError, EnginError

if TYPE_CHECKING:
    from enginery.bench.serve_load import Client, Load

_PANEL: Final = "Load"
_KEY: Final = "ENGINERY_API_KEY"  # no flag, which would be in the report
_OPEN_S: Final = 60
_ROUNDS: Final = 8
_ANY: Final = equal_requests(16 * _ROUNDS, input_len=512, output_len=128)
_WARM_UP_S: Final = 2  # of a rate
_PAUSE_S: Final = 3.0  # after them, in which a server may capture what it has not
_SERVE: Final = """
import os, signal, sys, threading
from enginery.cli.main import main
def end_with_parent():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end_with_parent, daemon=True).start()
main(sys.argv[1:])
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """What a user may ask of the load. Each field is a flag."""

    rate: Annotated[list[float] | None, option(_PANEL, "Requests per second, at random. Repeatable.", min=0.001, max=1e5)] = None
    concurrency: Annotated[
        list[int] | None,
        option(_PANEL, "Requests at once, the next when one ends. Repeatable; 16 if no load is named.", min=1),
    ] = None
    requests: Annotated[
        int | None, option(_PANEL, f"How many; {_OPEN_S} s of a rate, or {_ROUNDS} for each of those at once.", min=1)
    ] = None
    warm_up: Annotated[
        int | None,
        option(
            _PANEL,
            "Requests first that do not count, all at once; as many as a load has at once, or a rate in "
            f"{_WARM_UP_S} s, if left out.",
            min=0,
        ),
    ] = None
    input_len: Annotated[str | None, option(_PANEL, "Tokens of a prompt, or LEAST:MOST; the workload's, or 512.", metavar="N")] = (
        None
    )
    output_len: Annotated[str | None, option(_PANEL, "Tokens to generate, or LEAST:MOST; the workload's, or 128.", metavar="N")] = (
        None
    )
    shared_prefix: Annotated[int | None, option(_PANEL, "First tokens that all prompts share; the workload's, or 0.", min=0)] = None
    vocab_size: Annotated[int | None, option(_PANEL, "Token ids in prompts are below it; the model's, or 30,000.", min=11)] = None


def with_load_flags(command: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Give a command, whose first parameter takes the `LoadFlags`, a flag for each field."""
    return with_flags(command, flags_of(LoadFlags), lambda given: LoadFlags(**given))


def loads(asked: LoadFlags, named: str | None) -> list[Load]:
    """Each rate, then each concurrency. named: a workload brings its lengths, and all of it at once unless a load is asked for."""
    from enginery.bench.serve_load import Load

    workload = WORKLOADS.get(named or "", _ANY)
    shared = workload.shared_prefix if asked.shared_prefix is None else asked.shared_prefix
    made = []
    for arrivals in _arrivals(asked, workload):
        lengths = _lengths(asked, workload, asked.requests or arrivals.requests)
        if (shortest := min(length for length, _ in lengths)) <= shared:
            raise ConfigError(f"--shared-prefix is {shared}, but must be less than the {shortest} tokens of the shortest prompt")
        load = Load(
            lengths=lengths,
            rate=arrivals.rate,
            concurrency=arrivals.concurrency,
            shared_prefix=shared,
            temperature=workload.temperature,
        )
        made.append(load)
    return made


class _Arrivals(NamedTuple):
    """When requests come: `rate` of them a second, or `concurrency` at once where rate is None; and how many come by default."""

    rate: float | None
    concurrency: int
    requests: int


def _arrivals(asked: LoadFlags, workload: Workload) -> list[_Arrivals]:
    found = [_Arrivals(rate, 1, math.ceil(rate * _OPEN_S)) for rate in asked.rate or ()]
    found += [_Arrivals(None, count, count * _ROUNDS) for count in asked.concurrency or ()]
    at_once = 16 if workload is _ANY else len(workload.lengths)
    return found or [_Arrivals(None, at_once, len(workload.lengths))]


def _lengths(asked: LoadFlags, workload: Workload, count: int) -> tuple[tuple[int, int], ...]:
    draw, own = random.Random(1), workload.lengths
    bounds = [_bounds("input_len", asked.input_len), _bounds("output_len", asked.output_len)]
    of_each = [own[index % len(own)] for index in range(count)]
    drawn = [[draw.randint(*bound) if bound else length for bound, length in zip(bounds, each, strict=True)] for each in of_each]
    return tuple((prompt, output) for prompt, output in drawn)


def _warm_up(load: Load, wanted: int | None) -> Load | None:
    """Requests of this kind, all at once: as many as wanted, or as the load has at once. None for no request."""
    usual = load.concurrency if load.rate is None else math.ceil(load.rate * _WARM_UP_S)
    count = min(usual if wanted is None else wanted, len(load.lengths))
    return dataclasses.replace(load, lengths=load.lengths[:count], rate=None, concurrency=count) if count else None


def _bounds(name: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    least, _, most = text.partition(":")
    try:
        bounds = int(least), int(most or least)
    except ValueError:
        bounds = 0, 0
    if not 0 < bounds[0] <= bounds[1]:
        raise ConfigError(f"--{name.replace('_', '-')} is {text!r}, but must be a number, as 512, or two, as 100:1024")
    return bounds


def bench_running(asked: LoadFlags, options: EngineOptions, url: str, named: str | None) -> Report:
    """Of a server that runs. named: a workload, or a model of the server's; otherwise that of the options, or its first."""
    from enginery.bench.serve_load import Client

    model = model_of_server(options if named in WORKLOADS else naming(options, named))
    client = Client(url, api_key=next(iter(os.environ.get(_KEY, "").split()), ""))
    rows = _measure(client, loads(asked, named), asked, model=model)
    return make_report("serve", f"a server on {client.host}", rows, options=EngineOptions())


def bench_started(asked: LoadFlags, options: EngineOptions, named: str | None) -> Report:
    """Of a server with these options that lives as long as this takes. named: a shape, a model, or a workload with its shape."""
    from enginery.bench.serve_load import Client

    wanted = loads(asked, named)
    workload = WORKLOADS.get(named or "")
    model = workload.shape if workload else named or options.model
    with checkpoint_folder(dataclasses.replace(options, model=model)) as complete:
        if complete.model is not None and complete.model != model:
            write_tokenizer(Path(complete.model))
        with _server(complete) as (url, ready_s):
            rows = _measure(Client(url), wanted, asked, model=None)
    from enginery.bench.device_limits import device_name
    from enginery.worker.device import torch_device

    rows = [dataclasses.replace(row, details={**row.details, "ready_s": ready_s}) for row in rows]
    return make_report("serve", device_name(torch_device(options.device)), rows, options=options)


def _measure(client: Client, wanted: Sequence[Load], asked: LoadFlags, *, model: str | None) -> list[Row]:
    """One load after the other, each after some of its kind that does not count, and a pause."""
    from enginery.bench.serve_load import measure_load

    async def measure() -> list[Row]:
        with contextlib.closing(client):
            card = await client.first_model()
            file = Path(card.root or "") / "config.json"
            config = json.loads(file.read_text()) if file.is_file() else {}
            measure_one = functools.partial(
                measure_load, client, model=model or card.id, vocab_size=asked.vocab_size or config.get("vocab_size", 30_000)
            )
            rows = []
            for load in wanted:
                if few := _warm_up(load, asked.warm_up):
                    await measure_one(few)
                    await asyncio.sleep(_PAUSE_S)
                rows.append(await measure_one(load))
            return rows

    return asyncio.run(measure())


@contextlib.contextmanager
def _server(options: EngineOptions) -> Iterator[tuple[str, float]]:
    """Its address, and the seconds until it was ready. What it writes until then goes to stderr. It ends with this process."""
    given = {name: value for name, value in vars(options).items() if value != vars(EngineOptions())[name]}
    settings = {f"ENGINERY_{name.upper()}" for name in vars(options)}  # these are in `options` already, and would come first
    environ = {name: value for name, value in os.environ.items() if name not in settings}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.writelines(f"{name} = {json.dumps(value)}\n" for name, value in given.items())
        config.flush()
        command = [sys.executable, "-c", _SERVE, "serve", "--config", config.name, "--port", "0", "--log-level", "warning"]
        began_s = time.monotonic()
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        try:
            yield _address(process), time.monotonic() - began_s
        finally:
            process.terminate()
            process.communicate()


def _address(process: subprocess.Popen[str]) -> str:
    """What the server says once it is ready."""
    for line in process.stdout or ():
        print(line, end="", file=sys.stderr, flush=True)
        if found := re.match(r"ready: .* at (http\S+),", line):
            return found[1]
    raise EnginError(f"the server ended with exit status {process.wait()} while it started; above is why")
