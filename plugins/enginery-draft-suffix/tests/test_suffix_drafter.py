"""The drafter over trees of lists, which show what it feeds and asks; and over Arctic Inference where that is installed."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from enginery.api import CONTRACT_VERSIONS, ConfigError, DraftAsk, DraftContext, DraftTree, HookGroup, HostDrafter
from enginery_draft_suffix import register_drafters
from enginery_draft_suffix.drafter import SuffixDrafter
from enginery_draft_suffix.spec import SUFFIX, SuffixOptions


class Lists:
    """Finds the longest run by comparing; its own text first. Refuses what Arctic Inference refuses."""

    def __init__(self) -> None:
        self.own: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}

    def start_request(self, req_id: str, prompt_token_ids: Sequence[int]) -> None:
        assert req_id not in self.own, "it is active"
        self.own[req_id], self.answers[req_id] = list(prompt_token_ids), []

    def stop_request(self, req_id: str) -> None:
        del self.own[req_id]

    def add_active_response(self, req_id: str, token_ids: Sequence[int]) -> None:
        self.own[req_id] += token_ids
        self.answers[req_id] += token_ids

    def speculate(
        self,
        req_id: str,
        context: Sequence[int],
        max_spec_tokens: int,
        max_spec_factor: float,
        *,
        min_token_prob: float,
        use_tree_spec: bool,
    ) -> SimpleNamespace:
        assert min_token_prob == 0.1
        if use_tree_spec:
            return self.branching(req_id, list(context), max_spec_tokens)
        for size in range(len(context), 0, -1):
            most = min(max_spec_tokens, int(max_spec_factor * size))
            for text in (self.own[req_id], *self.answers.values()):
                for at in range(len(text) - size):
                    if text[at : at + size] == list(context[-size:]):
                        return SimpleNamespace(token_ids=text[at + size :][:most])
        return SimpleNamespace(token_ids=[])

    def branching(self, req_id: str, context: list[int], most: int) -> SimpleNamespace:
        """All that followed the last token, token by token, the more often the sooner, with what followed that."""
        token_ids, parents, found = list[int](), list[int](), [(context[-1:], -1)]
        texts = [self.own[req_id], *(text for key, text in self.answers.items() if key != req_id)]
        while found and len(token_ids) < most:
            run, before = found.pop(0)
            size = len(run)
            next_ = Counter(text[at + size] for text in texts for at in range(len(text) - size) if text[at : at + size] == run)
            for token, _ in next_.most_common()[: most - len(token_ids)]:
                found.append(([*run, token], len(token_ids)))
                token_ids.append(token)
                parents.append(before)
        return SimpleNamespace(token_ids=token_ids, parents=parents)


def over_lists(**options: int) -> tuple[SuffixDrafter, Lists]:
    trees = Lists()
    return SuffixDrafter(lambda: trees, SuffixOptions(**options)), trees


def test_what_is_new_is_taken_in_once() -> None:
    drafter, trees = over_lists()
    drafter.propose([DraftAsk("a", [1, 2, 3], 4)])
    drafter.propose([DraftAsk("a", [1, 2, 3, 4, 5], 4)])
    drafter.propose([DraftAsk("a", [1, 2, 3, 4, 5, 6], 4)])
    assert trees.own == {"a": [1, 2, 3, 4, 5, 6]}
    assert trees.answers == {"a": [3, 4, 5, 6]}


def test_it_guesses_from_its_own_text_and_from_others_answers_and_not_more_than_asked() -> None:
    drafter, _ = over_lists()
    drafter.propose([DraftAsk("a", [9, 1, 2, 3], 8)])
    drafter.propose([DraftAsk("a", [9, 1, 2, 3, 4, 5, 6, 7, 8], 8)])
    assert drafter.propose([DraftAsk("b", [3, 4], 8), DraftAsk("c", [7, 7, 5, 7, 7], 1)]) == [[5, 6], [5]]


def test_it_guesses_all_that_has_followed_if_that_is_asked_for() -> None:
    drafter, _ = over_lists(trees=True)
    drafter.propose([DraftAsk("a", [9, 1, 2, 3], 1)])
    drafter.propose([DraftAsk("a", [9, 1, 2, 3, 1, 4], 1)])
    (tree,) = drafter.propose([DraftAsk("b", [7, 7, 1], 6)])
    assert tree == DraftTree((4,), (-1,)), "what others were told"
    (tree,) = drafter.propose([DraftAsk("a", [9, 1, 2, 3, 1, 4, 1], 6)])
    assert tree == DraftTree((2, 4, 3, 1, 1, 4), (-1, -1, 0, 1, 2, 4))


def test_trees_are_announced_where_they_are_asked_for() -> None:
    assert SUFFIX.trees is not None
    assert [SUFFIX.trees(SuffixOptions(trees=asked)) for asked in (False, True)] == [False, True]


def test_who_has_ended_leaves_its_answer_and_its_name() -> None:
    drafter, trees = over_lists()
    drafter.propose([DraftAsk("a", [1, 2], 1)])
    drafter.forget("a")
    drafter.forget("unknown")
    assert (trees.own, trees.answers) == ({}, {"a": [2]})
    drafter.propose([DraftAsk("a", [5, 6, 7], 1)])
    assert trees.own == {"a": [5, 6, 7]}


def test_answers_are_no_guesses_for_requests_with_another_salt() -> None:
    drafter = SuffixDrafter(Lists, SuffixOptions())
    text = [9, 1, 2, 3, 4, 5, 6]
    for end in range(2, 8):
        drafter.propose([DraftAsk("a", text[:end], 8, "mine")])
    asks = [DraftAsk(salt, [7, 2, 3], 8, salt) for salt in ("mine", "yours", "")]
    assert drafter.propose(asks) == [[4, 5], [], []]
    drafter.forget("a")
    assert drafter.propose([DraftAsk("b", [7, 2, 3], 8, "mine"), DraftAsk("c", [7, 2, 3], 8)]) == [[4, 5], []]


def test_the_trees_of_salts_that_nobody_uses_are_dropped() -> None:
    opened = []
    drafter = SuffixDrafter(lambda: opened.append(Lists()) or opened[-1], SuffixOptions(salts=3))  # type: ignore[func-returns-value]
    for at in range(9):
        drafter.propose([DraftAsk(f"{at}", [1, 2], 1, f"{at}")])
    assert len(drafter._by_salt) == 9, "they run"
    for at in range(9):
        drafter.forget(f"{at}")
    drafter.propose([DraftAsk("again", [1, 2], 1, "0")])
    assert list(drafter._by_salt) == ["7", "8", "0"]
    assert len(opened) == 10, "those of no salt were there, and those of 0 still"
    drafter.forget("again")
    drafter.propose([DraftAsk("new", [1, 2], 1, "9")])
    assert set(drafter._by_salt) == {"8", "0", "9"}, "7 was used longest ago"


def test_only_so_many_last_tokens_are_looked_up() -> None:
    drafter, _ = over_lists(depth=2)
    assert drafter.propose([DraftAsk("a", [1, 2, 3, 4, 9, 1, 2, 3], 8)]) == [[4, 9]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0},
        {"depth": 1},
        {"depth": 2**31},
        {"salts": 0},
        {"cached_requests": -1},
        {"cached_requests": 2**31},
        {"factor": 0.0},
        {"factor": math.nan},
        {"factor": math.inf},
        {"least_share": 2.0},
    ],
)
def test_options_that_would_find_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="would find nothing; take"):
        build(**wrong)


def test_without_arctic_inference_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(ConfigError, match=r"cmake<4.*pip install --no-build-isolation arctic-inference, or take --drafter"):
        build()


def test_it_is_offered_once_for_this_contract() -> None:
    assert register_drafters() == [SUFFIX]
    assert SUFFIX.api == CONTRACT_VERSIONS[HookGroup.DRAFTER]


def build(**options: float) -> HostDrafter:
    assert SUFFIX.build is not None
    return SUFFIX.build(DraftContext(vocab_size=100, options=dataclasses.replace(SuffixOptions(), **options)))  # type: ignore[arg-type]


def test_an_engine_tells_the_same_in_fewer_steps_with_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("enginery_weights_tiny", reason="the embedded model is not installed")
    from enginery import LLM, SamplingParams

    monkeypatch.setattr("enginery_draft_suffix.drafter.open_trees", lambda options: Lists())
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    options = {"num_pages": 64, "dtype": "float32", "num_threads": 1}
    trees = {"drafter": "suffix", "draft_length": "8", "plugin_options": ("suffix.trees=true",)}
    with LLM(**options) as plain, LLM(**options, **trees) as drafted:
        expected = plain.generate("Tell me a story about a fox.", params)[0]
        for _ in range(2):
            *_, last = deltas = list(drafted.stream("Tell me a story about a fox.", params))
            assert tuple(token for delta in deltas for token in delta.token_ids) == expected.token_ids
        assert last.usage.num_accepted_tokens > 10, "the second time, the first answer is known"


@pytest.fixture
def arctic() -> None:
    pytest.importorskip("arctic_inference.suffix_decoding", reason="Arctic Inference is not installed; tox -e arctic builds it")


@pytest.mark.usefixtures("arctic")
def test_arctic_inference_guesses_what_followed() -> None:
    drafter = build()
    assert [list(each) for each in drafter.propose([DraftAsk("a", [1, 2, 3, 4, 5, 6, 1, 2, 3], 8)])] == [[4, 5, 6]]
    assert [len(each) for each in drafter.propose([DraftAsk("a", [1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 2)])] == [2]
    for count in range(4, 10):
        drafter.propose([DraftAsk("b", [50, *range(20, 20 + count)], 4)])
    drafter.forget("b")
    assert [list(each) for each in drafter.propose([DraftAsk("c", [60, 24, 25], 4)])] == [[26, 27]]
    drafter.forget("c")
    assert [list(each) for each in drafter.propose([DraftAsk("c", [61, 99], 4)])] == [[]]


@pytest.mark.usefixtures("arctic")
def test_arctic_inference_guesses_trees() -> None:
    drafter = build(trees=True, factor=4.0)
    (tree,) = drafter.propose([DraftAsk("a", [1, 2, 3, 1, 2, 4, 1, 2], 8)])
    assert isinstance(tree, DraftTree)
    roots = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
    assert sorted(roots) == [3, 4]


@pytest.mark.usefixtures("arctic")
def test_with_no_answers_kept_requests_do_not_mix() -> None:
    drafter = build(cached_requests=0)
    for count in range(4, 10):
        drafter.propose([DraftAsk("b", [50, *range(20, 20 + count)], 4)])
    assert [list(each) for each in drafter.propose([DraftAsk("c", [60, 24, 25], 4)])] == [[]]


@pytest.mark.usefixtures("arctic")
def test_answers_stay_the_same_and_come_in_fewer_steps_where_they_repeat() -> None:
    pytest.importorskip("enginery_weights_tiny", reason="the embedded model is not installed")
    from enginery import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    options = {"num_pages": 64, "dtype": "float32", "num_threads": 1}
    with LLM(**options) as plain, LLM(drafter="suffix", draft_length="8", **options) as drafted:
        expected = plain.generate("Tell me a story about a fox.", params)[0]
        for _ in range(2):
            *_, last = deltas = list(drafted.stream("Tell me a story about a fox.", params))
            assert tuple(token for delta in deltas for token in delta.token_ids) == expected.token_ids
        assert last.usage.num_accepted_tokens > 30, "the second time, the first answer is known"
