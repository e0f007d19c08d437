"""Requests that no engine should take: rows 1 to 7, 9 to 11, 13 and 42 to 44 of the checklist."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import secrets
import time

import pytest
from chaos.harness import MAX_MODEL_LEN, NUM_PAGES, started
from pairwise import EVERYTHING

HUGE = 10**9
PATTERNS = 8 if EVERYTHING else 3  # that are evil and sent at once; each takes its limit of processor time


def error_of(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN])
def test_row_1_a_prompt_longer_than_the_context_is_refused_with_both_numbers(server, length):
    began = time.monotonic()
    message = error_of(server.complete([5] * length, max_tokens=1))["message"]
    assert time.monotonic() - began < 30
    assert f"{length:,}" in message
    assert f"{MAX_MODEL_LEN:,}" in message


def test_row_2_more_tokens_than_the_context_holds_are_refused(server):
    error = error_of(server.complete("x", max_tokens=1_000_000))
    assert error["param"] == "max_tokens"
    assert "1,000,000" in error["message"]


def test_row_3_what_can_never_fit_the_memory_is_refused_and_nobody_waits_for_it():
    with started(options={"num_pages": 4}) as small:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            huge = pool.submit(small.complete, [5] * 100, max_tokens=1)
            fine = pool.submit(small.complete, "hello", max_tokens=4)
        message = error_of(huge.result())["message"]
        assert "100 tokens" in message
        assert "64 tokens" in message
        assert fine.result().status_code == 200


@pytest.mark.parametrize("prompt", [[999_999], [-1], [1.5], [], [[]], [2**70]], ids=str)
def test_row_4_tokens_outside_of_the_vocabulary_are_refused(server, prompt):
    assert error_of(server.complete(prompt))["param"] == "prompt"


@pytest.mark.parametrize(
    "field", [{"logit_bias": {"999999": 1}}, {"logit_bias": {"-1": 1}}, {"stop_token_ids": [999_999]}], ids=str
)
def test_row_5_bad_ids_are_refused_and_a_neighbour_is_not_touched(server, field):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        neighbours = [pool.submit(server.control) for _ in range(3)]
        bad = [pool.submit(server.complete, "x", **field) for _ in range(3)]
    assert {error_of(answer.result())["param"] for answer in bad} == set(field)
    assert {answer.result() for answer in neighbours} == {server.answer}


@pytest.mark.parametrize(
    "body",
    [
        {"n": 5_000_000},
        {"best_of": HUGE},
        {"logprobs": HUGE},
        {"stop": ["s"] * 100_000},
        {"prompt": ["x"] * 100_000},
        {"stop_token_ids": [3] * 100_000},
        {"prompt": ["x"] * 1000, "n": 128},
    ],
    ids=lambda body: str(body)[:30],
)
def test_row_6_huge_counts_are_refused_before_anything_is_allocated(server, body):
    before = server.memory()
    assert error_of(server.http.post("/v1/completions", json={"prompt": "x", **body}))
    assert server.memory() - before < 64 << 20


@pytest.mark.parametrize(
    "field",
    ["temperature:NaN", "temperature:-1", "temperature:1e30", "top_p:-0.1", "top_p:Infinity", "top_k:-5", "min_p:2"],
)
def test_row_7_odd_sampling_values_are_refused(server, field):
    name, value = field.split(":")
    error_of(server.http.post("/v1/completions", content=f'{{"prompt": "x", "{name}": {value}}}'))


def test_row_7_the_smallest_temperature_is_greedy(server):
    texts = {server.complete("abc", temperature=value, max_tokens=8).json()["choices"][0]["text"] for value in (0, 1e-30)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[" * 10_000 + b"]" * 10_000,
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        json.dumps({"prompt": None}).encode(),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_row_9_what_is_no_request_is_refused(server, body):
    assert error_of(server.http.post("/v1/completions", content=body))


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        (b'{"prompt": "x", "', b"n", b'": 1}'),
        (b'{"prompt": "x", "foo": [', b"[],", b"1]}"),
        (b'{"prompt": [', b"[],", b"1]}"),
        (b'{"prompt": [', b"1,", b"1]}"),
        (b'{"prompt": "x", "metadata": {', b'"a":"",', b'"a":""}}'),
    ],
    ids=["a name", "lists in an unknown field", "lists", "tokens", "equal keys"],
)
def test_row_9_eight_megabytes_of_what_is_no_request_hold_nobody_up(server, head, unit, tail):
    body = head + unit * ((8 << 20) // len(unit)) + tail
    before = server.memory()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        evil = [pool.submit(server.http.post, "/v1/completions", content=body) for _ in range(4)]
        assert server.control() == server.answer
        assert all(error_of(answer.result()) for answer in evil)
    assert server.memory() - before < 200 << 20


def test_row_9_of_equal_keys_the_last_counts_and_null_is_absent(server):
    body = b'{"prompt": "x", "max_tokens": -1, "max_tokens": 2, "temperature": null, "stop": null, "user": null}'
    assert server.http.post("/v1/completions", content=body).json()["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": 5},
        {"role": "king", "content": "x"},
        {"content": "x"},
        {"role": "user"},
        "x",
        {"role": "user", "content": [5]},
    ],
    ids=str,
)
def test_row_10_messages_of_wrong_types_are_refused(server, message):
    error_of(server.http.post("/v1/chat/completions", json={"messages": [message]}))


def test_row_10_too_many_messages_are_refused(server):
    error_of(server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}] * 100_000}))


def schema_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "evil", "schema": schema}}}


EVIL = {
    "a pattern in a schema": schema_of({"type": "string", "pattern": "((a+)+)+$"}),
    "a cycle": schema_of({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "many items": schema_of({"type": "array", "items": {"type": "integer"}, "maxItems": HUGE}),
    "many items at the least": schema_of({"type": "array", "items": {"type": "integer"}, "maxItems": HUGE, "minItems": HUGE}),
    "a bad pattern": schema_of({"type": "string", "pattern": "("}),
    "nonsense": schema_of({"type": "nonsense"}),
    "many properties": schema_of({"properties": {f"p{number}": {"type": "string"} for number in range(50_000)}}),
    "10 MB": schema_of({"enum": ["x" * 1000] * 10_000}),
    "a large multiple": schema_of({"type": "integer", "multipleOf": 1_000_003}),
    "a regex": {"guided_regex": "(a+)+$"},
    "repeats of repeats": {"guided_regex": "(a{3800}){1000}"},
    "a long text": {"guided_regex": "a{40000}"},
    "states": {"guided_regex": "(a|b)*a(a|b){60}"},
    "a deep grammar": {"guided_grammar": "start: " + "(" * 50_000},
    "patterns that all must match": {"guided_grammar": "start: A\nA: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(60))},
}


def chat(server, **body):
    return server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 8} | body)


@pytest.mark.parametrize("name", EVIL)
def test_row_11_an_evil_grammar_is_refused_or_bounded_and_holds_nobody_up(server, name):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        evil = pool.submit(chat, server, **EVIL[name])
        assert server.control() == server.answer
        response = evil.result()
    assert response.status_code in (200, 400, 413, 503), response.text


def gaps_of_a_stream(server):
    """Seconds between the tokens of one answer, and how many there were."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    times = []
    with server.http.stream("POST", "/v1/completions", json=body) as lines:
        times = [time.monotonic() for line in lines.iter_lines() if line.startswith("data: {")]
    assert len(times) >= 100
    return sorted(then - now for now, then in itertools.pairwise(times))


def test_row_11_evil_grammars_leave_the_time_between_the_tokens_of_others_as_it_is(server):
    """The best of three tries counts: other work on the machine is no fault of ours."""
    found = []
    for _ in range(3):
        calm, new = gaps_of_a_stream(server), secrets.randbelow(900)  # what was refused before is known
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            evils = [pool.submit(chat, server, guided_regex=f"(a{{{3800 + new}}}){{{1000 + n}}}") for n in range(PATTERNS)]
            evils.append(pool.submit(chat, server, guided_regex=f"a{{{90_000 + new}}}"))
            evils.append(pool.submit(chat, server, **schema_of({"type": "integer", "multipleOf": 100_019 + new})))
            gaps = gaps_of_a_stream(server)
            for evil in evils:
                assert evil.result().status_code in (200, 400, 503), evil.result().text
        p99, longest, before = gaps[-len(gaps) // 100], gaps[-1], calm[-len(calm) // 100]
        found.append((p99, longest, before))
        if p99 < 3 * before + 0.05 and longest < 0.5:
            return
    raise AssertionError(f"99th of 100 gaps, longest, 99th when calm: {found}")


def test_row_11_evil_patterns_deny_structured_output_to_nobody(server):
    """Also to who comes from the same address, with the same key."""
    usual = schema_of(
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    )
    assert chat(server, **usual, max_tokens=40).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        new = secrets.randbelow(900)  # what was refused before is known
        evils = [pool.submit(chat, server, guided_regex=f"(a{{{3800 + new}}}){{{2000 + number}}}") for number in range(PATTERNS)]
        fresh = schema_of(
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": False}
        )
        for body in (fresh, usual, {"response_format": {"type": "json_object"}}):
            response = chat(server, **body, max_tokens=40)
            assert response.status_code == 200, response.text
        assert {evil.result().status_code for evil in evils} <= {400, 503}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_row_13_templates_come_from_the_model_only(server, path):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{% for i in range(10**9) %}{% endfor %}"}
    assert error_of(server.http.post(path, json=body))["param"] == "chat_template"


@pytest.mark.parametrize(
    "variables",
    [
        *({name: value} for name in ("messages", "tools", "documents") for value in ([], None, [{"role": "user", "content": "y"}])),
        *({name: True} for name in ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "padding")),
        *(
            {name: "y"}
            for name in ("chat_template", "bos_token", "raise_exception", "range", "__class__", "self", "nobody's", "x" * 9999)
        ),
        {f"v{place}": place for place in range(9999)},
        {"deep": json.loads("[" * 400 + "]" * 400)},
    ],
    ids=lambda variables: str(variables)[:40],
)
def test_row_13_variables_replace_nothing_of_a_template(server, variables):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": variables}
    error = error_of(server.http.post("/v1/chat/completions", json=body))
    assert error["param"] == "chat_template_kwargs"
    assert len(error["message"]) < 600


def test_row_42_nothing_that_is_sent_begins_a_line_of_the_log_or_is_secret_in_it(server):
    prompt, model = "the prompt is nobody's business", "x\n2026 CRITICAL forged\r\n"
    server.complete(prompt, model=model)
    server.complete(prompt, max_tokens=1)
    server.http.post("/v1/completions%0aforged?api_key=hunter2", json={})
    server.http.get("/health/live?key=hunter2", headers={"Authorization": "Bearer hunter2"})
    server.until(lambda: "\\nforged" in server.said())  # a line is written behind its answer
    said = server.said()
    assert prompt not in said
    assert "hunter2" not in said
    assert "\\nforged" in said
    assert not any(line.startswith(("forged", "2026 CRITICAL")) for line in said.splitlines())


def test_row_42_a_log_in_json_has_one_object_on_every_line_whatever_is_asked_for():
    with started(log_format="json") as server:
        for path in ("/a%0ab", "/a%E2%80%A8b", "/a%C2%85b", "/a%C2%9B31mb", "/a%22,%22b"):
            assert server.http.get(path).status_code == 404
        server.complete("x", max_tokens=1)
        server.until(lambda: (said := server.said()).count('"path"') >= 6 and said.endswith("\n"))
        lines = server.said().splitlines()  # at whatever ends a line
    asked = [told.get("path") for told in map(json.loads, lines)]
    assert {"/a\nb", "/a\u2028b", "/a\x85b", "/a\x9b31mb", '/a","b'} <= set(asked)


def test_row_43_metrics_do_not_grow_with_what_clients_send(server):
    for word in ("a", "b"):
        server.complete("x", model=word)
        server.http.get(f"/{word}")
    before, new = len(server.http.get("/metrics").text.splitlines()), secrets.token_hex(4)
    for number in range(300 if EVERYTHING else 100):
        server.complete("x", model=f"model-{new}-{number}", user=f"user-{new}-{number}")
        server.http.get(f"/path-{new}-{number}")
    assert len(server.http.get("/metrics").text.splitlines()) == before


def test_row_44_a_stream_says_the_same_as_a_whole_answer(server):
    """Noise is full of broken and whole characters of several bytes."""
    for seed in range(8 if EVERYTHING else 3):
        body = {"max_tokens": 60, "seed": seed, "temperature": 1.5, "ignore_eos": True, "stop": ["\ufffd\ufffd\ufffd\ufffd", "ab"]}
        whole = server.complete("naïve 日本語 👩‍👩‍👧‍👦😀", **body).json()["choices"][0]["text"]
        lines = server.complete("naïve 日本語 👩‍👩‍👧‍👦😀", **body, stream=True).text.split("\n\n")
        parts = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
        assert "".join(part["choices"][0]["text"] for part in parts) == whole


def test_row_25_many_more_requests_than_fit_all_finish_as_they_would_alone(server):
    num_tokens = 300 if EVERYTHING else 160

    def ask(number):
        body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "cache_salt": str(number)}
        return server.complete([5 + number] * 60, **body).json()["choices"][0]["text"]

    alone = [ask(number) for number in (0, 7, 15)]
    before = server.metric("vllm:num_preemptions_total")
    assert 16 * math.ceil((60 + num_tokens) / 16) > NUM_PAGES
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert [together[number] for number in (0, 7, 15)] == alone
    assert server.metric("vllm:num_preemptions_total") > before


def test_row_25_a_storm_of_preemptions_ends_and_changes_no_text():
    """Room for 4 of the 16 that are sent, together: an engine whose steps take no time is done with one before the next is sent."""
    pages = math.ceil(130 / 16) * 4

    def ask(server, *numbers):
        body = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "cache_salt": f"{len(numbers)} at once"}
        prompts = [[5 + number] * 30 for number in numbers]
        return [choice["text"] for choice in server.complete(prompts, **body).json()["choices"]]

    with started(options={"num_pages": pages}, step_s=0) as server:
        alone = [ask(server, number)[0] for number in (0, 7, 15)]
        together = ask(server, *range(16))
        assert [together[number] for number in (0, 7, 15)] == alone
        assert server.metric("vllm:num_preemptions_total") > 0
        assert server.control() == server.answer
        server.until(lambda: server.metric("enginery:kv_pages_free") + server.metric("enginery:kv_pages_cached") == pages)
