"""One step as a value: what a rank needs to run it, as numbers, and what came of it.

    scheduler ── StepInput ──> worker (one a rank) ── StepOutput ──> scheduler

No request, grammar or tokenizer is in it, so a step can be packed, sent, stored and run again. Fields are only added, each with a
default; a stored step carries `STORED_VERSION` of its file. B items, S items that sample, T tokens.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec
import numpy as np

from enginery.contracts.batch import Phase
from enginery.contracts.request import SamplingParams, TokenLogprob

STORED_VERSION: Final = 1  # of a file of steps
INT: Final = np.dtype("<i4")  # of all packed numbers
_pack_params: Final = struct.Struct("<4dQ").pack


class Way(StrEnum):
    """How a step runs. GRAPH: one captured graph of a decoding step. PIECES: captured between the calls of attention."""

    EAGER = "eager"
    GRAPH = "graph"
    PIECES = "pieces"


class Run(msgspec.Struct, frozen=True, array_like=True):
    """The way a step runs, decided once for all ranks.

    size: of the graph, in requests, or of the pieces, in tokens; 0 where it runs eagerly. greedy: each token that is sampled is
    that of the largest logit. tokens_only: and nothing else is asked of the logits.
    """

    way: Way = Way.EAGER
    size: int = 0
    greedy: bool = False
    tokens_only: bool = False


class RunSizes(NamedTuple):
    """The sizes that a worker has graphs and pieces of, the smallest first; it captures one when that is first needed.

    verified_rows: of a captured step that verifies drafts, at the most; 0: such steps run eagerly. combs: whether drafts that
    branch are combs, and captured as well. followed: whether graphs are also of steps that a draft model follows.
    """

    graphs: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()
    verified_rows: int = 0
    combs: bool = False
    followed: bool = True


NO_SIZES: Final = RunSizes()  # every step runs eagerly


class Item(NamedTuple):
    """One request's part in a step: its tokens `start .. start + num_tokens - 1`. Of a whole step, each is an array [B] int32.

    seat: the index of a running request, 0 .. the largest number of requests - 1. first_write: the first position whose keys and
    values are written; rows before it have them in a shared page already and write to scratch. num_logits: how many of its last
    rows need logits. samples: whether its last row yields a token (with drafts: its last 1 + num_drafts rows do). num_drafts: its
    last tokens that are guesses. pending: its last tokens that the host does not know, but the device: from its previous item, in
    a step that is still in flight, or guesses that a draft model left there. adapter: its slot; -1 for none.
    """

    seat: int
    start: int
    num_tokens: int
    first_write: int
    num_logits: int
    samples: int
    num_drafts: int = 0
    pending: int = 0
    adapter: int = -1


class Items(NamedTuple):
    """The items of a step by column: each [B] int32, as `Item` explains them."""

    seat: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    first_write: np.ndarray
    num_logits: np.ndarray
    samples: np.ndarray
    num_drafts: np.ndarray
    pending: np.ndarray
    adapter: np.ndarray


class NewPages(msgspec.Struct, frozen=True, array_like=True):
    """What changes in the page tables of one kind of memory before a step.

    rows: [R, 4] int32: seat, first column, drop before column, count; the pages of a row go to its columns from the first on, and
    what lies before the other column is given up. A first column of 0 begins a request anew. pages: int32, those of all rows.
    """

    rows: bytes
    pages: bytes


class StepInput(msgspec.Struct, frozen=True, kw_only=True, eq=False, omit_defaults=True, dict=True):
    """Everything that a rank needs to run one step. Numbers are packed as int32, little-endian.

    number: consecutive; a worker refuses any other. padded: requests and tokens that the step is padded to. num_decode: leading
    items that decode, the others are at their prompts. items: [B, 9], see `Item`. input_ids: the tokens that the host knows, of all
    items, one after the other. pages: by kind of memory. states: [B, 4], of recurrent layers: page read, page written, page of a
    checkpoint or -1, and after how many rows it is made, of items that verify drafts; empty: each request's state is at its seat.
    released: seats whose requests have left. embedding: items whose last hidden state is asked for. parents: where drafts branch,
    of each draft of the leading items the row of its item that it follows, 0 for the first. inputs: what only one model or plugin
    knows, by the name of its `NamedTensor`, in its dtype; what is not there is zeros. decode_len: rows of each of the leading items
    in a step that verifies drafts; what an item has fewer is padding behind its tokens, in scratch memory. draft_len: how many
    tokens a draft model guesses to follow. behind: how many positions before its `start` an item may begin, at the most: one for
    each guess of its previous item that was wrong, which the device alone knows. lanes: what each lane runs, all with one number,
    run and padding; the items are then those of all, see `together`, and what is not there is in the lanes' alone.
    """

    number: int
    phase: Phase
    run: Run = Run()
    padded: tuple[int, int] = (0, 0)
    num_decode: int = 0
    items: bytes = b""
    input_ids: bytes = b""
    pages: dict[str, NewPages] = {}
    states: bytes = b""
    released: bytes = b""
    embedding: bytes = b""
    parents: bytes = b""
    inputs: dict[str, bytes] = {}
    decode_len: int = 1
    draft_len: int = 0
    behind: int = 0
    lanes: tuple[StepInput, ...] = ()

    def of_lane(self, lane: int) -> StepInput:
        """What one of the lanes runs; where there is one, this."""
        return self.lanes[lane] if self.lanes else self

    @functools.cached_property
    def lane_places(self) -> list[np.ndarray]:
        """Of each lane, where its items are among those of all: [B] int64 each."""
        is_prompt = [np.arange(step.num_items) >= step.num_decode for step in self.lanes]
        places = np.argsort(np.argsort(np.concatenate(is_prompt), kind="stable"), kind="stable")
        return np.split(places, np.cumsum([step.num_items for step in self.lanes])[:-1])

    @property
    def num_items(self) -> int:
        """The requests of the step: B."""
        return len(self.items) // ITEM_BYTES

    @functools.cached_property
    def num_tokens(self) -> int:
        """The rows of the step without padding: T."""
        return sum(self.columns().num_tokens.tolist())  # not NumPy's: its code is in no cache behind a step's weights

    @functools.cached_property
    def sampling(self) -> np.ndarray:
        """The items whose last row yields a token, or rows if they have drafts: [S] int64."""
        return self.columns().samples.nonzero()[0]

    @functools.cached_property
    def sampled_rows(self) -> np.ndarray:
        """How many rows of each of these items are sampled, those of padding too: [S] int64."""
        return np.where(self.sampling < self.num_decode, self.decode_len, 1)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """How many rows each item has, those of padding too: [B] int32."""
        num_tokens = self.columns().num_tokens
        if not self.verifies:
            return num_tokens
        rows: np.ndarray = num_tokens.copy()
        rows[: self.num_decode] = self.decode_len
        return rows

    @functools.cached_property
    def row_places(self) -> np.ndarray:
        """Of each row its place in its item: [T] int64, with those of padding."""
        rows = self.rows
        ends: np.ndarray = rows.cumsum(dtype=np.int64)
        places: np.ndarray = np.arange(int(ends[-1]) if len(ends) else 0) - (ends - rows).repeat(rows)
        return places

    @property
    def verifies(self) -> bool:
        """Whether it has drafts."""
        return self.decode_len > 1

    def columns(self) -> Items:
        """Its items by column, read once; not to be written to."""
        return self._columns

    @functools.cached_property
    def _columns(self) -> Items:
        return Items(*np.frombuffer(self.items, INT).reshape(-1, len(Items._fields)).T.copy())

    def each(self) -> list[Item]:
        """Its items one by one."""
        return [Item(*row) for row in np.frombuffer(self.items, INT).reshape(-1, len(Items._fields)).tolist()]


ITEM_BYTES: Final = 4 * len(Item._fields)


def together(lanes: Sequence[StepInput]) -> StepInput:
    """The step of these lanes: the items that decode of each lane in turn, then those at their prompts."""
    first, count = lanes[0], sum(step.num_items for step in lanes)
    step = StepInput(
        number=first.number,
        phase=phase_of([step.phase for step in lanes]),
        run=first.run,
        padded=first.padded,
        num_decode=sum(step.num_decode for step in lanes),
        lanes=tuple(lanes),
    )
    items, embedding = np.empty((count, len(Item._fields)), INT), []
    for lane, places in zip(lanes, step.lane_places, strict=True):
        items[places] = np.frombuffer(lane.items, INT).reshape(-1, len(Item._fields))
        embedding.append(places[np.frombuffer(lane.embedding, INT)].astype(INT))
    return msgspec.structs.replace(step, items=items.tobytes(), embedding=np.concatenate(embedding).tobytes())


def phase_of(phases: Iterable[Phase]) -> Phase:
    """Of a step whose lanes are in these."""
    found = set(phases) - {Phase.IDLE}
    return Phase.MIXED if len(found) > 1 else next(iter(found), Phase.IDLE)


def pack(step: StepInput) -> bytes:
    """The step as msgpack; of lanes, theirs."""
    return msgspec.msgpack.encode(step.lanes or step)


def unpack(packed: bytes) -> StepInput:
    """The step that `pack` was given. Raises `msgspec.DecodeError` for anything else."""
    found = msgspec.msgpack.decode(packed, type=StepInput | list[StepInput])
    return found if isinstance(found, StepInput) else together(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Entries:
    """Single logits of some rows, each at most once. at: [2, E] int64, row and token. values: [E] float64."""

    at: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptTargets:
    """The tokens that follow the rows of one item, whose log-probabilities are asked for, with the `num_top` likeliest of each."""

    token_ids: np.ndarray
    num_top: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingInput:
    """How the S rows of a step that sample are sampled. Kept by the process that has the logits; not part of the packed step.

    params: [4, S] float64, temperature, top_k, top_p, min_p. seeds, positions: [S] uint64; a row's random number is theirs alone.
    repetition: logits to be divided or multiplied by a penalty (arXiv:1909.05858). penalties: what presence and frequency take off,
    counted. biases: added. forbidden: never sampled. All are applied in this order. mask: [S, ceil(V / 32)] int32, the lowest bit
    first: tokens that may be sampled; None for all. num_top: of each row how many alternatives are reported beside its token, -1
    for no log-probability. prompts: by item. adjusts: whether anything but params and seeds changes a row's choice.
    """

    params: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    repetition: Entries | None = None
    penalties: Entries | None = None
    biases: Entries | None = None
    forbidden: Entries | None = None
    mask: np.ndarray | None = None
    num_top: tuple[int, ...] = ()
    prompts: Mapping[int, PromptTargets]

    @property
    def adjusts(self) -> bool:
        """Whether a logit is changed before a token is chosen."""
        parts = (self.repetition, self.penalties, self.biases, self.forbidden, self.mask)
        return any(part is not None for part in parts)


def pack_params(params: SamplingParams) -> bytes:
    """How a request's tokens are drawn: temperature, top_k, top_p, min_p as float64, its seed modulo 2^64; little-endian."""
    return _pack_params(params.temperature, params.top_k, params.top_p, params.min_p, (params.seed or 0) % 2**64)


def unpack_params(packed: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The `params` and `seeds` of a `SamplingInput`, of S rows as `pack_params` gives them: joined, as a step has hundreds."""
    joined = b"".join(packed)
    return np.frombuffer(joined, "<f8").reshape(-1, 5)[:, :4].T, np.frombuffer(joined, "<u8")[4::5]


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """When the host was done with each part of a step, by `time.perf_counter`. arrived_s: when its tokens were there, for which it
    waited from `waited_from_s` on."""

    laid_out_s: float
    planned_s: float
    launched_s: float
    arrived_s: float
    waited_from_s: float = 0.0


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a step gave, item by item.

    token_ids: none after a chunk that does not end the prompt, one, or several. logprobs: of these tokens, where they are asked
    for; empty if no item asks. prompt_logprobs: by item, of the tokens that follow the rows of its chunk. embeddings: by item,
    [hidden size]. failed: items whose tokens mean nothing, and why.
    """

    number: int
    token_ids: list[tuple[int, ...]]
    logprobs: dict[int, tuple[TokenLogprob, ...]]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    embeddings: dict[int, tuple[float, ...]]
    failed: dict[int, str]
    captured: bool
    times: StepTimes
