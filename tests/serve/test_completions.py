"""/v1/completions over the fake engine, which repeats its prompt."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import HELD

from enginery.contracts.request import SamplingParams

UNICODE = "naïve 日本語のテキスト 👩‍👩‍👧‍👦😀 中文字符"


def test_a_text_is_completed(with_server):
    async def scenario(live):
        reply = (await live.complete("hello world", max_tokens=40)).json()
        assert reply["object"] == "text_completion"
        assert reply["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}]
        usage = reply["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] // 2}

    with_server(scenario)


def test_sixteen_tokens_are_the_default(with_server):
    async def scenario(live):
        reply = (await live.complete("hello", ignore_eos=True)).json()
        assert reply["usage"]["completion_tokens"] == 16
        assert reply["choices"][0]["finish_reason"] == "length"

    with_server(scenario)


def test_prompts_come_as_texts_and_as_tokens(with_server):
    async def scenario(live):
        tokenizer = live.service.model().text.tokenizer
        ids = [tokenizer.encode(text, add_special_tokens=True) for text in ("one", "two three")]
        for prompt in (["one", "two three"], ids):
            reply = (await live.complete(prompt)).json()
            assert [choice["text"] for choice in reply["choices"]] == ["one", "two three"]
            assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert (await live.complete(ids[1])).json()["choices"][0]["text"] == "two three"

    with_server(scenario)


def test_n_completions_of_each_prompt(with_server):
    async def scenario(live):
        reply = (await live.complete(["one", "two"], n=3, seed=7, best_of=3)).json()
        assert [choice["index"] for choice in reply["choices"]] == list(range(6))
        assert [choice["text"] for choice in reply["choices"]] == ["one"] * 3 + ["two"] * 3
        assert reply["usage"]["prompt_tokens"] < reply["usage"]["completion_tokens"]

    with_server(scenario)


def test_the_children_of_n_have_seeds_of_their_own(with_server):
    async def scenario(live):
        model = live.service.model()
        prompts = await model.prompts("x", add_special_tokens=False)
        from enginery.serve.schemas.completions import CompletionRequest

        for seed, seeds in ((7, [7, 8, 9]), (2**63 - 1, [2**63 - 1, 0, 1]), (None, [None] * 3)):
            params = SamplingParams(n=3, seed=seed)
            jobs = model.jobs(CompletionRequest(prompt="x"), prompts, params, "r")
            assert [job.request.params.seed for job in jobs] == seeds
            assert all(job.request.params.n == 1 for job in jobs)

    with_server(scenario)


def test_a_field_left_out_has_the_checkpoint_s_recommendation(with_server):
    async def scenario(live):
        from enginery.serve.schemas.completions import CompletionRequest

        def params(**fields):
            return live.service.model().params(
                CompletionRequest(prompt="x", **fields), default_max_tokens=16, logprobs=None, prompt_logprobs=None
            )

        assert (params().temperature, params().top_p) == (0.6, 0.9)
        assert (params(temperature=0.0).temperature, params(top_p=1.0).top_p) == (0.0, 1.0)
        assert params(top_k=-1).top_k == 0

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_the_request(with_server, stream):
    async def scenario(live):
        body = {"prompt": "the quick brown fox", "stop": ["ck b", "fox"], "max_tokens": 400, "ignore_eos": True, "seed": HELD}
        if stream:
            events = await live.events("/v1/completions", **body)
            text = "".join(event["choices"][0]["text"] for event in events)
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            choice = (await live.post("/v1/completions", **body)).json()["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        assert (text, reason) == ("the qui", "stop")
        await live.until(lambda: len(live.said("abort")) == 1)

    with_server(scenario)


def test_a_stop_string_may_be_kept(with_server):
    async def scenario(live):
        reply = await live.complete("the quick brown fox", stop="ck b", include_stop_str_in_output=True)
        assert reply.json()["choices"][0]["text"] == "the quick b"

    with_server(scenario)


@pytest.mark.parametrize("text", [UNICODE, " leading", "a\n\nb", "<|im_end|>x"])
def test_a_stream_says_the_same_as_a_whole_answer(with_server, text):
    async def scenario(live):
        body = {"prompt": text, "max_tokens": 100, "logprobs": 1}
        whole = (await live.post("/v1/completions", **body)).json()
        events = await live.events("/v1/completions", **body, stream_options={"include_usage": True})
        *parts, last = events
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        choices = [part["choices"][0] for part in parts]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
        assert all(part["usage"] is None for part in parts)
        for name, values in whole["choices"][0]["logprobs"].items():
            assert [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][name]] == values

    with_server(scenario)


def test_usage_may_come_with_every_chunk(with_server):
    async def scenario(live):
        options = {"include_usage": True, "continuous_usage_stats": True}
        streaming = asyncio.create_task(live.events("/v1/completions", prompt="a b c d", stream_options=options, seed=HELD))
        await live.until(lambda: live.engine.meter.num_output and not any(group._untaken for group in live.engine.groups.values()))
        live.release()
        events = await streaming
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1]

    with_server(scenario)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 0])
def test_echo_with_logprobs_covers_the_prompt_as_lm_eval_needs_it(with_server, stream, as_ids, max_tokens):
    async def scenario(live):
        ids = live.service.model().text.tokenizer.encode("hello world", add_special_tokens=True)
        prompt = ids if as_ids else "hello world"
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
        if stream:
            choices = [event["choices"][0] for event in await live.events("/v1/completions", **body)]
            text = "".join(choice["text"] for choice in choices)
            parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        else:
            reply = (await live.post("/v1/completions", **body)).json()
            assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", max_tokens)
            text, logprobs = reply["choices"][0]["text"], reply["choices"][0]["logprobs"]
        assert text.endswith("hello world")
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        assert logprobs["tokens"][:3] == ["<s>", "he", "llo"]
        assert logprobs["text_offset"][:4] == (
            [0, 3, 5, 8] if as_ids else [0, 0, 2, 5]
        )  # the text of one that came as text has no <s>
        for token, offset in [*zip(logprobs["tokens"], logprobs["text_offset"], strict=True)][1 : len(ids)]:
            assert text[offset:].startswith(token)
        assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1 + max_tokens)
        assert logprobs["top_logprobs"][0] is None
        assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))

    with_server(scenario)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    "asked", [{"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}, {"echo": True, "prompt_logprobs": 1, "n": 2}]
)
def test_a_prompt_that_fills_the_context_can_be_scored_and_not_continued(with_server, asked, limit):
    async def scenario(live):
        ids = [3 + place % 500 for place in range(512)]
        reply = (await live.complete(ids, **asked, **{limit: 0})).json()
        assert reply["usage"]["completion_tokens"] == 0
        for choice in reply["choices"]:
            scores = choice["prompt_logprobs"] if "prompt_logprobs" in asked else choice["logprobs"]["token_logprobs"]
            assert (len(scores), scores[0], choice["finish_reason"]) == (512, None, "length")
        refused = await live.complete([*ids, 3], **asked, **{limit: 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert (await live.complete(ids, **asked, **{limit: 1})).json()["error"]["param"] == "prompt"
        assert (await live.complete(ids[:5], **{limit: 0})).status_code == 400

    with_server(scenario)


def test_prompt_logprobs_come_by_token_id(with_server):
    async def scenario(live):
        choice = (await live.complete("hello", prompt_logprobs=1)).json()["choices"][0]
        first, second, *_ = choice["prompt_logprobs"]
        assert first is None
        assert {"logprob": -0.5, "decoded_token": "he"} in second.values()
        chat = (await live.chat("hello", prompt_logprobs=0)).json()
        assert chat["prompt_logprobs"][0] is None

    with_server(scenario)


def test_what_other_clients_send_is_accepted(with_server):
    async def scenario(live):
        guidellm = {"stop": None, "ignore_eos": True, "max_tokens": 4, "max_completion_tokens": 4, "logprobs": None, "user": "u"}
        sglang = {
            "best_of": 1,
            "temperature": 0,
            "repetition_penalty": 1.0,
            "min_p": 0,
            "top_k": 5,
            "min_tokens": 1,
            "suffix": None,
        }
        for body in (guidellm, sglang):
            assert (await live.complete("x", **body)).status_code == 200
        assert (await live.complete("x", model="fake", cache_salt="s", priority=-1, metadata={"a": "b"})).status_code == 200

    with_server(scenario)
