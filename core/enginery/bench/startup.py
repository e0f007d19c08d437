"""`engine bench startup`: fresh processes, each from its start to its first token.

This module is also what runs in them: `python -m enginery.bench.startup STARTED OPTIONS INPUT_LEN`. Heavy imports are inside
the functions, so that a process imports what an engine needs and no more. Times are of `time.monotonic`, one clock for all.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time

import msgspec

from enginery.bench.report import Report, Row, facts_details, make_report
from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.errors import EnginError


def bench_startup(options: EngineOptions, *, repeats: int, input_len: int) -> Report:
    """Medians of `repeats` starts, one after the other. The first may find caches cold; all are in the details."""
    from enginery.bench.device_limits import device_name
    from enginery.bench.workloads import checkpoint_folder
    from enginery.worker.device import torch_device

    with checkpoint_folder(options) as named:
        starts = [start_once(named, input_len=input_len) for _ in range(repeats)]
    phases = {name: statistics.median(start.phases_s.get(name, 0.0) for start in starts) for name in starts[0].phases_s}
    row = Row(
        what=starts[0].what | {"load_format": named.load_format, "input_len": input_len},
        measured={name: statistics.median(start.measured[name] for start in starts) for name in starts[0].measured},
        details={**starts[0].facts, "phases_s": phases, "starts": [(start.measured, start.phases_s) for start in starts]},
    )
    return make_report("startup", device_name(torch_device(options.device)), [row], options=options)


class Start(msgspec.Struct):
    """What a process prints of its start. measured, phases_s: seconds."""

    what: dict[str, object]
    measured: dict[str, float]
    phases_s: dict[str, float]
    facts: dict[str, object]


def start_once(options: EngineOptions, *, input_len: int) -> Start:
    """Start a process and wait for it. Raises `EnginError` with its last words if it fails."""
    command = [sys.executable, "-m", __name__, str(time.monotonic()), json.dumps(vars(options)), str(input_len)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-5:]) or "it says nothing"
        raise EnginError(f"the process ended with exit status {done.returncode}:\n{said}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Start)


def main(started: str, options: str, input_len: str) -> None:
    """Build an engine, generate two tokens, and print when what had been done, as JSON."""
    from enginery.config.sources import registry_for
    from enginery.engine.engine import Engine

    times = [float(started), time.monotonic()]
    asked = msgspec.json.decode(options, type=EngineOptions)
    registry = registry_for(asked)
    times.append(time.monotonic())
    engine = Engine.build(asked, registry)
    times.append(time.monotonic())
    facts, params = engine.facts, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    prompt = tuple(place % facts.vocab_size for place in range(int(input_len)))
    engine.submit(GenerationRequest(request_id="0", prompt_token_ids=prompt, params=params))
    while engine.has_work:
        count = sum(len(output.token_ids) for output in engine.step())
        times += [time.monotonic()] * count
    imports, plugins, build, prompt_s, second = (after - before for before, after in itertools.pairwise(times))
    answer = Start(
        what={"model": facts.model_name, "dtype": facts.dtype},
        measured={
            "ready_s": imports + plugins + build,
            "first_token_s": times[4] - times[0],
            "first_token_after_ready_s": prompt_s,
        },
        phases_s={"imports": imports, "plugins": plugins, **facts.phases_s, "prompt": prompt_s, "second token": second},
        facts=facts_details(facts),
    )
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except EnginError as told:
        sys.exit(str(told))
