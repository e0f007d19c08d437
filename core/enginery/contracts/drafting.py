"""What a drafter is: it guesses a request's next tokens, and the target verifies them. A wrong guess costs time, never a token.

A host drafter guesses from the tokens of a request alone, in host memory. A draft model is a model on the device with layers, keys
and values of its own: it follows every step of the target, and then guesses one token after another. Guesses are put into the next
decoding step, so a drafter is asked when the step before has been told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, overload, runtime_checkable

from enginery.contracts.model import Feature, Model, ModelFacts, ModelSpec
from enginery.contracts.versions import ApiVersion

if TYPE_CHECKING:
    import torch

FEATURES: Final = "features"  # what a draft model that takes them finds in `arrived` for rows that the target has run over
CARRIED: Final = "carried"  # and for rows behind those, what it returned for the row before
MOST_SIBLINGS: Final = 32
ON_DEVICE: Final = -1  # in place of a guess that the host has not read


class DraftAsk(NamedTuple):
    """What a drafter is asked. key: of the request, until `forget`.

    token_ids: all of its tokens, prompt and answer: a sequence that nobody can change, and that grows; do not keep it. A slice is a
    copy. most: how many tokens are wanted, at least one. salt: the request's `cache_salt`: what it is told may show, by its timing,
    in answers to equal salts alone.
    """

    key: str
    token_ids: Sequence[int]
    most: int
    salt: str = ""


@dataclass(frozen=True)
class DraftTree(Sequence[int]):
    """Guesses that branch: a drafter may return one in place of a sequence, if its `DrafterSpec.trees` says so.

        tokens    4   7   9   5   6        the request goes on with 4 7 9, 4 7 5 or 6
        parents  -1   0   1   1  -1

    tokens: each a row of the verification. parents: of each token the place of the one before it, which comes earlier; -1: the
    request's last token. Its first tokens alone are a tree, too: it is cut off behind `most`, and where there is no room. Raises
    ValueError where a parent does not come earlier.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not all(-1 <= parent < at for at, parent in enumerate(self.parents)):
            raise ValueError(f"{self} is no tree: each token needs a parent that comes before it, or -1")

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> DraftTree: ...

    def __getitem__(self, at: int | slice) -> int | DraftTree:
        """One token, or the tree of its first ones."""
        return DraftTree(self.tokens[at], self.parents[at]) if isinstance(at, slice) else self.tokens[at]

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))


class HostDrafter(Protocol):
    """One for the engine. Only the step loop calls it, between two steps: the device waits for it where it has found guesses."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        """The tokens that each request may go on with, one sequence for each ask: `most` at most, empty where there is no guess.

        What is no token of the vocabulary ends a guess, with one warning. A `DraftTree` is several guesses at once. Between two
        calls with one key its tokens only grow, so an index can take in what is new. A request is not asked about before every
        step: not amid its prompt, and not while it waits. Guesses may be dropped: what follows later tokens is asked anew.
        """

    def forget(self, key: str) -> None:
        """The request has ended. Unknown keys are ignored."""


@runtime_checkable
class MappedVocabulary(Protocol):
    """A draft model whose logits are of a vocabulary of its own.

    target_ids: [V'] int64, the target's token for each of its own; None: the same.
    """

    target_ids: torch.Tensor | None


@runtime_checkable
class Chained(Protocol):
    """A draft model of several modules, the first of them itself: see `DrafterSpec.modules`."""

    modules: Sequence[Model]


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftContext:
    """What a drafter is built from.

    vocab_size: of the model that verifies; token ids are below it. options: an instance of the descriptor's dataclass of options,
    None if it has none.
    """

    vocab_size: int
    options: object = None


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """What `-o NAME.field=value` sets of every draft model whose descriptor has no options of its own.

    trees: beside each guess the `siblings` likeliest other tokens are verified, so a guess that is nearly right costs less. Each
    costs a row of the verification and no step of the draft model. Raises ValueError for none, or more than `MOST_SIBLINGS`.
    """

    trees: bool = False
    siblings: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.siblings <= MOST_SIBLINGS:
            raise ValueError(f"siblings is {self.siblings}; take 1 to {MOST_SIBLINGS}, or leave trees out")
        if self.siblings > 1 and not self.trees:
            raise ValueError(f"siblings is {self.siblings}, but only trees have them; set trees=true too, or leave siblings out")

    @property
    def num_siblings(self) -> int:
        """Beside each guess: none unless trees are asked for."""
        return self.siblings if self.trees else 0


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """A drafter on offer, used if `--drafter` names it: of the host (`build`), or a model (`model`, `stands_alone`), one of these.

    most: drafts of a request in one step that it is good for; `--draft-length` may not be above. build: called once, when the
    engine starts; imports what is heavy. options: a frozen dataclass of what `-o NAME.key=value` sets; None: it has none, or as a
    model those of every one (`DraftModelOptions`).

    model: of the checkpoint that `--draft-model` names; its build finds the model that verifies in `ModelContext.target`.
    suits: given the target's config.json, whether `model` is a part of the target's own checkpoint; then there is no other to name,
    and plugins may share the drafter's name for models of different architectures. stands_alone: the checkpoint may be of any
    family, which is built as it always is.

    takes_features: each of its rows is the target's hidden state at a position, `arrived[FEATURES]` [T, F * C], with the token that
    comes next; what it returns, [T, C'], stands for the hidden state at that next position: `arrived[CARRIED]` of the next guess.
    Else a row is a token, as the target takes it. Either way its logits, from what it returned, are of the token after. features:
    given its config.json and the target's facts, which hidden states these are; None: the one after the last norm. It may raise
    `CheckpointError` for a target that it is not made for. modules: given its config.json, of how many it is a chain (`Chained`).
    Each of several guesses one token and no more: it is given the token behind that of the one before, and in `CARRIED` what that
    one returned, for all rows. A single one guesses again by what it returned.

    trees: given its options, whether a drafter of the host gives trees; None: never. Then the start is refused where the target's
    layers or its attention backend verify chains alone.

    reads: given its config.json and the target's facts, which of the target's layers with memory, by their place in
    `ModelFacts.layers`, each of its own reads. It has no keys and values then and runs over no step: a row is the token that was
    told last, at its position, in `FEATURES` what the target computed before it, and its `attend` sees the keys and values before
    it. For further guesses the position stays. Raises TypeError for several kinds or none.
    """

    name: str
    api: ApiVersion
    summary: str
    most: int
    build: Callable[[DraftContext], HostDrafter] | None = None
    model: ModelSpec | None = None
    stands_alone: bool = False
    takes_features: bool = False
    features: Callable[[Mapping[str, object], ModelFacts], tuple[Feature, ...]] | None = None
    suits: Callable[[Mapping[str, object]], bool] | None = None
    modules: Callable[[Mapping[str, object]], int] | None = None
    reads: Callable[[Mapping[str, object], ModelFacts], tuple[int, ...]] | None = None
    trees: Callable[[object], bool] | None = None
    options: type | None = None

    def __post_init__(self) -> None:
        if (self.build is not None) + self.is_model != 1 or (self.model is not None and self.stands_alone):
            raise TypeError(f"drafter {self.name!r} needs build, for one of the host, or else model or stands_alone")

    @property
    def is_model(self) -> bool:
        """Whether it is a model on the device."""
        return self.model is not None or self.stands_alone
