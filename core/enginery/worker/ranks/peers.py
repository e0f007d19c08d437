"""Memory that several GPUs of one host read and write in kernels, and what takes sums by it.

    rank 0   [ part 0 ]  <── written and read by the kernels of rank 0, and over NVLink of rank 1
    rank 1   [ part 1 ]  <── likewise

Torch's symmetric memory without multicast. The ranks find each other's parts once, while the engine is built.
"""

from __future__ import annotations

import datetime
import logging
import uuid
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, _register_process_group, _SymmetricMemory

from enginery.contracts.ops import OpSpec, PeerMemory, PeerOps
from enginery.contracts.parallel import ParallelFacts
from enginery.plugin.boundary import inside
from enginery.plugin.records import Offer
from enginery.worker.ranks.gloo import Group, LostRank, Standing

log = logging.getLogger(__name__)


class CountedStore(Store):
    """Another, for exchanges that torch (2.11) numbers by how many its process has had, as NAME/NUMBER/RANK.

    Where an engine is built for the second time, its own process has had more than those that were started for it. So exchanges
    are counted here, by what each rank sets: first its own key, then it reads those of the others.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store, self._num_set = store, 0

    def set(self, key: str, value: str) -> None:
        self._num_set += 1
        self._store.set(self._counted(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._counted(key))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._store.wait([self._counted(key) for key in keys])

    def _counted(self, key: str) -> str:
        name, _, rank = key.rsplit("/", 2)
        return f"{name}/{self._num_set}/{rank}"


class Peers:
    """The tensor ranks of a stage, which are on one host. world: all ranks, who take part in what follows."""

    def __init__(self, store: Store, world: Group, parallel: ParallelFacts, device: torch.device) -> None:
        self._store, self._world, self.parallel, self._device = store, world, parallel, device

    def are_in_reach(self) -> bool:
        """Whether every rank's GPU reaches the memory of those of its stage. Not where each sees its own alone, as the first."""
        own, first, size = self._device.index, self.parallel.rank - self.parallel.tensor_rank, self.parallel.tensor_size
        others = set(map(int, self._world.texts(str(own))[first : first + size])) - {own}
        reached = len(others) == size - 1 and all(torch.cuda.can_device_access_peer(own, other) for other in others)
        return bool(self._world.smallest([reached])[0])

    def memory(self, num_bytes: int) -> PeerMemory:
        """So much of each rank. Raises `LostRank` where a rank does not come."""
        stage, rank, size = self.parallel.stage, self.parallel.tensor_rank, self.parallel.tensor_size
        name = f"{self._world.texts(uuid.uuid4().hex)[0]} {stage}"  # no other engine's of this process
        store = CountedStore(PrefixStore(name, self._store))
        _SymmetricMemory.set_group_info(name, rank, size, store)
        group = ProcessGroup(store, rank, size)
        _register_process_group(name, group)  # type: ignore[arg-type]  # where later versions of torch look
        own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device, name)
        own.zero_()
        torch.cuda.synchronize(self._device)  # before another rank may write to it
        try:
            shared = _SymmetricMemory.rendezvous(own, name)
        except RuntimeError as error:
            raise LostRank(f"the ranks of stage {stage} did not find each other's memory: {error}") from error
        parts = tuple(shared.get_buffer(each, (num_bytes,), torch.uint8) for each in range(size))
        return PeerMemory(rank=rank, parts=parts, owner=(own, shared, group, store))


def bind_peer_ops(ops: Sequence[Offer[OpSpec]], peers: Peers, standing: Standing) -> PeerOps | None:
    """Of the first that offers it. None, with the reason in the log: nobody does, or GPUs do not reach each other's memory."""
    offer = next((offer for offer in ops if offer.spec.peer_ops is not None), None)
    if offer is None or (spec := offer.spec.peer_ops) is None:
        log.info("sums of ranks are NCCL's: no chosen operations offer peer_ops")
        return None
    if not peers.are_in_reach():
        log.warning("sums of ranks are NCCL's: the GPUs do not reach each other's memory; engine doctor says which")
        return None
    memory = peers.memory(spec.bytes_of_each(peers.parallel.tensor_size))
    with inside(offer, "bind peer_ops"):
        bound = spec.bind(memory)
    standing.on_sever(bound.end)
    log.info("sums of ranks before norms are taken by %s, where it takes so much, and NCCL's else", offer.source)
    return bound
