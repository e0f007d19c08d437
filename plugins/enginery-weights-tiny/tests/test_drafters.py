"""The drafters that ship with the embedded model guess what they were trained to guess, in the engine as in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pairwise import EVERYTHING
from tiny import evaluate
from tiny.corpus import prompt
from tiny.model import load_eagle, load_llama
from tokenizers import Tokenizer

from enginery import LLM
from enginery.api import GenerationRequest, SamplingParams
from enginery_weights_tiny import DRAFTERS, FOLDER

LENGTH = 6
QUESTIONS = evaluate.QUESTIONS[:12]
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def ids_of(question: str) -> list[int]:
    return list(TOKENIZER.encode(prompt([("user", question)]), add_special_tokens=False).ids)


def guesses_of_the_engine(drafter: str) -> dict[str, tuple[list[int], tuple[int, ...]]]:
    """By question: the prompt with its first answered token, and what is guessed to follow. Prompts come together, in one chunk."""
    llm = LLM(num_pages=200, dtype="float32", num_threads=1, drafter=drafter, draft_length=str(LENGTH))
    engine = llm._engine
    assert engine is not None
    for question in QUESTIONS:
        params = SamplingParams(max_tokens=40, temperature=0)
        engine.submit(GenerationRequest(request_id=question, prompt_token_ids=tuple(ids_of(question)), params=params))
    told: dict[str, list[int]] = {}
    while len(told) < len(QUESTIONS):
        for output in engine.step():
            told[output.request_id] = [*ids_of(output.request_id), *output.token_ids]
    made = dict(engine._made.of([(engine._scheduler.table.by_id[question], LENGTH) for question in told]))
    return {question: (tokens, tuple(made[question])) for question, tokens in told.items()}


def test_the_engines_eagle_head_guesses_what_it_guesses_in_plain_torch() -> None:
    """Without a KV cache: the head is run over all tokens for each guess, over the target's features and then over its own."""
    target = load_llama(Path(FOLDER), "cpu", torch.float64)
    head = load_eagle(DRAFTERS["eagle"], "cpu", torch.float64)
    for question, (tokens, guesses) in guesses_of_the_engine("eagle").items():
        with torch.inference_mode():
            row = torch.tensor([tokens])
            features = target.features(row)[:, :-1]  # [1, T, C], of all but the last token
            while row.shape[1] < len(tokens) + LENGTH:
                foreseen = head(target.model.embed_tokens(row[:, 1:]), features)[:, -1:]  # [1, 1, C]
                row = torch.cat((row, target.logits(foreseen).argmax(-1)), 1)
                features = torch.cat((features, foreseen), 1)
        assert list(guesses) == row[0, len(tokens) :].tolist(), question


def test_the_engines_draft_model_guesses_what_it_guesses_in_plain_torch() -> None:
    draft = load_llama(DRAFTERS["standalone"], "cpu", torch.float64)
    for question, (tokens, guesses) in guesses_of_the_engine("standalone").items():
        row = torch.tensor([tokens])
        while row.shape[1] < len(tokens) + LENGTH:
            with torch.inference_mode():
                row = torch.cat((row, draft(row)[:, -1:].argmax(-1)), 1)
        assert list(guesses) == row[0, len(tokens) :].tolist(), question


MEASURED = {"standalone": (1.93, 2.78, 3.63, 4.31), "eagle": (1.89, 2.66, 3.20, 3.57)}  # docs/tiny-model.md, by a plain loop


COMBS = {("eagle", 1): (2.79, 3.45, 3.85), ("standalone", 1): (2.89, 3.71, 4.50)}  # with so many siblings, of lengths from 2 on


def tokens_a_verification(drafter: str, length: int, questions: Sequence[str], *, siblings: int = 0) -> float:
    """On these requests, without what is so near to an answer's end that a guess may lie behind it."""
    options = [f"{drafter}.trees=true", f"{drafter}.siblings={siblings}"] if siblings else []
    rows = {"max_batch_requests": 32 * (1 + length * (1 + siblings)), "num_pages": 800} if siblings else {"num_pages": 400}
    llm = LLM(dtype="float32", num_threads=1, drafter=drafter, draft_length=str(length), plugin_options=options, **rows)
    engine = llm._engine
    assert engine is not None
    num_told = num_verified = 0
    for begin in range(0, len(questions), 32):  # with more at once there would be no room for all guesses
        told: dict[str, list[int]] = {}
        for question in questions[begin : begin + 32]:
            told[question] = []
            params = SamplingParams(max_tokens=96, temperature=0)
            engine.submit(GenerationRequest(request_id=question, prompt_token_ids=tuple(ids_of(question)), params=params))
        while engine.has_work:
            for output in engine.step():
                told[output.request_id].append(len(output.token_ids))
        for counts in told.values():
            begun = 1  # by the first token, which no guess preceded
            for count in counts[1:]:
                if begun < sum(counts) - length:
                    num_told += count
                    num_verified += 1
                begun += count
    assert engine.meter.stats().drafts.verifications >= num_verified
    return num_told / num_verified


OTHERS = [("standalone", 1), ("standalone", 2), ("standalone", 3), ("eagle", 1), ("eagle", 2), ("eagle", 4)]
LENGTHS = [("standalone", 4), ("eagle", 3), *(OTHERS if EVERYTHING else [])]
HELD_OUT = evaluate.held_out_requests(128 if EVERYTHING else 32)  # the docs are about 128


@pytest.mark.parametrize(("drafter", "length"), LENGTHS)
def test_a_verification_tells_as_many_tokens_as_the_docs_say(drafter: str, length: int) -> None:
    found = tokens_a_verification(drafter, length, HELD_OUT)
    assert found == pytest.approx(MEASURED[drafter][length - 1], rel=0.03)


@pytest.mark.parametrize(("drafter", "length"), [("eagle", 3), *([("eagle", 4), ("standalone", 4)] if EVERYTHING else [])])
def test_with_siblings_a_verification_tells_more_and_as_many_as_the_docs_say(drafter: str, length: int) -> None:
    found = tokens_a_verification(drafter, length, HELD_OUT, siblings=1)
    assert found == pytest.approx(COMBS[drafter, 1][length - 2], rel=0.03)
    assert found > 1.02 * tokens_a_verification(drafter, length, HELD_OUT)
