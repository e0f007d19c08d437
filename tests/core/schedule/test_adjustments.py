"""What changes logits is as if it were made anew from all tokens, and costs what is new of them."""

from array import array
from collections import Counter
from time import thread_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import examples

from enginery.contracts.request import SamplingParams
from enginery.engine.sampling_input import SamplingRow, prepare_sampling, sampling_input
from enginery.schedule.adjustments import Adjustments
from enginery.schedule.scheduler import Scheduler

from .device import EOS, Told, asked_of, output_of, settings_of
from .kinds_device import scheduler_of_kinds
from .test_guesses import SameGuesses

VOCAB = 70
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(max_examples=examples(200), deadline=None)
@given(TOKENS, st.lists(st.tuples(TOKENS, st.lists(TOKENS, max_size=3)), max_size=5))
def test_what_was_seen_and_counted_is_as_of_all_tokens(prompt, parts):
    tokens = array("i", prompt)
    adjustments = Adjustments(SamplingParams(), tokens, len(prompt))
    for part, tries in parts:
        tokens.extend(part)
        for drafts in ([], *tries):
            for found, first in ((adjustments.seen, 0), (adjustments.told, len(prompt))):
                told, counts = found.tokens(drafts), found.counts(drafts)
                assert (told.dtype, counts.dtype) == (np.int64, np.int64)
                pairs = zip(told.tolist(), counts.tolist(), strict=True)
                assert sorted(pairs) == sorted(Counter([*tokens[first:], *drafts]).items())


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.5}, {"presence_penalty": 1, "frequency_penalty": 1}, {"logit_bias": {3: 1}}], ids=str
)
def test_a_step_costs_no_more_behind_a_long_context(params, guesses):
    def cost(num_prompt):
        """Of a hundred decoding steps with a request that has asked for nothing."""
        limits = dict(page_size=16, num_pages=1 << 15, max_model_len=1 << 19, max_batch_tokens=1 << 19)
        scheduler = scheduler_of_kinds(settings_of(**limits), drafting=SameGuesses(guesses))
        for name, asked in (("adjusted", params), ("plain", {})):
            scheduler.submit(asked_of(name, [9] * num_prompt, max_tokens=1000, ignore_eos=True, seed=0, **asked))
        took = []
        for _ in range(101):
            step = scheduler.next_step().value
            began = thread_time()
            prepare_sampling(step, scheduler.requests, frozenset({EOS}), vocab_size=VOCAB)
            took.append(thread_time() - began)
            Scheduler.complete(scheduler, step, output_of(step, Told([(3,)] * step.num_items)))
        return sum(took[1:])

    assert cost(200_000) < 5 * cost(200) + 0.02


def test_long_lists_of_tokens_are_made_into_arrays_once():
    many = range(150_000)
    params = SamplingParams(logit_bias=dict.fromkeys(many, 1.0), stop_token_ids=tuple(many), min_tokens=9, max_tokens=9, seed=0)
    rows = [SamplingRow(Adjustments(params, array("i", [1]), 1), position=1)]

    def cost():
        began = thread_time()
        sampling_input(rows, frozenset({EOS}), vocab_size=len(many))
        return thread_time() - began

    first = cost()
    assert min(cost() for _ in range(3)) < first / 4
