"""The official openai client against a checkpoint and a tokenizer written by transformers: its text is transformers' text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai
import pytest
import tokenizers
import torch
from parity.oracle import Oracle, shape
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "Grüße aus Köln", "你好世界", "emoji 🙂🚀 too", "def f(x): return x + 1"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = ["the quick brown", "Grüße 🙂", "def f(x):", "你好"]
NUM_TOKENS = 24


@dataclass(frozen=True)
class Served:
    """A running server and transformers' view of the same files."""

    client: openai.OpenAI
    oracle: Oracle
    tokenizer: PreTrainedTokenizerFast

    def expected(self, ids: list[int]) -> str:
        """transformers' greedy text, up to the end-of-sequence token."""
        tokens = self.oracle.continue_greedily(ids, NUM_TOKENS)
        end = tokens.index(2) if 2 in tokens else len(tokens)
        return self.tokenizer.decode(tokens[:end], skip_special_tokens=True)


def train_tokenizer() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def served(write_oracle: Callable[..., Oracle]) -> Iterator[Served]:
    tokenizer = train_tokenizer()
    oracle = write_oracle("served-llama", LlamaConfig(**shape(vocab_size=len(tokenizer))))
    tokenizer.save_pretrained(oracle.folder)
    command = [sys.executable, "-m", "enginery", "serve", "-m", str(oracle.folder), "--port", "0", "--num-pages", "256"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([*command, "--served-model-name", "tiny"], stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if found := re.search(r"ready: tiny at (http://\S+),", line):
                break
        else:
            raise AssertionError("".join(said))
        yield Served(openai.OpenAI(base_url=found[1] + "/v1", api_key="none", max_retries=0), oracle, tokenizer)
        server.terminate()
        server.stdout.read()
        assert server.wait(timeout=40) == 0


def complete(served: Served, prompt: str | list[int], *, stream: bool) -> str:
    asked = dict(model="tiny", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
    if not stream:
        return served.client.completions.create(**asked).choices[0].text
    return "".join(chunk.choices[0].text for chunk in served.client.completions.create(**asked, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_transformers_text(served: Served, *, stream: bool) -> None:
    expected = [served.expected(served.tokenizer.encode(prompt)) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: complete(served, prompt, stream=stream), PROMPTS)) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_transformers_text(served: Served, *, stream: bool) -> None:
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        ids = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        asked = dict(model="tiny", messages=messages, max_tokens=NUM_TOKENS, temperature=0)
        if stream:
            chunks = served.client.chat.completions.create(**asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = served.client.chat.completions.create(**asked).choices[0].message.content or ""
        assert text == served.expected(ids)


def test_token_ids_as_prompts_give_the_same_text(served: Served) -> None:
    ids = served.tokenizer.encode(PROMPTS[0])
    assert complete(served, ids, stream=False) == served.expected(ids)


def test_echoed_logprobs_are_transformers_log_softmax(served: Served) -> None:
    ids = served.tokenizer.encode(PROMPTS[0])
    reply = served.client.completions.create(model="tiny", prompt=ids, max_tokens=1, temperature=0, echo=True, logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    expected = served.oracle.logits(ids).log_softmax(-1)
    following = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(following, abs=1e-4)
    assert logprobs.token_logprobs[-1] == pytest.approx(float(expected[-1].max()), abs=1e-4)


def test_a_seed_repeats_a_sampled_answer_whatever_else_runs(served: Served) -> None:
    def sampled(seed: int) -> str:
        asked = dict(model="tiny", prompt="the quick", max_tokens=16, temperature=1.0, seed=seed, extra_body={"ignore_eos": True})
        return served.client.completions.create(**asked).choices[0].text

    alone = sampled(7)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(sampled, [1, 7, 2, 7, 3, 4]))
    assert together[1] == together[3] == alone
    assert len(set(together)) > 3


def test_embeddings_are_transformers_hidden_states_of_the_last_token(served: Served) -> None:
    found = served.client.embeddings.create(model="tiny", input=PROMPTS + PROMPTS[:1]).data
    for prompt, item in zip(PROMPTS + PROMPTS[:1], found, strict=True):
        ids = torch.tensor([served.tokenizer.encode(prompt)])
        with torch.inference_mode():
            last = served.oracle.model.model(ids).last_hidden_state[0, -1]
        expected = last / last.norm()
        torch.testing.assert_close(torch.tensor(item.embedding), expected.float(), atol=1e-4, rtol=1e-4)


def test_the_server_repeats_recorded_steps_where_attention_is_compiled(served: Served) -> None:
    if pytest.importorskip("enginery_attn_cpu.native_part", reason="the plugin is not installed").kernels is None:
        pytest.skip("its compiled part was not built")
    assert complete(served, PROMPTS[0], stream=True) == served.expected(served.tokenizer.encode(PROMPTS[0]))
    text = served.client.get("http://" + str(served.client.base_url).split("/")[2] + "/metrics", cast_to=str)
    assert re.search(r"^enginery:graph_hits_total\S* [1-9]", text, re.MULTILINE), text
