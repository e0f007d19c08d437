"""The pieces of a growing output are its text, and stop strings end it at the same token however it comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import examples
from tokenizers_made import KINDS, byte_fallback, byte_level, metaspace, save

from enginery.contracts.request import SamplingParams
from enginery.text.detokenize import CompletionText, StopStrings
from enginery.text.tokenizer import Tokenizer

TEXTS = [
    "Hello, world! it's",
    "👩‍👩‍👧‍👦😀 ok",
    "日本語のテキスト 中文字符",
    "  two  spaces\n\nnew",
    "naïve café ༀཁ",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {kind: Tokenizer.from_folder(save(make(), tmp_path_factory.mktemp(kind))) for kind, make in KINDS.items()}


def feed(tokenizer, ids, sizes=(1,), **params):
    """(pieces, tokens that count, stop string) of `ids` given in chunks of these sizes, over and over."""
    completion = CompletionText(tokenizer, SamplingParams(**params))
    pieces, count, place = [], 0, 0
    for turn in range(len(ids) + 1):
        size = sizes[turn % len(sizes)]
        delta = completion.feed(ids[place : place + size], finished=place + size >= len(ids))
        pieces.append(delta.text)
        count += delta.num_tokens
        place += size
        if delta.stopped_by is not None or place >= len(ids):
            return pieces, count, delta.stopped_by
    raise AssertionError


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_make_up_the_text(kind, text, made):
    ids = made[kind].encode(text, add_special_tokens=True)
    pieces, count, _ = feed(made[kind], ids)
    assert "".join(pieces) == made[kind].decode(ids, skip_special_tokens=True)
    assert count == len(ids)
    assert all("\ufffd" not in piece for piece in pieces)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_tokens_make_up_their_text(made, data):
    tokenizer = made[data.draw(st.sampled_from(sorted(KINDS)))]
    ids = data.draw(st.lists(st.integers(0, 420), min_size=1, max_size=30))
    skip = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    pieces, _, _ = feed(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_chunks_do_not_change_where_an_output_stops(made, data):
    tokenizer = made[data.draw(st.sampled_from(sorted(KINDS)))]
    text = data.draw(st.sampled_from(TEXTS))
    ids = tokenizer.encode(text, add_special_tokens=False)
    bounds = data.draw(st.tuples(st.integers(0, len(text) - 1), st.integers(1, 5)))
    params = {
        "stop": (text[bounds[0] : sum(bounds)], "zzz"),
        "min_tokens": data.draw(st.integers(0, 8)),
        "include_stop": data.draw(st.booleans()),
    }
    one_by_one = feed(tokenizer, ids, **params)
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    chunked = feed(tokenizer, ids, sizes, **params)
    assert ("".join(one_by_one[0]), *one_by_one[1:]) == ("".join(chunked[0]), *chunked[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_across_tokens_never_shows(kind, made):
    ids = made[kind].encode("the fox jumps over", add_special_tokens=False)
    pieces, count, stopped_by = feed(made[kind], ids, stop=("ox j",))
    assert ("".join(pieces), stopped_by) == ("the f", "ox j")
    assert count < len(ids)
    assert "".join(feed(made[kind], ids, stop=("ox j",), include_stop=True)[0]) == "the fox j"


def test_what_only_began_like_a_stop_string_is_given_back(made):
    ids = made["byte_level"].encode("one ST", add_special_tokens=False)
    assert "".join(feed(made["byte_level"], ids, stop=("STOP",))[0]) == "one ST"


def test_of_several_stop_strings_the_first_complete_one_counts():
    stops = StopStrings(("abcd", "bc", "c"), include_stop=False)
    assert stops.add("xabcd") == ("xa", "bc")


def test_text_that_cannot_become_a_stop_string_is_given_at_once():
    stops = StopStrings(("\n\nHuman:",), include_stop=False)
    assert stops.add("a\n") == ("a", None)
    assert stops.add("\n") == ("", None)
    assert stops.add("H") == ("", None)
    assert stops.add("i") == ("\n\nHi", None)


def test_min_tokens_lets_a_stop_string_pass(made):
    ids = made["byte_level"].encode("a. b. c. d.", add_special_tokens=False)
    assert "".join(feed(made["byte_level"], ids, stop=(".",))[0]) == "a"
    assert "".join(feed(made["byte_level"], ids, stop=(".",), min_tokens=4)[0]) == "a. b"


class Words:
    """A tokenizer whose tokens are these words, numbered by their places."""

    special_ids = frozenset()
    cleans_up = False

    def __init__(self, words):
        self._words = words

    def is_token(self, token_id):
        return True

    def is_byte(self, token_id):
        return False

    def decode(self, ids, *, skip_special_tokens):
        return "".join(self._words[number] for number in ids)


def stopped_naively(words, stops, min_tokens, *, include_stop):
    """(text, tokens that count): the whole text is looked at after each token."""
    text = ""
    for count, word in enumerate(words, start=1):
        old, text = len(text), text + word
        ends = [(end, -len(stop)) for stop in stops for end in range(old + 1, len(text) + 1) if text[:end].endswith(stop)]
        if ends and count >= min_tokens:
            end, minus_length = min(ends)
            return text[: end if include_stop else end + minus_length], count
    return text, len(words)


@given(
    words=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
    include_stop=st.booleans(),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
@settings(max_examples=examples(500), deadline=None)
def test_an_output_stops_where_a_stop_string_ends_after_min_tokens(words, stops, min_tokens, include_stop, sizes):
    params = {"stop": tuple(stops), "min_tokens": min_tokens, "include_stop": include_stop}
    pieces, count, _ = feed(Words(words), range(len(words)), sizes, **params)
    assert ("".join(pieces), count) == stopped_naively(words, stops, min_tokens, include_stop=include_stop)


@pytest.mark.parametrize(("stop", "text", "count"), [(("e", "kahs"), "wwp", 7), (("p", "ka"), "wwp", 5)])
def test_a_stop_string_may_begin_before_min_tokens(stop, text, count):
    words = "wwpkahsxon"
    pieces, num_tokens, stopped_by = feed(Words(words), range(len(words)), stop=stop, min_tokens=5)
    assert ("".join(pieces), num_tokens, stopped_by) == (text, count, stop[1])


def test_the_token_that_ended_an_output_adds_no_text(made):
    tokenizer = made["byte_level"]
    ids = tokenizer.encode("go!", add_special_tokens=False)
    for include, text in ((False, "go"), (True, "go!")):
        completion = CompletionText(tokenizer, SamplingParams(include_stop=include))
        delta = completion.feed(ids, finished=True, stop_token_id=ids[-1])
        assert (delta.text, delta.num_tokens) == (text, len(ids))


def test_an_output_may_end_without_a_token(made):
    completion = CompletionText(made["byte_fallback"], SamplingParams(stop=("xyz",)))
    assert completion.feed([3 + 0xE2], finished=False).text == ""
    assert completion.feed([], finished=True).text == "\ufffd"


def test_what_is_told_at_the_end_stops_nothing_before_min_tokens(tmp_path):
    tokenizer = Tokenizer.from_folder(save(metaspace(), tmp_path, clean_up_tokenization_spaces=True))
    ids = tokenizer.encode("the quick brown", add_special_tokens=False)
    for min_tokens, text in ((len(ids) + 1, "the quick brown"), (0, "the ")):
        completion = CompletionText(tokenizer, SamplingParams(stop=("quick",), min_tokens=min_tokens))
        assert completion.feed(ids, finished=False).text == ""
        assert completion.feed([], finished=True).text.strip() == text.strip()


@pytest.mark.parametrize("text", ["မြန်မာဘာသာစကားပြောသူများ", "aချ🪶ကམé" * 9, "ཀ" * 50])
def test_long_runs_of_bytes_are_told_in_whole_characters(text, made):
    tokenizer = made["byte_fallback"]
    pieces, _, _ = feed(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize(("prompt", "text"), [("the", " the fox"), ("", "the fox"), ("ཀ", " the fox")])
def test_text_that_goes_on_after_a_prompt_keeps_its_blank(prompt, text, made):
    tokenizer = made["byte_fallback"]
    whole = tokenizer.encode(prompt + text, add_special_tokens=True)
    before = tokenizer.encode(prompt, add_special_tokens=True) if prompt else whole[:1]
    assert whole[: len(before)] == before
    completion = CompletionText(tokenizer, SamplingParams(), after=before[-1:])
    assert "".join(completion.feed([each], finished=False).text for each in whole[len(before) :]) == text


def test_a_run_of_bytes_that_becomes_bad_late_holds_nothing_back(made):
    tokenizer = made["byte_fallback"]
    run = tokenizer.encode("🪶" * 8, add_special_tokens=False)
    after = tokenizer.encode("the fox", add_special_tokens=False) * 5
    pieces, _, _ = feed(tokenizer, [*run, 3 + 0xFF, *after])
    assert all(pieces[len(run) + 1 :])
    assert "".join(pieces) == "🪶" * 8 + "\ufffd" + " the fox" * 5


@pytest.mark.parametrize(("make", "token"), [(byte_level, 100), (byte_level, 255), (byte_fallback, 3 + 0xE2)])
def test_a_token_costs_the_same_however_long_the_output(make, token, tmp_path, monkeypatch):
    tokenizer = Tokenizer.from_folder(save(make(), tmp_path))
    completion = CompletionText(tokenizer, SamplingParams(stop=("never",)))
    decode, lengths = tokenizer.decode, []

    def counted(ids, **options):
        lengths.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)

    def cost(count):
        """Calls of the tokenizer, tokens that it decodes, and characters that are held back."""
        lengths.clear()
        for _ in range(count):
            completion.feed([token], finished=False)
        return len(lengths), sum(lengths), len(completion._stops._held)

    first = cost(500)
    cost(3000)
    assert first[0] > 0
    assert all(late <= 1.2 * early + 100 for early, late in zip(first, cost(500), strict=True))
