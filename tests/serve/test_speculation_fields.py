"""Speculation as clients see it: a field that turns it off, and what became of guesses in the usage."""

from __future__ import annotations

import pytest
from fake_engine import DRAFTED, RIGHT

from enginery.contracts.request import FinishReason, RequestOutput
from enginery.serve.engine.outputs import _joined

TEXT = "abcd"
BODIES = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 3},
}
GUESSED = {"reasoning_tokens": 0, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6}
NOT_GUESSED = {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def details(usage):
    return usage.get("completion_tokens_details") or usage["output_tokens_details"]


@pytest.mark.parametrize("path", BODIES)
def test_usage_says_which_guesses_were_right_and_false_makes_none(with_server, path):
    async def scenario(live):
        for speculation, expected in ((None, GUESSED), (True, GUESSED), (False, NOT_GUESSED)):
            body = BODIES[path] | {"seed": DRAFTED, "speculation": speculation, "ignore_eos": True}
            assert details((await live.post(path, **body)).json()["usage"]) == expected
            if path == "/v1/responses":
                events = await live.named_events(path, **body)
                assert details(events[-1]["response"]["usage"]) == expected
                continue
            options = {"include_usage": True, "continuous_usage_stats": True}
            usages = [event["usage"] for event in await live.events(path, **body, stream_options=options)]
            assert details(usages[-1]) == expected
            so_far = [details(usage)["rejected_prediction_tokens"] for usage in usages]
            assert so_far == sorted(so_far)

    with_server(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guesses_behind_a_stop_string_are_not_in_the_usage(with_server, path):
    """A step tells seven tokens, of which six were guessed, and the text ends behind the first ones."""

    async def scenario(live):
        body = BODIES[path] | {"seed": RIGHT, "max_tokens": 20, "ignore_eos": True}
        text = (await live.post(path, **body | {"max_tokens": 3})).json()["choices"][0]
        body["stop"] = (text["text"] if "text" in text else text["message"]["content"])[-1:]
        usages = [(await live.post(path, **body)).json()["usage"]]
        usages += [event["usage"] for event in await live.events(path, **body, stream_options={"include_usage": True})][-1:]
        for usage in usages:
            assert 0 < usage["completion_tokens"] <= 3
            right = {"accepted_prediction_tokens": usage["completion_tokens"], "rejected_prediction_tokens": 0}
            assert details(usage) == {"reasoning_tokens": 0} | right

    with_server(scenario)


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages"])
def test_what_is_neither_true_nor_false_is_refused(with_server, path):
    async def scenario(live):
        body = BODIES.get(path) or {"max_tokens": 3, "messages": [{"role": "user", "content": TEXT}]}
        for given in ("off", 0):
            reply = await live.post(path, **body, speculation=given)
            assert reply.status_code == 400
            assert "speculation" in reply.json()["error"]["message"]
        assert (await live.post(path, **body, speculation=False)).status_code == 200

    with_server(scenario)


def test_what_waits_for_a_slow_reader_keeps_its_guesses():
    first = RequestOutput(request_id="r", token_ids=(5, 6), num_drafted=3, num_accepted=1)
    then = RequestOutput(request_id="r", token_ids=(7,), num_drafted=2, finish_reason=FinishReason.LENGTH)
    joined = _joined(first, then)
    assert (joined.token_ids, joined.finish_reason) == ((5, 6, 7), FinishReason.LENGTH)
    assert joined.guesses(3) == (5, 1)
