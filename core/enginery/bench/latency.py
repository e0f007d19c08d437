"""`engine bench latency`: batches of equal requests, one batch at a time: how long for the first token, and for each one more."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from enginery.bench.device_limits import device_name, measure_limits
from enginery.bench.offline import floor_and_fraction, free_memory, with_room
from enginery.bench.report import Report, Row, facts_details, make_report, percentiles
from enginery.bench.sizes import engine_sizes
from enginery.bench.workloads import Workload, checkpoint_folder
from enginery.config.schema import EngineOptions
from enginery.config.sources import registry_for
from enginery.contracts.engine import EngineLike
from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.errors import EnginError
from enginery.worker.device import torch_device


def bench_latency(options: EngineOptions, batches: Sequence[Workload], *, repeats: int) -> Report:
    """Run each batch `repeats` times on one engine, after a pass that does not count."""
    device = torch_device(options.device)
    with checkpoint_folder(options) as named:
        asked = with_room(named, batches[0])
        registry = registry_for(asked)
        engine = Engine.build(asked, registry)
        facts = engine.facts
        measured = [measure_latencies(engine, batch, repeats=repeats) for batch in batches]
        del engine
        free_memory()
        limits, sizes = measure_limits(device, facts.dtype), engine_sizes(facts, registry)
        rows = []
        for batch, times in zip(batches, measured, strict=True):
            what = {"model": facts.model_name, "dtype": facts.dtype, "batch_size": len(batch.lengths)}
            what |= dict(zip(("input_len", "output_len"), batch.lengths[0], strict=True))
            derived = floor_and_fraction(sizes, batch, limits, total_s=times["total_s"])
            rows.append(Row(what=what, measured=times, derived=derived, details=facts_details(facts)))
    return make_report("latency", device_name(device), rows, options=options, limits=[limits])


def measure_latencies(engine: EngineLike, workload: Workload, *, repeats: int) -> dict[str, float]:
    """Of `repeats` passes after one that does not count, each with prompts of its own: percentiles, and the median pass."""
    passes = [one_pass(engine, workload, seed=1 + repeat) for repeat in range(repeats + 1)][1:]
    requests = [times for each in passes for times in each]
    by_name = {
        "first_token": [times[1] - times[0] for times in requests],
        "per_token": [each for times in requests for each in token_times(times[1:])],
    }
    return percentiles(by_name) | {"total_s": statistics.median(map(pass_s, passes))}


def token_times(came: Sequence[float]) -> Iterator[float]:
    """Seconds of each token behind the first step's. What a step took is divided among the tokens that came of it at once."""
    for (before, _), (now, count) in itertools.pairwise(Counter(came).items()):
        yield from [(now - before) / count] * count


def pass_s(requests: Sequence[Sequence[float]]) -> float:
    """Seconds from the first request of a pass to its last token. requests: what `one_pass` gave."""
    return max(times[-1] for times in requests) - requests[0][0]


def one_pass(engine: EngineLike, workload: Workload, *, seed: int) -> list[list[float]]:
    """For each request: when it was submitted, and when each of its tokens came."""
    times: dict[str, list[float]] = {}
    prompts = workload.prompts(engine.facts.vocab_size, seed=seed)
    for index, (prompt, params) in enumerate(zip(prompts, workload.params(), strict=True)):
        name = f"{seed}-{index}"
        times[name] = [time.perf_counter()]
        engine.submit(GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise EnginError(output.error)
            times[output.request_id] += [time.perf_counter()] * len(output.token_ids)
    return list(times.values())
