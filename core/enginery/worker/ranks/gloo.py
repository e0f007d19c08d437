"""How processes exchange tensors in host memory, and where they meet. Tensors of GPUs go another way: see `nccl`.

Groups are objects here, not the process's default: one process may have several engines. They meet through a file, and talk over
the loopback interface alone; over hosts, through a TCPStore, at the interface that leads to the first rank. Neither of these asks
who it talks to. N rows, C columns, R ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroup, Store, TCPStore, Work

from enginery.contracts.ops import HostCalls
from enginery.errors import EnginError

LOOPBACK: Final = "127.0.0.1"
MeetingStore: TypeAlias = Store
Sending = tuple[torch.Tensor, Work]  # on its way; the tensor lives until it has arrived
_DESCRIPTORS: Final = "/proc/self/fd"
_TCP: Final = "tcp://"
_MEETING: Final = datetime.timedelta(minutes=1)
FOR_EVER: Final = datetime.timedelta(days=365)  # whether an exchange hangs is decided by those that watch the processes
_LOOK: Final = datetime.timedelta(seconds=1)  # after so long who waits looks whether exchanges have been ended
FIRST: Final = 0
TAG: Final = 0


class LostRank(EnginError):
    """An exchange failed, because another rank is gone. Who is, and why, is known to those that watch the processes."""


class Standing:
    """What a process does, for its heartbeat. waits: the exchange that it is in; empty: it is at work of its own.

    phase: of its start, or idle, or step. number: of the last step that it has finished. is_severed: exchanges were ended.
    """

    def __init__(self) -> None:
        self.waits, self.is_severed = "", False
        self.phase, self.number = "start", -1
        self.connections: set[tuple[int, str]] = set()  # of groups, see `_sockets`
        self._enders: list[Callable[[], None]] = []

    def on_sever(self, end: Callable[[], None]) -> None:
        """Have exchanges of a device end too. end: called from another thread, and may take as long as it likes."""
        self._enders.append(end)

    def sever(self) -> None:
        """End exchanges, from another thread: who waits in one with a rank that is gone would wait for ever."""
        self.is_severed = True
        for end in self._enders:
            threading.Thread(target=end, name="sever", daemon=True).start()
        for descriptor, _ in self.connections & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


class Group:
    """Some ranks, counted from 0, of which each calls the same methods in the same order. All tensors are contiguous."""

    device: Final = torch.device("cpu")

    def __init__(self, store: Store, name: str, *, rank: int, size: int, standing: Standing, host: str = LOOPBACK) -> None:
        """Wait until all have come. Raises `LostRank` after a minute. host: address of the first rank."""
        self.rank, self.size, self._standing = rank, size, standing
        self._told: HostCalls | None = None
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host))]
        options._timeout = _MEETING
        standing.waits = f"meeting of {name}"
        before = _sockets()
        try:
            made = dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
        except RuntimeError as error:
            raise LostRank(f"the ranks of {name} did not meet: {error}") from error
        standing.waits = ""
        standing.connections |= _sockets() - before
        made._set_default_timeout(FOR_EVER)
        self._group = cast("ProcessGroup", made)  # it has its methods

    def record_calls(self, calls: HostCalls | None) -> None:
        """See `OpSpec.record_calls`: from now on sums and rows are not exchanged, but told; None: they are again."""
        self._told = calls

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place where `x` is contiguous: the same bits on all of them."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self._do(lambda: self._group.allreduce([x]), "sum")
        return x

    def own_part_sum(self, x: torch.Tensor) -> torch.Tensor:
        """[R N, C] -> [N, C]: of the sum over all ranks this one's rows, rounded once.

        Gloo's own, in torch 2.13, is the sum of a copy: twice the bytes of an exchange in which each gets its rows.
        """
        x = x.contiguous()
        parts = torch.empty_like(x)
        self._do(lambda: self._group.alltoall_base(parts, x, [], [], dist.AllToAllOptions()), "own_part_sum")
        return parts.view(self.size, -1, x.shape[-1]).sum(0)

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Of each of the values the smallest that a rank has."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        found = torch.tensor(values, dtype=torch.int64)
        self._wait(self._group.allreduce([found], options), "smallest")
        return [int(value) for value in found]

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has, of one shape, by rank."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        self._do(lambda: self._group.allgather([found], [x]), "of_all")
        return found

    def at_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The same on the first rank; nothing on the others."""
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == FIRST else []
        options = dist.GatherOptions()
        options.rootRank = FIRST
        self._wait(self._group.gather([found] if found else [], [x.contiguous()], options), "at_first")
        return found

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """What the first rank has, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = FIRST, 0
        self._wait(self._group.broadcast([x], options), "from_first")
        return x

    def send(self, x: torch.Tensor, rank: int) -> Sending:
        """To that rank, which receives what is sent in this order. Does not wait; `x` is not to be changed any more."""
        x = x.contiguous()
        return x, self._group.send([x], rank, TAG)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """The next that this rank sent."""
        x = torch.empty(*shape, dtype=dtype)
        self._wait(self._group.recv([x], rank, TAG), f"receive from rank {rank}", FOR_EVER)  # a shorter wait would end it
        return x

    def texts(self, text: str) -> list[str]:
        """What each rank says, by rank."""
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self.of_all(torch.tensor([len(own)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        return [bytes(found[:size].tolist()).decode() for found, size in zip(self.of_all(padded), sizes, strict=True)]

    def _do(self, begin: Callable[[], Work], what: str) -> None:
        if self._told is None:
            self._wait(begin(), what)
        else:
            self._told.append((lambda: self._wait(begin(), what), ()))

    def _wait(self, work: Work, what: str, look: datetime.timedelta = _LOOK) -> None:
        self._standing.waits = what
        try:
            work.wait(look)
        except RuntimeError:  # it failed, or it takes longer
            self._wait_longer(work)
        self._standing.waits = ""

    def _wait_longer(self, work: Work) -> None:
        """Gloo forgets a send that fails at the moment at which a rank that dies asks for it, and its thread waits for ever."""
        while not work.is_completed():
            if self._standing.is_severed:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # to take it apart would wait for that thread
                raise self._lost("it was ended")
            with contextlib.suppress(RuntimeError):
                work.wait(_LOOK)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, why: object) -> LostRank:
        return LostRank(f"the exchange {self._standing.waits!r} with other ranks failed: {why}")


def open_store(address: str, num_ranks: int) -> Store:
    """Where the ranks of one engine leave their addresses: the path of a file that does not exist before, or tcp://ADDRESS:PORT."""
    if not address.startswith(_TCP):
        store: Store = FileStore(address, num_ranks)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # to take it apart ends the process if the file goes meanwhile
    else:
        host, _, port = address.removeprefix(_TCP).rpartition(":")
        try:
            store = TCPStore(host, int(port), timeout=_MEETING, wait_for_workers=False)
        except RuntimeError as error:
            raise LostRank(f"the first rank cannot be met at {address}: {error}") from error
    store.set_timeout(_MEETING)
    return store


def listening_store(host: str) -> tuple[Store, str]:
    """One for ranks of other hosts, and its address, for `open_store`: any port of this address of the first rank's."""
    listener = socket.create_server((host, 0))
    port, descriptor = listener.getsockname()[1], listener.detach()
    store = TCPStore(host, port, is_master=True, timeout=_MEETING, wait_for_workers=False, master_listen_fd=descriptor)
    return store, f"{_TCP}{host}:{port}"


def _sockets() -> set[tuple[int, str]]:
    """Descriptors of this process's sockets, each with the name that the kernel gives no other; on Linux."""
    found = set()
    for entry in os.scandir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with contextlib.suppress(FileNotFoundError):
            found.add((int(entry.name), os.readlink(entry.path)))
    return {(descriptor, name) for descriptor, name in found if name.startswith("socket:")}


def _own_address(towards: str) -> str:
    """Of the interface that leads to another host; towards one of its own, that address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
