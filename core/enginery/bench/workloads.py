"""The workloads that `engine bench` runs: shapes of models without weights, and lengths of prompts and outputs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from enginery.config.schema import EngineOptions
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
    """The workload of that name, or SHAPE:STREAMS, so many requests of 512 in and 256 out. Raises `ConfigError` that lists all."""
    shape, _, streams = name.partition(":")
    if shape in shapes() and streams.isdecimal() and int(streams) > 0:
        equal = equal_requests(int(streams), input_len=512, output_len=256)
        return dataclasses.replace(equal, name=name, shape=shape, summary=f"{streams} requests, 512 in, 256 out")
    if name not in WORKLOADS:
        known = "\n".join(f"  {workload.name:4} {workload.shape}: {workload.summary}" for workload in WORKLOADS.values())
        raise ConfigError(f"there is no workload {name!r}; known are\n{known}\nor SHAPE:STREAMS, as {next(iter(shapes()))}:16")
    return WORKLOADS[name]


def equal_requests(count: int, *, input_len: int, output_len: int) -> Workload:
    """A workload of `count` requests with the same lengths in tokens, for any shape."""
    return Workload(name="", shape="", summary="equal requests", lengths=((input_len, output_len),) * count)


@contextmanager
def checkpoint_folder(options: EngineOptions) -> Iterator[EngineOptions]:
    """The options with a folder for the model. The name of a shape becomes one without weights, for random ones."""
    with tempfile.TemporaryDirectory() as folder:
        if options.model is not None and options.model in shapes():
            path, name = str(write_shape(options.model, Path(folder))), options.served_model_name or options.model
            options = dataclasses.replace(options, model=path, served_model_name=name, load_format="dummy")
        yield options


def shapes() -> dict[str, dict[str, object]]:
    """The config.json of each, by its name."""
    known: dict[str, dict[str, object]] = json.loads(SHAPES_FILE.read_text())
    return known


def write_shape(name: str, folder: Path) -> Path:
    """A checkpoint folder with a config.json and no weights, for `--load-format dummy`."""
    known = shapes()
    if name not in known:
        raise ConfigError(f"there is no shape {name!r}; known are {', '.join(sorted(known))}")
    (folder / "config.json").write_text(json.dumps(known[name]))
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json for the config.json there: 256 bytes, then made-up words of up to 4 letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = json.loads((folder / "config.json").read_text())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(word) for size in (2, 3, 4) for word in itertools.product("aeioulnrstbcdfghkmpvwz", repeat=size))
    tokens = itertools.islice(itertools.chain(letters, words), config["vocab_size"])
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
