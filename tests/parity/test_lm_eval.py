"""Log-likelihoods as lm-eval takes them from a server are transformers' own.

The requests and the reading of the replies are those of `local-completions` in lm-eval 0.4.13 (lm_eval/models/openai_completions.py
`_create_payload`, `parse_logprobs`; lm_eval/models/api_models.py: `batch_loglikelihood_requests`), which needs too much to be
installed for a test: batches of token ids, `echo`, one log-probability, one new token, which is dropped.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import httpx
import pytest
import torch
from parity.oracle import Oracle
from parity.test_http import Served, served

__all__ = ["served"]

PAIRS = [
    ("the quick brown", " fox jumps"),
    ("the quick brown", " over the lazy dog"),
    ("Grüße", " aus Köln 🙂"),
    ("def f(x):", " return x + 1"),
    ("你好", "世界"),
]


def payload(batch: list[list[int]]) -> dict[str, Any]:
    return {"model": "tiny", "prompt": batch, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


def parse_logprobs(reply: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    found = []
    for choice, length in zip(sorted(reply["choices"], key=itemgetter("index")), context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(logprob == max(likeliest.values()) for logprob, likeliest in zip(logprobs, top, strict=True))
        found.append((sum(logprobs), greedy))
    return found


def expected(oracle: Oracle, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    logits = oracle.logits(context + continuation)[len(context) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(continuation)
    return float(logits.gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


def test_log_likelihoods_over_http_are_transformers_own(served: Served) -> None:
    encode = served.tokenizer.encode
    pairs = [(encode(context), encode(continuation, add_special_tokens=False)) for context, continuation in PAIRS]
    greedy = served.oracle.continue_greedily(pairs[0][0], 4)
    pairs.append((pairs[0][0], greedy))
    batch = [context + continuation for context, continuation in pairs]
    url = str(served.client.base_url) + "completions"
    reply = httpx.post(url, json=payload(batch), timeout=60).json()
    found = parse_logprobs(reply, [len(context) for context, _ in pairs])
    wanted = [expected(served.oracle, *pair) for pair in pairs]
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert found[-1][1]
    assert not all(is_greedy for _, is_greedy in found)
