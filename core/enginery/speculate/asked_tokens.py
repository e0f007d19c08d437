"""A request's tokens as a drafter sees them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload


class AskedTokens(Sequence[int]):
    """The request's own array, as it grows, of which nothing is copied. Who keeps or tries to change this does it no harm.

    It has no buffer: numpy's view of an array makes it one that cannot grow. A slice is a copy, with a buffer of its own.
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return self._tokens[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def __repr__(self) -> str:
        return f"AskedTokens({list(self._tokens)})"
