"""With drafts every family that is served tells what it tells without, whatever they are. Weights are random."""

from __future__ import annotations

from pathlib import Path

from engine.draft_models import asking
from engine.rank_answers import PROMPTS, SERVED, folder_of, options
from engine.test_speculation import ASKS, assert_equal_answers
from pairwise import EVERYTHING, in_turn

from enginery.plugin.registry import Registry

# In CI those of whose memory or heads no other test of drafts has a model.
SOME = ["glm4-moe-lite", "ling_3", "longcat-flash", "mimo", "minimax-m2", "ring"]


@in_turn(("name", sorted(SERVED) if EVERYTHING else SOME), ("kind", ["right", "wrong", "random", "some", "out of range"]))
def test_each_is_told_what_plain_decoding_tells(name: str, kind: str, tmp_path: Path, registry: Registry) -> None:
    asked = options(model=folder_of(tmp_path, name), page_size=4, num_pages=256, max_batch_tokens=24)
    ways = ("greedy", "seeded", "penalties", "logprobs")
    requests = [
        asking(about, [place, *prompt], **{"max_tokens": 24 - place, **ASKS[about]})
        for place, (about, prompt) in enumerate(zip(ways, PROMPTS, strict=True))
    ]
    assert_equal_answers(registry, asked, requests, kind)
