"""What a plugin's tests need of the engine: small values, a tiny checkpoint, a tiny engine, a running server.

As functions for any test, and as pytest fixtures: in a conftest `from enginery.testing.fixtures import tiny_checkpoint, tiny_llm`.
The tiny checkpoint is a Llama of two layers without weights; a family of your own gets its own `config`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from enginery.contracts.engine import EngineFacts, EngineStats
from enginery.contracts.request import FinishReason, GenerationRequest, RequestOutput
from enginery.contracts.schedule import QueuedFacts, StepReport
from enginery.llm.llm import LLM

TINY_CONFIG: Final[Mapping[str, Any]] = {  # Any: config.json's values
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_TEMPLATE: Final = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
_START_S: Final = 150.0


def queued(**changes: object) -> QueuedFacts:
    """A waiting request as a schedule policy sees it."""
    usual: dict[str, Any] = {"request_id": "a", "priority": 0, "arrival_s": 0.0, "num_tokens": 8}
    return QueuedFacts(**usual | changes)


def step_report(**changes: object) -> StepReport:
    """What an observer is told of a step: zeros and empty texts but for what is given."""
    empty = {"int": 0, "float": 0.0, "bool": False, "str": ""}
    usual: dict[str, Any] = {
        field.name: empty[str(field.type)] for field in dataclasses.fields(StepReport) if str(field.type) in empty
    }
    return StepReport(**usual | changes)


class StubEngine:
    """An `EngineHandle` without an engine: every request is answered with its own prompt."""

    def __init__(self, *, state: str = "ready") -> None:
        self.state = state
        self.stats = EngineStats()
        self.aborted: list[str] = []

    async def ready(self) -> EngineFacts:
        """Facts of a model named stub."""
        return EngineFacts(
            model_name="stub",
            folder="",
            max_model_len=512,
            vocab_size=258,
            dtype="float32",
            attn_backend="stub",
            note="",
            num_pages=32,
            page_size=16,
            eos_token_ids=(257,),
            decisions=(),
        )

    @asynccontextmanager
    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """One output for each request."""

        async def outputs() -> AsyncIterator[RequestOutput]:
            for request in requests:
                ids = tuple(request.prompt_token_ids)
                yield RequestOutput(request_id=request.request_id, token_ids=ids, finish_reason=FinishReason.STOP)

        yield outputs()

    async def abort(self, request_id: str) -> bool:
        """Remember the id in `aborted`, and say that the request was there."""
        self.aborted.append(request_id)
        return True


def write_tiny_checkpoint(folder: Path, config: Mapping[str, object] = TINY_CONFIG) -> Path:
    """Write config.json, a tokenizer of bytes and a chat template into `folder`, and return it.

    There are no weights: serve it with `load_format="dummy"`, which draws them from a seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"chat_template": _TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def open_tiny_llm(folder: Path, **options: object) -> LLM:
    """An engine in this process over a tiny checkpoint, on the CPU, with drawn weights. Close it, or leave its context."""
    usual: dict[str, object] = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1}
    return LLM(str(folder), **usual | options)


@contextmanager
def serving(model: Path | str, *flags: str) -> Iterator[str]:
    """The URL of `engine serve` in a process of its own, on a free port. RuntimeError has its last lines where none is."""
    small = ("--port", "0", "--num-pages", "64", "--num-threads", "1")
    command = [sys.executable, "-m", "enginery", "serve", str(model), *small, *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    said: deque[str] = deque(maxlen=20)
    urls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in process.stdout or ():
            said.append(line)
            if found := re.match(r"ready: \S+ at (https?://\S+),", line):
                urls.put(found[1])
        urls.put("")

    listening = threading.Thread(target=listen, daemon=True)
    with process:
        listening.start()  # to the end: a full pipe would hold the server up
        try:
            url = ""
            with suppress(queue.Empty):
                url = urls.get(timeout=_START_S)
            if not url:
                raise RuntimeError(f"engine serve {model} did not start:\n{''.join(said)}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_START_S)
            finally:
                process.kill()
                listening.join(_START_S)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama without weights."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny-checkpoint"))


@pytest.fixture
def tiny_llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    """An engine in this process over it."""
    with open_tiny_llm(tiny_checkpoint) as llm:
        yield llm


@pytest.fixture(scope="module")
def running_server(tiny_checkpoint: Path) -> Iterator[str]:
    """The URL of a server over it."""
    with serving(tiny_checkpoint, "--load-format", "dummy", "--device", "cpu") as url:
        yield url
