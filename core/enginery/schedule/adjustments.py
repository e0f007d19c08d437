"""What changes the logits of one request's next token, as arrays that are made once, or kept up to date as its tokens come."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np

from enginery.contracts.request import SamplingParams


class Adjustments:
    """Of one request, which asks for `params`.

    seen, told: what it has had, prompt and output, and of its output alone.
    """

    def __init__(self, params: SamplingParams, token_ids: array[int], num_prompt_tokens: int) -> None:
        """token_ids: its own array, which only grows; never written here."""
        self.params: Final = params
        self.num_prompt_tokens: Final = num_prompt_tokens
        self.seen = TokenCounts(token_ids, 0)
        self.told = TokenCounts(token_ids, num_prompt_tokens)
        self._ends: np.ndarray | None = None

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of its `logit_bias`, int64, and what is added, float64."""
        bias = self.params.logit_bias
        return np.array([*bias], np.int64), np.array([*bias.values()], np.float64)

    def ends(self, eos_token_ids: frozenset[int]) -> np.ndarray:
        """The different tokens that end it, int64. eos_token_ids: the model's, the same in each call."""
        if self._ends is None:
            ends = {*self.params.stop_token_ids} if self.params.ignore_eos else {*self.params.stop_token_ids, *eos_token_ids}
            self._ends = np.array(sorted(ends), np.int64)
        return self._ends


class TokenCounts:
    """The different tokens of a request from one place on, D of them, and how often each came. A step counts what is new.

    What is asked for with drafts is as if they had been told, and is not kept.
    """

    def __init__(self, token_ids: array[int], first: int) -> None:
        self._token_ids, self._next = token_ids, first
        self._places: dict[int, int] = {}
        self._tokens, self._counts = array("q"), array("q")

    def tokens(self, drafts: Sequence[int]) -> np.ndarray:
        """Each of them once, in the order in which they first came: [D] int64."""
        self._take_in()
        return np.append(self._tokens, np.array([*self._new(drafts)], np.int64)) if drafts else np.array(self._tokens)

    def counts(self, drafts: Sequence[int]) -> np.ndarray:
        """How often each of `tokens` came, in their order: [D] int64."""
        self._take_in()
        if not drafts:
            return np.array(self._counts)
        counts = np.append(self._counts, np.array([*self._new(drafts).values()], np.int64))
        np.add.at(counts, [self._places[token] for token in drafts if token in self._places], 1)
        return counts

    def _take_in(self) -> None:
        if self._next == len(self._token_ids):
            return
        new = self._token_ids[self._next :]
        for token, count in Counter(new).items() if len(new) > 1 else ((new[0], 1),):
            place = self._places.setdefault(token, len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(token)
                self._counts.append(0)
            self._counts[place] += count
        self._next = len(self._token_ids)

    def _new(self, drafts: Sequence[int]) -> Counter[int]:
        return Counter(token for token in drafts if token not in self._places)
