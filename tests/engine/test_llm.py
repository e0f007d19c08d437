"""The Python way in, on the echo model and the embedded default."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pairwise import in_turn
from tokenizers_made import byte_fallback, save

from enginery import LLM, AsyncLLM, SamplingParams
from enginery.config.schema import EngineOptions
from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError, ConfigError, EngineDied, EnginError, RequestError
from enginery.plugin.registry import Registry
from enginery.text.tokenizer import Tokenizer


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    config = dict(architectures=["EchoForCausalLM"], vocab_size=97, max_position_embeddings=256, eos_token_id=[5, 6])
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def checksum(tokens: list[int]) -> int:
    return sum((place + 1) * token for place, token in enumerate(tokens)) % 65_521 % 97


def continued(prompt: list[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(checksum(tokens))
    return tuple(tokens[len(prompt) :])


def llm(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), load_format="dummy", **{"num_pages": 64, "dtype": "float32", **options})


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TINY: dict[str, Any] = {"num_pages": 64, "dtype": "float32"}  # of the embedded model


def test_prompts_are_answered_in_their_order(echo: Path) -> None:
    prompts = [[7, 8, 9], [1], list(range(50))]
    with llm(echo) as model:
        answers = model.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == [continued(prompt, 20) for prompt in prompts]
    assert [(answer.finish_reason, answer.prompt_token_ids) for answer in answers] == [("length", tuple(each)) for each in prompts]


def test_a_server_bounds_the_prompts_beside_decoding_and_what_runs_offline_does_not(echo: Path) -> None:
    asked = EngineOptions(model=str(echo), load_format="dummy", num_pages=64)
    given = EngineOptions(model=str(echo), load_format="dummy", num_pages=64, prefill_fraction=0.5)
    online = [Engine.build(each, Registry.load()) for each in (asked, given)]
    offline = [LLM(**vars(each))._engine for each in (asked, given)]  # as `engine bench offline` does
    fractions = [engine._scheduler.settings.prefill_fraction for engine in (*online, *offline) if engine is not None]
    assert fractions == [0.0625, 0.5, 1.0, 0.5]


def test_a_single_prompt_and_params_for_each_are_accepted(echo: Path) -> None:
    model = llm(echo)
    assert model.generate([7, 8, 9], GREEDY)[0].token_ids == continued([7, 8, 9], 20)
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 3)]
    assert [len(answer.token_ids) for answer in model.generate([[1], [2]], each)] == [1, 3]
    with pytest.raises(RequestError, match="2 prompts and 1 params"):
        model.generate([[1], [2]], each[:1])


@in_turn(("page_size", [1, 16, 64]), ("prefix_cache", [True, False]))
def test_memory_is_intact_under_pressure(echo: Path, *, page_size: int, prefix_cache: bool) -> None:
    prompts = [[seed, *range(10, 10 + seed)] for seed in range(1, 40)] * 2
    model = llm(echo, page_size=page_size, num_pages=256 // page_size, max_batch_tokens=32, prefix_cache=prefix_cache)
    answers = model.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == [continued(prompt, 20) for prompt in prompts]


def test_a_cache_salt_keeps_prefixes_apart(echo: Path) -> None:
    from enginery.contracts.request import GenerationRequest

    model = llm(echo)
    engine = model._engine
    assert engine is not None
    cached = []
    for number, salt in enumerate(("", "", "a", "a")):
        engine.submit(GenerationRequest(request_id=str(number), prompt_token_ids=tuple(range(40)), params=GREEDY, cache_salt=salt))
        outputs = [output for _ in range(30) for output in engine.step()]
        cached.append(outputs[0].num_cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] >= 32
    assert cached[3] >= 32


def test_several_end_of_sequence_ids_and_stop_token_ids_end_it(echo: Path) -> None:
    model = llm(echo)
    prompt = next([seed, extra] for seed in range(90) for extra in range(90) if continued([seed, extra], 3)[2] == 6)
    ended = model.generate(prompt, SamplingParams(temperature=0, max_tokens=20))[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == 6
    tokens = continued([7, 8, 9], 20)
    stopped = model.generate([7, 8, 9], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(tokens[4],), ignore_eos=True))[
        0
    ]
    assert stopped.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert stopped.finish_reason == "stop"


def test_end_of_sequence_ids_may_stand_beside_a_model_for_images(echo: Path) -> None:
    """In `text_config`, as in Qwen3.5's files; generation_config.json comes first, and config.json itself."""
    config = json.loads((echo / "config.json").read_text())
    del config["eos_token_id"]
    (echo / "config.json").write_text(json.dumps(config | {"text_config": {"eos_token_id": [5, 6]}}))
    prompt = next([seed, extra] for seed in range(90) for extra in range(90) if continued([seed, extra], 3)[2] == 6)
    (answer,) = llm(echo).generate(prompt, SamplingParams(temperature=0, max_tokens=20))
    assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", 6)


def test_end_of_sequence_ids_outside_of_the_vocabulary_end_nothing(echo: Path) -> None:
    """Of a checkpoint that says -1 for none, or that has another's tokenizer; to put its end off is to forbid a token by its id."""
    config = json.loads((echo / "config.json").read_text())
    prompt = next([seed, extra] for seed in range(90) for extra in range(90) if continued([seed, extra], 1) == (96,))
    for wrong in (-1, 97):
        (echo / "config.json").write_text(json.dumps({**config, "eos_token_id": wrong}))
        (answer,) = llm(echo).generate(prompt, SamplingParams(temperature=0, max_tokens=3, min_tokens=3))
        assert answer.token_ids == continued(prompt, 3)


def test_n_answers_differ_and_a_seed_repeats_them(echo: Path) -> None:
    with LLM(**TINY) as model:
        params = SamplingParams(max_tokens=12, n=3, seed=5, ignore_eos=True)
        first, again = model.generate("Hello", params)[0], model.generate(["other", "Hello", "more"], params)[1]
    texts = [completion.token_ids for completion in first.completions]
    assert len(set(texts)) == 3
    assert texts == [completion.token_ids for completion in again.completions]


def test_stop_strings_cut_text_and_tokens() -> None:
    with LLM(**TINY) as model:
        whole = model.generate("Hello", SamplingParams(max_tokens=40, seed=2, ignore_eos=True))[0]
        stop = whole.text[5:7]
        cut = model.generate("Hello", SamplingParams(max_tokens=40, seed=2, ignore_eos=True, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < 40


def test_logprobs_and_prompt_logprobs_cover_every_token() -> None:
    with LLM(**TINY) as model:
        answer = model.generate([10, 11, 12], SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1))[0]
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    assert all(entry.logprob == entry.top[0][1] and len(entry.top) == 2 for entry in answer.logprobs)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert [entry.token_id for entry in answer.prompt_logprobs[1:] if entry] == [11, 12]


def test_prompt_logprobs_are_whole_when_the_prompt_is_cut_into_chunks() -> None:
    prompt = list(range(20, 90))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(**TINY) as whole, LLM(**TINY, max_batch_tokens=23) as chunked:
        expected, actual = (model.generate(prompt, params)[0].prompt_logprobs for model in (whole, chunked))
    assert expected is not None
    assert actual is not None
    assert len(actual) == len(prompt)
    for one, other in zip(expected[1:], actual[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_tokenizer_may_come_from_elsewhere(echo: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with LLM(**TINY) as model:
        words = model.facts.folder
        assert model.facts.tokenizer_folder == words
    config = json.loads((echo / "config.json").read_text())
    (echo / "config.json").write_text(json.dumps(config | {"vocab_size": 8192}))
    with llm(echo, tokenizer=words) as model:
        assert (model.facts.folder, model.facts.tokenizer_folder) == (str(echo), words)
        answer = model.generate("Hello", GREEDY)[0]
        assert model.tokenizer is not None
        assert answer.prompt_token_ids == tuple(model.tokenizer.encode("Hello", add_special_tokens=True))
        assert answer.text
        grammar = Grammar(kind=GrammarKind.CHOICE, source='["spelt by that tokenizer"]')
        assert (
            model.generate("x", dataclasses.replace(GREEDY, ignore_eos=False, grammar=grammar))[0].text == "spelt by that tokenizer"
        )
    for options, why in (
        ({"tokenizer": "/nowhere/at/all"}, "is no folder"),
        ({"revision": "main"}, "which has no revision 'main'"),
        ({"tokenizer": words, "tokenizer_revision": "main"}, "which has no revision 'main'"),
        ({"tokenizer_revision": "main"}, "without --tokenizer"),
    ):
        with pytest.raises(CheckpointError, match=why):
            llm(echo, **options)


def test_a_model_has_the_first_of_its_names(echo: Path) -> None:
    with llm(echo, served_model_name="big, small") as model:
        assert (model.facts.model_name, model.facts.served_names) == ("big", ("big", "small"))
    with llm(echo) as model:
        assert model.facts.served_names == (str(echo),)
    with pytest.raises(ConfigError, match="empty name"):
        llm(echo, served_model_name="a,,b")


def test_a_top_k_of_minus_one_keeps_all_as_others_write_it() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    with pytest.raises(RequestError, match="top_k is -2"):
        SamplingParams(top_k=-2)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_after_a_failed_step_the_memory_is_whole_and_the_next_call_works(
    echo: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    model = llm(echo)
    assert model._engine is not None
    echo_model = model._engine._runner.parts.model
    with monkeypatch.context() as patch:

        def fail(_: object) -> None:
            raise kind("the kernel failed")

        patch.setattr(echo_model, "forward", fail)
        with pytest.raises(kind, match="the kernel failed") as error:
            model.generate([[1, 2], [3]], GREEDY)
        notes = "".join(getattr(error.value, "__notes__", []))
        assert ("attention echo" in notes, "enginery-echo==0.1.0" in notes) == ((kind is RuntimeError,) * 2)
    model._engine._scheduler.check_idle()
    assert model.generate([7, 8, 9], GREEDY)[0].token_ids == continued([7, 8, 9], 20)


WHY_GIVEN_UP = [(True, None, "failed with KeyboardInterrupt"), (False, None, "ask again"), (False, EngineDied("rank 1"), "rank 1")]


@pytest.mark.parametrize(("is_told", "gone", "why"), WHY_GIVEN_UP)
def test_a_stream_whose_step_failed_for_another_caller_ends_with_an_error(
    echo: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool, gone: EngineDied | None, why: str
) -> None:
    """It went on without end: its request was given up, and each step had nothing to do."""
    model = llm(echo)
    engine = model._engine
    assert engine is not None
    begun = model.stream([7, 8, 9], GREEDY)
    next(begun)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.parts.model, "forward", Mock(side_effect=KeyboardInterrupt))
        if not is_told:
            patch.setattr(engine, "recover", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.generate([1, 2], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: pytest.fail("it steps an engine that has nothing to do"))
        patch.setattr(engine, "_ranks", Mock(check=Mock(side_effect=gone)))
        with pytest.raises(EnginError, match=why):
            list(begun)
    assert model.generate([7, 8, 9], GREEDY)[0].token_ids == continued([7, 8, 9], 20)


def test_threads_take_turns_and_share_an_open_stream(echo: Path) -> None:
    model = llm(echo)
    begun = model.stream([7, 8, 9], GREEDY)
    first = next(begun)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda first: model.generate([first, 8, 9], GREEDY)[0].token_ids, range(1, 13)))
    assert answers == [continued([first, 8, 9], 20) for first in range(1, 13)]
    assert tuple(token for delta in (first, *begun) for token in delta.token_ids) == continued([7, 8, 9], 20)
    model._engine._scheduler.check_idle()  # type: ignore[union-attr]


def test_a_forked_process_is_told_that_the_model_is_not_its_own(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not come along when a process is forked, and torch would wait for its own."""
    model, pid = llm(echo), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    for use in (lambda: model.generate([1], GREEDY), lambda: model.stream([1], GREEDY)):
        with pytest.raises(EnginError, match="this one was forked from; build one here, or start processes by spawn"):
            use()


def test_token_ids_may_come_from_numpy_torch_or_a_generator(echo: Path) -> None:
    model = llm(echo)
    expected = continued([7, 8, 9], 20)
    for prompts in (np.array([7, 8, 9]), torch.tensor([7, 8, 9]), np.array([[7, 8, 9]]), (ids for ids in [[7, 8, 9]])):
        assert model.generate(prompts, GREEDY)[0].token_ids == expected


def test_no_longer_context_is_promised_than_the_pages_hold(echo: Path) -> None:
    model = llm(echo, num_pages=2, page_size=16)
    assert model.facts.max_model_len == 32
    assert ("max_model_len", "32") in {(setting, value) for setting, value, _ in model.facts.decisions}
    with pytest.raises(RequestError, match="32"):
        model.generate([list(range(40))])
    assert len(model.generate([[1, 2]], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))[0].token_ids) == 30


def test_text_goes_on_behind_its_prompt_with_the_blank_of_a_sentencepiece_vocabulary(echo: Path) -> None:
    """As the server tells it. A chat's answer begins without one, unless it goes on with the final message."""
    tokenizer = save(byte_fallback(), echo, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    config = json.loads((echo / "config.json").read_text())
    (echo / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
    the = Tokenizer.from_folder(tokenizer).encode("the", add_special_tokens=False)[0]
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias={the: 100})
    said = [{"role": "assistant", "content": "the fox"}]
    with llm(echo) as model:
        ids = Tokenizer.from_folder(tokenizer).encode("the fox", add_special_tokens=True)
        assert [each.text for each in model.generate(["the fox", ids, [1]], params)] == [" the", " the", "the"]
        assert "".join(delta.text for delta in model.stream("the fox", params)) == " the"
        assert model.chat(said, params).text == "the"
        assert "".join(delta.text for delta in model.stream(said, params)) == "the"
        assert model.chat(said, params, continue_final_message=True).text == " the"

    async def both() -> list[str]:
        async with AsyncLLM(str(echo), load_format="dummy", num_pages=64, dtype="float32") as model:
            return [(await model.generate(prompt, params)).text for prompt in ("the fox", said)]

    assert asyncio.run(both()) == [" the", "the"]
