"""Which beginnings of prompts a replica was sent: a guess, in the front, at what its prefix cache has."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

_FEWEST_TOKENS = 64  # of a block: hashing 32,768 tokens takes less than a millisecond


def block_tokens(page_size: int) -> int:
    """Tokens of a block: whole pages, as the prefix cache has them."""
    return page_size * -(-_FEWEST_TOKENS // page_size)


def block_hashes(token_ids: Sequence[int], salt: str, *, size: int) -> list[bytes]:
    """Of each whole block of a prompt, with all that stands before it and the salt."""
    tokens, found = array("i", token_ids).tobytes(), list[bytes]()
    before, size = hashlib.blake2b(salt.encode(), digest_size=16).digest(), size * array("i").itemsize
    for end in range(size, len(tokens) + 1, size):
        before = hashlib.blake2b(tokens[end - size : end], digest_size=16, key=before).digest()
        found.append(before)
    return found


class SentPrefixes:
    """The blocks of prompts that one replica was sent."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks it was sent, from the first on."""
        return next((place for place, each in enumerate(hashes) if each not in self._blocks), len(hashes))

    def add(self, hashes: Sequence[bytes], *, most: int) -> None:
        """Note a prompt that is sent. Of more blocks than `most` those that were used least recently are forgotten.

        A prompt's end is forgotten before its beginning.
        """
        for each in reversed(hashes[:most]):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._blocks.clear()
