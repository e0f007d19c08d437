"""DeepSeek-V2-Lite over HTTP: long prompts, prefix hits and chunked prefixes in one run give what absorbed prefills give.

On a CUDA device with all of its layers and experts, on a CPU with few and small ones. Weights are random.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pairwise import EVERYTHING
from tokenizers import Tokenizer, models, pre_tokenizers

from enginery.bench.workloads import write_shape

HERE = Path(__file__).parent
# tests/parity/test_latent_parity.py has each strategy, and test_http.py a server, with fewer processes.
FEW = ["few and small"] if EVERYTHING else []
CLOSE = 1e-3
MAX_REROUTED, CLOSE_REROUTED = 0.05, 0.03  # a token may be rounded to its seventh expert where the sixth is as good: 0.021 seen
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """Lengths are in tokens; `changes` are of DeepSeek-V2-Lite's config.json."""

    device: str
    changes: dict[str, object]
    prompts: tuple[int, ...]
    max_tokens: int
    step: int
    chunk: int


LOADS = {
    "few and small": Load(device="cpu", changes=SMALL, prompts=(120, 70), max_tokens=5, step=48, chunk=16),
    "all of them": Load(device="cuda", changes={}, prompts=(3000, 4100, 2050), max_tokens=24, step=2048, chunk=512),
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one request: token texts, their log-probabilities, and how many of the prompt's tokens were cached."""

    tokens: list[str]
    logprobs: list[float]
    num_cached: int


def write_checkpoint(folder: Path, changes: dict[str, object]) -> Path:
    """A config.json, and a tokenizer in which token 5 is t5."""
    write_shape("deepseek-v2-lite", folder)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(config["vocab_size"])}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@contextlib.contextmanager
def serving(folder: Path, load: Load, log: Path, strategy: str) -> Iterator[httpx.Client]:
    """A client of a server whose prefills are computed by that strategy. Float32, and steps in the order of their reports."""
    options = {
        "model": str(folder),
        "served_model_name": "lite",
        "device": load.device,
        "dtype": "float32",
        "load_format": "dummy",
        "mla_prefill": strategy,
        "mla_chunk_tokens": load.chunk,
        "max_batch_tokens": load.step,
        "max_batch_requests": 8,
        "max_model_len": 2 * max(load.prompts),
        "num_pages": 2 * sum(load.prompts) // 16,
        "overlap": False,
    }
    command = [sys.executable, str(HERE / "watched_server.py"), "serve", str(log), json.dumps(options)]
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            ready = next((line for line in server.stdout if line.startswith("ready: lite at ")), None)
            assert ready is not None, "the server ended before it was ready"
            with httpx.Client(base_url=ready.split()[3].rstrip(","), timeout=200) as client:
                yield client
        finally:
            server.terminate()
            server.communicate(timeout=30)


def ask(client: httpx.Client, prompt: list[int], max_tokens: int) -> Answer:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    said = answer["choices"][0]["logprobs"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(tokens=said["tokens"], logprobs=said["token_logprobs"], num_cached=cached)


def converse(client: httpx.Client, load: Load, highest: int) -> list[list[Answer]]:
    """Two rounds, in each all requests at once: long prompts, then the same with their answers and a new question behind them."""
    draw = random.Random(1)
    prompts = [[draw.randrange(1, highest) for _ in range(length)] for length in load.prompts]
    rounds = []
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(2):
            rounds.append(list(pool.map(lambda prompt: ask(client, prompt, load.max_tokens), prompts)))
            questions = [[draw.randrange(1, highest) for _ in range(load.step // 2)] for _ in prompts]
            said = [[int(text.strip().removeprefix("t")) for text in answer.tokens] for answer in rounds[-1]]
            prompts = [[*prompt, *told, *question] for prompt, told, question in zip(prompts, said, questions, strict=True)]
    return rounds


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*FEW, pytest.param("all of them", marks=pytest.mark.gpu)])
def test_chunked_prefixes_give_the_tokens_of_absorbed_prefills(tmp_path: Path, name: str) -> None:
    load = LOADS[name]
    folder = write_checkpoint(tmp_path, load.changes)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    found: dict[str, list[list[Answer]]] = {}
    chunks: dict[str, int] = {}
    for strategy in ("chunked", "absorbed"):
        log = tmp_path / f"{strategy}.jsonl"
        with serving(folder, load, log, strategy) as client:
            first, second = found[strategy] = converse(client, load, vocab_size)
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        prefills = [prefill for step in steps for prefill in step["prefills"]]
        assert {prefill["strategy"] for prefill in prefills} == {strategy}
        chunks[strategy] = max(prefill["chunks"] for prefill in prefills)
        assert max(step["tokens"] for step in steps) == load.step
        assert {answer.num_cached for answer in first} == {0}
        for answer, length in zip(second, load.prompts, strict=True):
            assert answer.num_cached >= (length + load.max_tokens - 1) // 16 * 16
        assert max(prefill["prefix"] for prefill in prefills) >= max(answer.num_cached for answer in second)
        assert {step["captured"] for step in steps if not step["prefills"]} == {load.device == "cuda"}
    assert chunks["absorbed"] == 0
    assert chunks["chunked"] >= max(load.prompts) // load.chunk
    differences: list[float] = []
    for one, other in zip(itertools.chain(*found["chunked"]), itertools.chain(*found["absorbed"]), strict=True):
        assert one.tokens == other.tokens
        assert len(one.tokens) == load.max_tokens
        differences += [abs(here - there) for here, there in zip(one.logprobs, other.logprobs, strict=True)]
    apart = [difference for difference in differences if difference > CLOSE]
    assert len(apart) <= len(differences) * MAX_REROUTED
    assert max(differences) < CLOSE_REROUTED
