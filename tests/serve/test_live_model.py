"""The whole server over real models, random ones and the embedded one, with the installed plugins of grammars and parsers."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import noise
import openai
import pytest
from pairwise import EVERYTHING
from running import serving

PROMPTS = ["emoji 🙂🚀👩‍👩‍👧‍👦", "你好世界 日本語", "naïve café", "plain words"]
SEEDS = 24 if EVERYTHING else 10
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Of a server whose model writes noise."""
    with served(*noise.FLAGS, "--tool-parser", "hermes") as made:
        yield made


@pytest.fixture(scope="module")
def talker() -> Iterator[openai.OpenAI]:
    """Of a server with the embedded model."""
    with served("--dtype", "float32") as made:
        yield made


@contextlib.contextmanager
def served(*flags: str) -> Iterator[openai.OpenAI]:
    """The official client of a server."""
    with serving(*flags) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def texts(client: openai.OpenAI, name: str, **asked: object) -> tuple[tuple[str, str], tuple[str, str]]:
    """(text, how it ended) of a whole answer and of a stream."""
    whole = client.completions.create(model=name, **asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(model=name, stream=True, **asked)]
    streamed = "".join(chunk.text for chunk in chunks)
    return (whole.text, whole.finish_reason), (streamed, chunks[-1].finish_reason)


def test_a_stream_of_random_bytes_is_the_whole_text_with_and_without_stop_strings(client):
    name, chance = model(client), random.Random(0)

    def asked(seed: int) -> dict:
        body = {"ignore_eos": True, "top_k": -1, "top_p": 1.0}
        return {"prompt": PROMPTS[seed % 4], "seed": seed, "temperature": 5.0, "max_tokens": 40, "extra_body": body}

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: texts(client, name, **asked(seed)), range(SEEDS)))
    assert all(whole == streamed for whole, streamed in found)
    assert sum(not whole[0].isascii() for whole, _ in found) > SEEDS / 2
    stops = []
    for (text, _), _ in found:
        place = chance.randrange(len(text) - 4)
        stops.append([text[place : place + chance.randint(1, 4)], "never there"])
    with ThreadPoolExecutor(4) as pool:
        stopped = list(pool.map(lambda seed: texts(client, name, **asked(seed), stop=stops[seed]), range(SEEDS)))
    for ((text, _), _), (stop, _), (whole, streamed) in zip(found, stops, stopped, strict=True):
        assert whole == streamed == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_schema(client, stream):
    schema = ADD["function"]["parameters"]
    asked = {
        "model": model(client),
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 3,
    }
    if stream:
        chunks = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_a_call_with_valid_arguments(client, choice):
    asked = {
        "model": model(client),
        "messages": [{"role": "user", "content": "x"}],
        "tools": [ADD],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 3,
    }
    reply = client.chat.completions.create(**asked).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls
    assert call.function.name == "add"
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls[0].function.arguments == call.function.arguments


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "(unclosed"),
        ("guided_grammar", "this is no grammar"),
        ("guided_json", {"type": "nonsense"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#/nowhere"}}}),
    ],
)
def test_a_faulty_grammar_is_refused_and_never_ignored(client, field, value):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model(client), prompt="x", extra_body={field: value})
    assert refused.value.param == field


def said(client: openai.OpenAI, content: str, **asked: object) -> tuple[str, str]:
    """(answer, how it ended), greedy; the stream says the same."""
    asked = {
        "model": model(client),
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 200,
    } | asked
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    return whole.message.content, whole.finish_reason


def test_the_embedded_model_answers_in_sentences_and_ends(talker):
    for question in ("Hello", "Who are you?", "thanks!"):
        text, ended = said(talker, question)
        assert ended == "stop"
        assert re.fullmatch(r"[A-Z][\w ,.;:!?'`-]+[.!?]", text), text


def test_a_stop_string_cuts_a_story_where_it_first_comes(talker):
    story, _ = said(talker, "Tell me a story about a fox named Mia.")
    words = story.split()
    assert len(words) > 30
    for stop in (". ", f"{words[3]} {words[4]}", words[20]):
        assert said(talker, "Tell me a story about a fox named Mia.", stop=stop) == (story[: story.index(stop)], "stop")


def test_a_record_is_json_when_json_is_asked_for(talker):
    person = "Make a JSON record of this person: Ada is 36 years old, a pilot from Redmill who likes chess."
    text, ended = said(talker, person, response_format={"type": "json_object"})
    assert ended == "stop"
    assert json.loads(text) == {"name": "Ada", "age": 36, "job": "pilot", "town": "Redmill", "hobby": "chess"}


def test_a_conversation_goes_on_from_what_was_said(talker):
    turns = [{"role": "user", "content": "Hello"}]
    for question in ("What is 4 + 5?", "thanks!"):
        reply = talker.chat.completions.create(model=model(talker), messages=turns, temperature=0, max_tokens=100)
        assert reply.choices[0].finish_reason == "stop"
        turns += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": question}]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert "9" in answers[1]
    assert reply.usage.prompt_tokens_details.cached_tokens > 0


def test_choices_that_share_their_prompt_count_as_cached_what_was_there_before(talker):
    turns = [{"role": "user", "content": "Tell me a story about a squirrel that lives by the sea and wants a red hat. " * 3}]
    asked = {"model": model(talker), "messages": turns, "n": 4, "max_tokens": 3, "extra_body": {"cache_salt": "choices"}}
    first, again = (talker.chat.completions.create(**asked).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0, "one choice computed the prompt"
    assert again.prompt_tokens_details.cached_tokens > again.prompt_tokens // 2
