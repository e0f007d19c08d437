"""What `LLM` and `SamplingParams` refuse, and what they say to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_llm import GREEDY, TINY, continued, echo, llm

from enginery import LLM, SamplingParams
from enginery.errors import CheckpointError, ConfigError, EnginError, RequestError, Unsupported

__all__ = ["echo"]


def test_a_template_that_writes_nothing_is_an_error() -> None:
    with LLM(**TINY) as model:
        assert model.text is not None
        model.text.template.source = ""
        with pytest.raises(RequestError, match="the prompt is empty"):
            model.chat([{"role": "user", "content": "Hi"}])


def test_wrong_use_says_what_to_do(echo: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean page_size"):
        LLM(pagesize=3)
    for wrong in ({"page_size": "16"}, {"prefix_cache": "no"}, {"blocked_plugins": "echo"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LLM(**wrong)
    model = llm(echo)
    with pytest.raises(CheckpointError, match="token ids"):
        model.generate("text without a tokenizer")
    with pytest.raises(RequestError, match="token id 97, but the vocabulary has ids 0 to 96"):
        model.generate([[1, 97]])
    for prompts in ({"prompt": "a"}, 7, [[1.5]], [None], [[True]]):
        with pytest.raises(RequestError, match="token ids"):
            model.generate(prompts)
    with pytest.raises(RequestError, match="SamplingParams"):
        model.generate([1], {"max_tokens": 3})
    with pytest.raises(RequestError, match="role and content"):
        model.chat("hello")
    with pytest.raises(RequestError, match="logit_bias"):
        model.generate([[1]], SamplingParams(logit_bias={100: 1.0}))
    with pytest.raises(RequestError):
        model.generate([[]])
    with pytest.raises(RequestError, match="256"):
        model.generate([list(range(90)) * 3])
    assert model.generate([7, 8, 9], GREEDY)[0].token_ids == continued([7, 8, 9], 20)
    model.close()
    with pytest.raises(EnginError, match="closed"):
        model.generate([1])


@pytest.mark.parametrize("option", ["tp", "pp", "dp_attention"])
def test_fewer_ranks_than_one_are_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 0, but must be at least 1"):
        LLM(**{**TINY, option: 0})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"pp": 12}, "12 pipeline stages cannot share 9 decoder layers; --pp may be 9 at the most"),
        ({"pp": 2, "pp_layers": "3,3"}, "--pp-layers gives 2 stages of 3, 3 layers; the model has 9"),
        ({"tp": 3}, "the attention's query heads: 4, which 3 ranks cannot share"),
    ],
    ids=str,
)
def test_ranks_that_the_model_refuses_are_not_started(monkeypatch: pytest.MonkeyPatch, given: dict[str, object], told: str) -> None:
    """Twelve take half a minute to import torch and to end again."""
    started: list[object] = []

    def start(*command: object, **_: object) -> None:
        started.append(command)
        raise OSError("no process is started here")

    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(Unsupported, match=told):
        LLM(device="cpu", **given)
    assert started == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stop": 3}, "stop is 3, but must be a text or a list of them"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3, and names no token ids"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\], and names no token ids"),
        ({"logit_bias": {"7": 1.0}}, r"logit_bias \(a token id\) is '7', but must be a whole number"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens is 'no', but must be True or False"),
        ({"ignore_eos": "false"}, "ignore_eos is 'false', but must be True or False"),
        ({"include_stop": 0}, "include_stop is 0, but must be True or False"),
        ({"speculation": None}, "speculation is None, but must be True or False"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_the_name_of_the_field(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as error:
        SamplingParams(**wrong)
    assert error.value.param == next(iter(wrong))


@pytest.mark.parametrize("params", [{"max_tokens": 3}, ["greedy"]], ids=["a mapping", "a list of texts"])
def test_params_of_another_kind_are_refused(echo: Path, params: Any) -> None:
    with pytest.raises(RequestError, match="but must be SamplingParams"):
        llm(echo).generate([[1]], params)


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "among others"])
@pytest.mark.parametrize("prompt", [b"text", bytearray(b"text"), memoryview(b"text")], ids=lambda prompt: type(prompt).__name__)
def test_bytes_are_no_token_ids(echo: Path, prompt: Any, is_alone: bool) -> None:
    with pytest.raises(RequestError, match=r"b'text'|<memory at"):
        llm(echo).generate(prompt if is_alone else [prompt])


@pytest.mark.parametrize("number", [np.array(5), torch.tensor(5), np.int64(5)], ids=repr)
def test_a_number_is_no_prompt(echo: Path, number: Any) -> None:
    model = llm(echo)
    with pytest.raises(RequestError, match=r"5.*, but must be texts or lists of token ids"):
        model.generate(number)
    with pytest.raises(RequestError, match=r"5.* is neither text nor a list of token ids"):
        model.stream(number)


def test_a_tensor_of_one_number_is_a_prompt(echo: Path) -> None:
    """Python takes it for a whole number, and several were one prompt."""
    model, rows = llm(echo), torch.tensor([[50], [60]])
    for prompts in (rows, list(rows), rows.numpy(), rows.tolist()):
        assert [answer.prompt_token_ids for answer in model.generate(prompts, GREEDY)] == [(50,), (60,)]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "Hi"}, "the role of a message is None, but must be a text"),
        ({"role": 3, "content": "Hi"}, "the role of a message is 3"),
        ({"role": "user"}, "the content of a message is None"),
        ({"role": "system", "contents": "Hi"}, "the content of a message is None"),
    ],
)
def test_a_message_has_a_role_and_content(message: dict[str, object], why: str) -> None:
    """Templates write nothing, or None, for what is not there, and the model would answer that."""
    with LLM(**TINY) as model, pytest.raises(RequestError, match=why):
        model.chat([message])
