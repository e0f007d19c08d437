"""The workloads that `engine bench` runs: shapes of models without weights, and lengths of prompts and outputs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from enginery.contracts.request import SamplingParams
from enginery.errors import ConfigError

SHAPES_FILE: Final = Path(__file__).with_name("shapes.json")
HIGHEST_TOKEN: Final = 100_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """lengths: (prompt tokens, output tokens) per request. shared_prefix: so many first tokens are the same in all prompts."""

    name: str
    shape: str
    summary: str
    lengths: tuple[tuple[int, int], ...]
    shared_prefix: int = 0
    temperature: float = 0.0

    def prompts(self, vocab_size: int, *, seed: int = 1) -> list[list[int]]:
        """Random token ids; the same for the same seed."""
        draw = random.Random(seed)
        highest = min(vocab_size, HIGHEST_TOKEN) - 1
        prefix = [draw.randint(10, highest) for _ in range(self.shared_prefix)]
        return [prefix + [draw.randint(10, highest) for _ in range(length - self.shared_prefix)] for length, _ in self.lengths]

    def params(self) -> list[SamplingParams]:
        """Exactly the stated number of tokens for each."""
        return [SamplingParams(max_tokens=count, temperature=self.temperature, ignore_eos=True) for _, count in self.lengths]


def _uniform_lengths() -> tuple[tuple[int, int], ...]:
    draw = random.Random(0)
    return tuple((draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256))


def _build() -> dict[str, Workload]:
    every = (
        Workload(
            name="W1", shape="qwen3-0.6b", summary="256 requests, in and out 100..1024", lengths=_uniform_lengths(), temperature=0.6
        ),
        Workload(name="W2", shape="llama-3.1-8b", summary="one stream", lengths=((128, 512),)),
        Workload(name="W2s", shape="qwen3-0.6b", summary="one stream", lengths=((128, 512),)),
        Workload(name="W3", shape="llama-3.1-8b", summary="512 requests, 512 in, 256 out", lengths=((512, 256),) * 512),
        Workload(name="W4", shape="llama-3.1-8b", summary="32 prompts of 4096, one token out", lengths=((4096, 1),) * 32),
        Workload(
            name="W5",
            shape="llama-3.1-8b",
            summary="128 requests with a prefix of 4096",
            lengths=((4160, 64),) * 128,
            shared_prefix=4096,
        ),
        Workload(name="W6", shape="llama-3.1-8b", summary="16 requests of 32,768", lengths=((32768, 128),) * 16),
        Workload(name="W7", shape="deepseek-v2-lite", summary="128 requests, 1024 in, 256 out", lengths=((1024, 256),) * 128),
        Workload(name="C1", shape="llama-125m", summary="one stream on a CPU", lengths=((128, 128),)),
        Workload(name="C16", shape="llama-125m", summary="16 streams on a CPU", lengths=((128, 128),) * 16),
        Workload(name="CP", shape="llama-125m", summary="a prompt of 2048 on a CPU", lengths=((2048, 1),)),
    )
    return {workload.name: workload for workload in every}


WORKLOADS: Final[Mapping[str, Workload]] = _build()


def find_workload(name: str) -> Workload:
    """By name; raises `ConfigError` that lists them."""
    if name not in WORKLOADS:
        known = "\n".join(f"  {workload.name:4} {workload.shape}: {workload.summary}" for workload in WORKLOADS.values())
        raise ConfigError(f"there is no workload {name!r}; known are\n{known}")
    return WORKLOADS[name]


def equal_requests(count: int, *, input_len: int, output_len: int) -> Workload:
    """So many requests of these lengths, of any shape."""
    return Workload(name="", shape="", summary="equal requests", lengths=((input_len, output_len),) * count)


def is_shape(name: str) -> bool:
    """Whether `write_shape` knows it."""
    return name in _shapes()


def _shapes() -> dict[str, dict[str, Any]]:
    shapes: dict[str, dict[str, Any]] = json.loads(SHAPES_FILE.read_text())
    return shapes


def write_shape(name: str, folder: Path) -> Path:
    """A checkpoint folder with a config.json and no weights, for `--load-format dummy`."""
    shapes = _shapes()
    if name not in shapes:
        raise ConfigError(f"there is no shape {name!r}; known are {', '.join(sorted(shapes))}")
    (folder / "config.json").write_text(json.dumps(shapes[name]))
    return folder
