"""Documents: conversations in the chat template's form, and plain texts; which are held out; and shards of their tokens.

Held out is a twentieth of all contents, by a hash of their keys: stories of certain plans, sums of certain pairs, certain
records. Training never sees them in any wording; evaluation sees only them. A shard depends on its seed and number alone.
"""

from __future__ import annotations

import multiprocessing
import re
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from tiny import dialogue, story_talk, tasks
from tiny.facts import FACTS, SENTENCES
from tiny.stories import STORIES
from tiny.tasks import Exchange

BEGIN, END, TURN, DONE = "<|begin|>", "<|end|>", "<|turn|>", "<|done|>"
SHARD_TOKENS: Final = 1 << 20
STOP: Final = "stop"  # a file of this name among the shards: no more are needed
HELD_OUT: Final = 20  # one in so many
Maker = Callable[[Random], Exchange]

# kind of exchange: how often, who makes it
MAKERS: Final[dict[str, tuple[float, Maker]]] = {
    "arithmetic": (0.32, tasks.arithmetic),
    "engine": (0.24, lambda random: Exchange(*random.choice(FACTS).exchange(random))),
    "json": (0.15, tasks.record),
    "list": (0.05, tasks.listing),
    "sequence": (0.06, tasks.sequence),
    "small fact": (0.07, tasks.small_fact),
    "talk": (0.10, dialogue.talk),
    "refusal": (0.08, dialogue.refusal),
}
KINDS: Final = list(MAKERS)
UP_TO: Final = list(accumulate(weight for weight, _ in MAKERS.values()))
CASUAL: Final = {"engine", "talk", "refusal", "small fact", "list"}  # where how it is typed does not matter
SYSTEM: Final = (
    "You are a helpful assistant.",
    "You are the model embedded in Enginery.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in short sentences.",
    "Be friendly.",
    "You are an assistant.",
)


def held_out(key: str) -> bool:
    """Whether this content is for evaluation."""
    return not key.startswith("table/") and zlib.crc32(key.encode()) % HELD_OUT == 0


def drawn(random: Random, maker: Maker, *, held: bool) -> Exchange:
    """An exchange of the part that is asked for."""
    while held_out((exchange := maker(random)).key) is not held:
        pass
    return exchange


def story_plan(random: Random, *, held: bool) -> dict[str, str]:
    """A plan of the part that is asked for."""
    while held_out(STORIES.key(plan := STORIES.plan(random))) is not held:
        pass
    return plan


def casual(random: Random, text: str) -> str:
    """As people type: sometimes without capitals or the last mark."""
    form = random.random()
    if form < 0.15:
        return text.lower()
    if form < 0.25:
        return text.rstrip("?.!") or text
    return text.lower().rstrip("?.!") or text if form < 0.32 else text


def exchanges(random: Random, *, held: bool) -> list[Exchange]:
    """What belongs together: a story with its questions, or one exchange."""
    form = random.random()
    if form < 0.14:
        return story_talk.story(random, story_plan(random, held=held))
    if form < 0.18:
        return story_talk.reading(random, story_plan(random, held=held))
    (kind,) = random.choices(KINDS, cum_weights=UP_TO)
    exchange = drawn(random, MAKERS[kind][1], held=held)
    return [exchange._replace(asked=casual(random, exchange.asked)) if kind in CASUAL else exchange]


def prompt(turns: list[tuple[str, str]]) -> str:
    """The chat template's text for turns of role and content, up to where the assistant answers."""
    return BEGIN + "".join(f"{TURN}{role}\n{content}{DONE}\n" for role, content in turns) + f"{TURN}assistant\n"


def conversation(random: Random, *, held: bool) -> str:
    """One to eight exchanges, with a system message or without."""
    turns = [("system", random.choice(SYSTEM))] if random.random() < 0.15 else []
    length = random.choice((1, 1, 1, 1, 1, 2, 2, 3, 4, 8))
    talks: list[Exchange] = []
    if length > 1 and random.random() < 0.3:
        talks.append(drawn(random, lambda random: dialogue.talk(random, "hello"), held=held))
    while len(talks) < length:
        talks += exchanges(random, held=held)
    for _, asked, answered in talks:
        turns += [("user", asked), ("assistant", answered)]
    *before, (_, last) = turns
    return f"{prompt(before)}{last}{DONE}\n"


def plain(random: Random, *, held: bool) -> str:
    """Text without turns, for plain continuation: a story, or sentences about the engine."""
    if random.random() < 0.75:
        text = STORIES.write(random, story_plan(random, held=held))
    else:
        known = [drawn(random, MAKERS["engine"][1], held=held).answered for _ in range(random.randint(1, 3))]
        own = [each.write(random.random, {}) for each in random.sample(SENTENCES, random.randint(1, 4))]
        text = " ".join(own + [each if each.endswith(".") else f"{each}." for each in known])
    return f"{BEGIN}{text}{END}"


def documents(seed: str, *, held: bool = False) -> Iterator[str]:
    """Documents without end."""
    random = Random(f"{seed}/{'held out' if held else 'training'}")
    while True:
        yield plain(random, held=held) if random.random() < 0.15 else conversation(random, held=held)


class Encoder:
    """`Tokenizer.encode` for our documents, several times as fast: words are looked up, and only new ones are merged."""

    # How the pre-tokenizer cuts ASCII text: special tokens, single digits, words with the space before them, marks, blanks.
    PIECES: Final = re.compile(
        r"<\|\w+\|>|\d|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?(?:(?!<\|\w+\|>)[^\sA-Za-z\d])+|\s+(?=\s|\d|<\|\w+\|>|\Z)|\s+"
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of ASCII text."""
        known, ids = self.known, []
        for piece in self.PIECES.findall(text):
            found = known.get(piece)
            if found is None:
                found = known[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += found
        return ids


def shard(
    seed: int, number: int, encoder: Encoder, *, held: bool = False, size: int = SHARD_TOKENS
) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """`size` tokens of documents, one after the other; the last is cut off."""
    source = documents(f"{seed}/{number}", held=held)
    ids: list[int] = []
    while len(ids) < size:
        ids += encoder.encode(next(source))
    return np.array(ids[:size], dtype=np.uint16)


@lru_cache
def encoder_of(tokenizer: Path) -> Encoder:
    """One a process, so that it keeps its words."""
    return Encoder(Tokenizer.from_file(str(tokenizer)))


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.npy"


def _write(arguments: tuple[int, int, int, Path, Path]) -> int:
    seed, number, size, tokenizer, folder = arguments
    if (folder / STOP).exists():
        return number
    partial = folder / f"{number:05}.partial.npy"
    np.save(partial, shard(seed, number, encoder_of(tokenizer), size=size))
    partial.rename(shard_path(folder, number))  # readers see whole shards only
    return number


def write_shards(folder: Path, tokenizer: Path, *, seed: int, count: int, processes: int, size: int = SHARD_TOKENS) -> None:
    """Shards 0 to `count` of training text, in order, by that many processes."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = [(seed, number, size, tokenizer, folder) for number in range(count)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for _ in pool.imap_unordered(_write, asked):
            pass
