"""Objects that are costly to make and that one owner has at a time.

    pool      [ free, the longest free first ]
    plan ---> lease ---> item       when nobody has the lease any more, its item is free again

FlashInfer's wrappers keep what was planned, but plans here are values: any number of them may be alive, and each is run as it was
made. So a plan owns the wrappers that it was planned in until it is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Reusable(Protocol):
    """What a pool has."""

    def is_pending(self) -> bool:
        """Whether the device has yet to read what the item's last owner left on the host."""
        ...


ItemT = TypeVar("ItemT", bound=Reusable)


class Lease(Generic[ItemT]):
    """The right to use `item`, for as long as the lease is referred to."""

    __slots__ = ("__weakref__", "item")

    def __init__(self, item: ItemT) -> None:
        self.item = item


class Pool(Generic[ItemT]):
    """make: a new item. spare: free items that the GPU may still use before one of them is taken and waited for."""

    def __init__(self, make: Callable[[], ItemT], *, spare: int = 3) -> None:
        self._make = make
        self._spare = spare
        self._free: list[ItemT] = []

    def lease(self) -> Lease[ItemT]:
        """An item that is not pending if there is one, or a new one."""
        free = self._free
        index = next((index for index, item in enumerate(free) if not item.is_pending()), None)
        if index is None and len(free) > self._spare:
            index = 0
        lease = Lease(self._make() if index is None else free.pop(index))
        weakref.finalize(lease, free.append, lease.item).atexit = False
        return lease
