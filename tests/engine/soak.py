"""Random arrivals and aborts for a while, then the books: every page free or cached, and a control request answered as at first.

PYTHONPATH=tests python tests/engine/soak.py --shape qwen3-0.6b --seconds 600 > docs/benchmarks/gpu-soak.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from engine.random_use import RandomUse
from integrity import check_scheduler

from enginery.bench.workloads import write_shape
from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

NUM_FAMILIES = 5  # of prompts that begin alike
CONTROL_TOKENS = 32


class Soak(RandomUse):
    """Drives one engine. longest: tokens of a prompt and of an output. rate: arrivals per step."""

    def __init__(self, engine: Engine, chance: random.Random, *, longest: int, rate: float) -> None:
        super().__init__(engine, chance, self._request)
        self.longest, self.rate = longest, rate
        self.families = [self._tokens(longest // 2) for _ in range(NUM_FAMILIES)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.chance.randrange(self.engine.facts.vocab_size) for _ in range(count))

    def _params(self) -> SamplingParams:
        """Most plain, some with everything that is handled apart."""
        chance = self.chance
        kinds: list[dict[str, object]] = [
            {"temperature": 0.0},
            {"temperature": 0.6},
            {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
            {"temperature": 0.8, "min_p": 0.05, "logit_bias": {3: 2.0}},
            {"temperature": 0.7, "frequency_penalty": 0.5},
            {"temperature": 0.0, "logprobs": 2},
        ]
        kind = kinds[min(int(chance.expovariate(1.0)), len(kinds) - 1)]
        return SamplingParams(max_tokens=chance.randint(1, self.longest), ignore_eos=True, seed=chance.getrandbits(32), **kind)

    def _request(self, name: str) -> GenerationRequest:
        """A third of them begin like others."""
        start = self.chance.choice(self.families) if self.chance.random() < 0.33 else ()
        prompt = start + self._tokens(self.chance.randint(1, self.longest - len(start)))
        return GenerationRequest(request_id=name, prompt_token_ids=prompt, params=self._params())

    def run(self, seconds: float, least_steps: int = 0) -> None:
        """Arrivals come in waves, between which the engine runs empty; a tenth of all requests is aborted."""
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds or self.counts["steps"] < least_steps:
            busy = now % 30 < 24
            while busy and self.chance.random() < self.rate / (1 + self.rate):
                self.submit()
            if self.alive and self.chance.random() < self.rate / 10:
                self.abort_one()
            self.step()
        self.drain()

    def control(self) -> list[int]:
        """A request alone, greedy, without the cache's help."""
        params = SamplingParams(max_tokens=CONTROL_TOKENS, temperature=0.0, ignore_eos=True)
        name = f"control {self.counts['controls']}"
        self.counts["controls"] += 1
        self.engine.submit(
            GenerationRequest(request_id=name, prompt_token_ids=tuple(range(5, 105)), params=params, cache_salt=name)
        )
        tokens: list[int] = []
        while self.engine.has_work:
            tokens += [token for output in self.engine.step() for token in output.token_ids]
        return tokens


def soak(engine: Engine, *, seconds: float, longest: int, rate: float, seed: int = 0, least_steps: int = 0) -> dict[str, object]:
    """Arrivals end after both `seconds` and `least_steps`.

    Raises AssertionError if a page is lost, an output has no owner, or the control request is answered otherwise.
    """
    driver = Soak(engine, random.Random(seed), longest=longest, rate=rate)
    while engine.prepare():
        pass
    before, began = driver.control(), time.monotonic()
    driver.run(min(seconds, 30), least_steps)
    memory = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    driver.run(max(seconds - 30, 0))
    elapsed_s = time.monotonic() - began
    assert not driver.alive, f"{len(driver.alive)} requests were forgotten"
    scheduler = engine._scheduler
    scheduler.check_idle()
    check_scheduler(scheduler)
    stats = engine.meter.stats()
    assert stats.free_pages + stats.cached_pages == engine.facts.num_pages
    assert driver.control() == before, "the control request is answered otherwise"
    grown = (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0) - memory
    return {
        "elapsed_s": round(elapsed_s, 1),
        **driver.counts,
        "num_pages": engine.facts.num_pages,
        "free_pages": stats.free_pages,
        "cached_pages": stats.cached_pages,
        "control_request_is_answered_as_before": True,
        "device_memory_grown_bytes": grown,
        "backends": engine.facts.attn_backend,
    }


def main() -> None:
    """Random weights; fewer pages than the requests could use, so that some are preempted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--num-pages", type=int, default=6000)
    parser.add_argument("--attention", default="auto")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(
            model=str(write_shape(asked.shape, Path(folder))),
            load_format="dummy",
            dtype="bfloat16",
            attention_backend=asked.attention,
            num_pages=asked.num_pages,
            max_model_len=2048,
            max_queued_requests=512,
        )
        engine = Engine.build(options, Registry.load())
        result = soak(engine, seconds=asked.seconds, longest=1000, rate=0.8)
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result["command"] = "tests/engine/soak.py " + " ".join(sys.argv[1:])
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
