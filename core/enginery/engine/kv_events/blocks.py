"""What changes in a tree of prefixes, and the events that say so in vLLM's terms.

A page of the tree holds one block, so hashes are kept by page. A resume point is told as blocks of other groups, those of its
window and the one that its state is behind, each as long as some point has it.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from enginery.contracts.batch import FULL, STATE, WINDOW, MemoryKind
from enginery.engine.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored
from enginery.kv.prefix import TOKEN_TYPECODE

Event = BlockStored | BlockRemoved | AllBlocksCleared


class Group(NamedTuple):
    """A kind of memory, as vLLM tells of it. window: in tokens."""

    place: int | None = None
    kind: str | None = None
    window: int | None = None


def groups_of(*, has_latents: bool, window: int | None, has_states: bool) -> dict[MemoryKind, Group]:
    """By kind of memory; nothing is told of the only one."""
    groups = {FULL: Group(0, "mla_attention" if has_latents else "full_attention")}
    if window is not None:
        groups[WINDOW] = Group(len(groups), "sliding_window", window)
    if has_states:
        groups[STATE] = Group(len(groups), "mamba")
    return groups if len(groups) > 1 else {FULL: Group()}


class Blocks:
    """What is cached, by page and by resume point, as far as it was told. Whatever follows something unknown is left out.

    Each change of the tree gives the events that tell of it.
    """

    def __init__(self, groups: Mapping[MemoryKind, Group], *, page_size: int, medium: str) -> None:
        self._groups, self._page_size, self._medium = groups, page_size, medium
        self._hashes: dict[int, int] = {}
        self._points: dict[int, dict[MemoryKind, list[int]]] = {}
        self._owners: Counter[tuple[MemoryKind, int]] = Counter()  # points that have a block, by its hash

    def stored(self, parent: int | None, tokens: bytes, pages: Sequence[int], salt: str) -> Iterator[Event]:
        """Pages joined the tree behind page `parent`; None: at its root. tokens: as the tree has them."""
        root = None if parent is None else self._hashes.get(parent)
        if root is None and parent is not None:
            return
        made, before, size = list[int](), root, len(tokens) // len(pages)
        for place, page in enumerate(pages):  # the same in every process, for the same tokens from the beginning and the same salt
            begin = salt.encode() if before is None else before.to_bytes(8, "big")
            keyed = hashlib.blake2b(digest_size=8, key=hashlib.blake2b(begin, digest_size=8).digest())
            keyed.update(tokens[place * size : (place + 1) * size])
            before = int.from_bytes(keyed.digest(), "big")
            made.append(before)
            self._hashes[page] = before
        yield self._told(FULL, made, root, tokens, salt)

    def removed(self, pages: Sequence[int]) -> Iterator[Event]:
        """Pages left the tree."""
        yield from self._gone(FULL, [self._hashes.pop(page) for page in reversed(pages) if page in self._hashes])

    def resumable(
        self, number: int, counts: Mapping[MemoryKind, int], tokens: bytes, pages: Sequence[int], salt: str
    ) -> Iterator[Event]:
        """Sequences can go on behind the last of `pages`. counts: of them, how many each kind of memory has, at the end.

        pages: with one more before those, where there is one. tokens: of these pages.
        """
        hashes = [self._hashes[page] for page in pages if page in self._hashes]
        if len(hashes) < len(pages):
            return
        self._points[number] = {kind: hashes[len(hashes) - count :] for kind, count in counts.items()}
        size = len(tokens) // len(hashes)
        for kind, own in self._points[number].items():
            for first, stop in self._fresh(kind, own, len(hashes) - len(own)):
                parent = hashes[first - 1] if first else None
                yield self._told(kind, hashes[first:stop], parent, tokens[first * size : stop * size], salt)
            self._owners.update((kind, each) for each in own)

    def _fresh(self, kind: MemoryKind, own: Sequence[int], before: int) -> Iterator[tuple[int, int]]:
        """From where to where a point's blocks are no other's, counted with the `before` blocks that come first."""
        places = (place for place, each in enumerate(own, before) if not self._owners[kind, each])
        for _, run in itertools.groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
            found = [place for _, place in run]
            yield found[0], found[-1] + 1

    def given_up(self, number: int) -> Iterator[Event]:
        """They cannot any more."""
        for kind, hashes in self._points.pop(number, {}).items():
            self._owners.subtract((kind, each) for each in hashes)
            yield from self._gone(kind, [each for each in reversed(hashes) if not self._owners[kind, each]])

    def cleared(self) -> Iterator[Event]:
        """All pages have left it, or nobody knows which."""
        self._hashes.clear()
        self._points.clear()
        self._owners.clear()
        yield AllBlocksCleared()

    def _told(self, kind: MemoryKind, hashes: list[int], parent: int | None, tokens: bytes, salt: str) -> BlockStored:
        salts: list[list[str] | None] | None = None
        if salt and parent is None:  # as vLLM has it, on the first block: the others follow it
            salts = [[salt], *[None] * (len(hashes) - 1)]
        group = self._groups[kind]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=array(TOKEN_TYPECODE, tokens).tolist(),
            block_size=self._page_size,
            lora_id=None,
            lora_name=None,
            medium=self._medium,
            extra_keys=salts,
            group_idx=group.place,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
        )

    def _gone(self, kind: MemoryKind, hashes: list[int]) -> Iterator[BlockRemoved]:
        for each in hashes:
            del self._owners[kind, each]
        if hashes:
            yield BlockRemoved(block_hashes=hashes, medium=self._medium, group_idx=self._groups[kind].place)
