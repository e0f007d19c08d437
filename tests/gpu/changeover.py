"""Answers requests while the kernels of attention are compiled: `python changeover.py FOLDER`, with prompts as JSON on stdin.

Prints a JSON list, an object for a round of the same requests: the backend behind it, whether kernels are still compiled then,
why they are not to be had, the tokens of each prompt, and how many steps with prompts beside decoding ran as graphs. Of all rounds
these are the first, and two behind the change.
"""

from __future__ import annotations

import json
import sys
import time

from engine.draft_models import asking

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import Phase
from enginery.contracts.step import StepInput
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.paths.path import Launched

LIMIT_S = 240.0
NUM_TOKENS = 24


def main() -> None:
    """Each round has its requests come one after the other, so that prompts are computed beside what decodes."""
    prompts, began_s = json.load(sys.stdin), time.monotonic()
    asked = EngineOptions(
        model=sys.argv[1], device="cuda", dtype="bfloat16", max_batch_requests=16, max_batch_tokens=24, num_pages=2000
    )
    engine = Engine.build(asked, Registry.load())
    launch, rounds, in_graphs = engine._runner.launch, [], 0

    def noting(step: StepInput) -> Launched:
        nonlocal in_graphs
        launched = launch(step)
        in_graphs += step.phase is Phase.MIXED and launched.forwarded.in_graphs
        return launched

    engine._runner.launch = noting  # type: ignore[method-assign]
    left = 2
    while left and time.monotonic() - began_s < LIMIT_S:
        changed = not engine.meter.stats().kernels.compiling
        in_graphs, waiting = 0, list(enumerate(prompts))
        tokens: list[list[int]] = [[] for _ in prompts]
        while waiting or engine.has_work:
            if waiting:
                at, prompt = waiting.pop(0)
                engine.submit(asking(f"{at}", prompt, max_tokens=NUM_TOKENS))
            for output in engine.step():
                assert output.error is None
                tokens[int(output.request_id)] += output.token_ids
        stats = engine.meter.stats()
        kept = {"failure": stats.kernels.failure, "tokens": tokens, "in_graphs": in_graphs}
        rounds.append({"backend": stats.attn_backend, "compiles": bool(stats.kernels.compiling), **kept})
        engine.flush_prefix_cache()
        left -= changed
    print(json.dumps([rounds[0], *rounds[-2:]]))
    engine.close()


if __name__ == "__main__":
    main()
