"""Structured output: what a request may ask its answer to be, and what a plugin that compiles grammars offers.

V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from enginery.contracts.versions import ApiVersion
from enginery.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from enginery.contracts.attention import Reason

MAX_SOURCE_BYTES: Final = 1 << 18


class GrammarKind(StrEnum):
    """How a grammar is written down. GRAMMAR: in the notation of the plugin's library. CHOICE: a JSON list of texts."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What the whole answer must be. source: the schema as JSON text, the pattern, the grammar, or the list; empty for JSON_OBJECT.

    lenient: what a compiler cannot say of a JSON schema is left out, not refused. Raises `RequestError` for a source that is too
    long; what it says is checked when it is compiled.
    """

    kind: GrammarKind
    source: str = ""
    lenient: bool = False

    def __post_init__(self) -> None:
        try:
            num_bytes = len(self.source.encode())
        except UnicodeError as error:
            raise RequestError(f"the {self.kind} holds half a surrogate pair, which is no Unicode text", param="grammar") from error
        if num_bytes > MAX_SOURCE_BYTES:
            message = f"the {self.kind} has {num_bytes:,} bytes, but at most {MAX_SOURCE_BYTES:,} are compiled; shorten it"
            raise RequestError(message, param="grammar")


@dataclass(frozen=True, kw_only=True)
class GrammarNeeds:
    """What a compiler is asked for. num_eos: how many tokens end an answer."""

    kind: GrammarKind
    vocab_size: int
    num_eos: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GrammarTokens:
    """A vocabulary as a compiler sees it. tokens: the bytes that each of V tokens adds to a text, none for an id without a token.

    special_ids: tokens that are no text, whatever their bytes. eos_token_ids: the ones that end an answer. encode: the model's own
    way to spell a text; may put a space before it, and takes the names of special tokens for these.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    @property
    def vocab_size(self) -> int:
        """The number of token ids: V."""
        return len(self.tokens)


class GrammarState(Protocol):
    """How far one answer has come. It outlives preemptions: only tokens that were published have been accepted."""

    def fill_mask(self, row: np.ndarray) -> None:
        """Set the bits of the tokens that may come next, clear the others. row: [ceil(V / 32)] int32, the lowest bit first.

        The end-of-sequence tokens are among them where the answer may end. Called on the step loop, but while the device works.
        Raises `RequestError` when the grammar goes beyond a limit here.
        """

    def accept(self, token_id: int) -> bool:
        """Take the answer's next token. False: the grammar does not allow it."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow but the end."""


@runtime_checkable
class RevocableGrammarState(GrammarState, Protocol):
    """A state that can go back: it may be asked about tokens that are only guessed. Requests with others are not drafted."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens that were accepted, and what went wrong since: nothing of them remains.

        count: may be 0. A token that `accept` refused and a `fill_mask` that raised behind these tokens are forgotten, too.
        """


class CompiledGrammar(Protocol):
    """A grammar, ready for any number of answers."""

    def start(self) -> GrammarState:
        """The state of an answer that is still empty. Quick: called on the step loop."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnfinishedGrammar:
    """A grammar that takes longer than a moment to compile.

    finish: the rest of the work, called on one of the few threads that are for such, when its turn has come. Raises as `compile`.
    """

    finish: Callable[[], CompiledGrammar]


class GrammarCompiler(Protocol):
    """Compiles for one vocabulary. Several threads call it at once."""

    def compile(self, grammar: Grammar) -> CompiledGrammar | UnfinishedGrammar:
        """On a thread with a large stack; lets other threads run meanwhile. What takes long should be left unfinished.

        Raises `RequestError` that says what is wrong with the grammar: invalid, not supported, never satisfied or too large; and
        `Overloaded` where it is not to blame.
        """


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """A compiler of structured-output grammars on offer.

    The one of highest priority that has the kind and refuses nothing is used. refuse: pure. load: imports what is heavy; called
    once, before a server is ready, or on a thread of its own at the first request that needs it.
    """

    name: str
    api: ApiVersion
    priority: int
    summary: str
    kinds: frozenset[GrammarKind]
    refuse: Callable[[GrammarNeeds], list[Reason]]
    load: Callable[[GrammarTokens], GrammarCompiler]
