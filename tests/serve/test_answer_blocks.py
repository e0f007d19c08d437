"""Long answers take linear time to be put together."""

from __future__ import annotations

import time

from enginery.contracts.parsers import ArgumentsText, ContentText, ToolCallBegun
from enginery.serve.api.answer_blocks import Blocks
from enginery.serve.api.chat import calls_of

COUNT = 200_000  # of tokens; the text was copied with each: 10 s
WITHIN_S = 2.0


def test_a_block_of_many_texts_is_put_together_once():
    blocks, began_s = Blocks(), time.process_time()
    for _ in range(COUNT):
        list(blocks.feed([ContentText("abcd")]))
    list(blocks.finish())
    assert time.process_time() - began_s < WITHIN_S
    assert blocks.done[0].text == "abcd" * COUNT


def test_the_arguments_of_calls_are_put_together_once():
    begun = [ToolCallBegun(0, "a", "f"), ToolCallBegun(1, "b", "g")]
    events = [*begun, *[ArgumentsText(0, "abcd")] * (2 * COUNT), ArgumentsText(1, "x")]
    began_s = time.process_time()
    calls = calls_of(events, in_chunk=False)
    assert time.process_time() - began_s < WITHIN_S
    assert [call.function.arguments for call in calls] == ["abcd" * (2 * COUNT), "x"]
    assert [call.function.name for call in calls] == ["f", "g"]
