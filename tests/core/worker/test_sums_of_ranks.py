"""Who takes a sum: the kernel that takes it within a norm, where there is one and it takes so much, or the group. By stand-ins."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from offers import op_offer, op_spec

from enginery.contracts.ops import LinearFn, OpSpec, PeerMemory, PeerOpsSpec
from enginery.contracts.parallel import ParallelFacts
from enginery.engine.build import exchange_bytes
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.records import Offer
from enginery.worker.memory_plan import NCCL_BYTES
from enginery.worker.ranks import groups
from enginery.worker.ranks.collectives import HeadColumns, RankCollectives
from enginery.worker.ranks.gloo import Standing
from enginery.worker.ranks.peers import CountedStore, Peers, bind_peer_ops
from enginery.worker.weights.rank import BoundLinear

MOST_BYTES = 1024


@dataclass
class Doubling:
    """A group of two ranks that have the same."""

    rank: int = 0
    size: int = 2
    calls: list[str] = field(default_factory=list)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("sum")
        return 2 * x

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append("of all")
        return [x] * self.size

    def own_part_sum(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("own part")
        return 2 * x.chunk(self.size)[self.rank]


@dataclass
class Kernel:
    """Takes little."""

    ended: threading.Event = field(default_factory=threading.Event)
    num_calls: int = 0

    def takes_sum(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
        return partial.nbytes <= MOST_BYTES

    def add_rms_norm(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.num_calls += 1
        return reference_ops().add_rms_norm(2 * partial, residual, weight, eps)

    def takes_best(self, columns: torch.Tensor) -> bool:
        return columns.nbytes <= MOST_BYTES

    def best(self, columns: torch.Tensor, first: int) -> torch.Tensor:
        self.num_calls += 1
        return columns.argmax(-1) + first

    def end(self) -> None:
        self.ended.set()


def collectives(group: Doubling, **given: Any) -> RankCollectives:
    made = {"group": group, "across": None, "head": HeadColumns(cast("Any", group), 10), **given}
    return RankCollectives(ops=reference_ops(), **made)


@pytest.mark.parametrize(("rows", "by_kernel"), [(1, True), (4, True), (5, False)])
@pytest.mark.parametrize("of_all_lanes", [False, True])
def test_bytes_decide_who_sums_before_a_norm(rows: int, by_kernel: bool, of_all_lanes: bool) -> None:
    group, kernel = Doubling(), Kernel()
    x, weight = torch.randn(rows, 64), torch.randn(64)
    residual, wanted = (torch.arange(64.0).repeat(rows, 1) for _ in range(2))
    normed = collectives(group, peer_ops=kernel).add_rms_norm(x, residual, weight, 1e-5, of_all_lanes=of_all_lanes)
    assert (kernel.num_calls, group.calls) == ((1, []) if by_kernel else (0, ["sum"]))
    assert torch.equal(normed, reference_ops().add_rms_norm(2 * x, wanted, weight, 1e-5))
    assert torch.equal(residual, wanted)


def test_without_a_kernel_the_group_sums() -> None:
    group = Doubling()
    collectives(group).add_rms_norm(torch.randn(1, 64), torch.zeros(1, 64), torch.ones(64), 1e-5)
    assert group.calls == ["sum"]


def test_one_rank_sums_nothing() -> None:
    """As of stages, and of lanes, whose layers nobody else has a part of."""
    group, across, partial = Doubling(size=1), Doubling(), torch.randn(4, 64)
    alone = collectives(group)
    assert alone.sum(partial) is partial
    normed = alone.add_rms_norm(partial, torch.zeros(4, 64), torch.ones(64), 1e-5)
    assert torch.equal(normed, reference_ops().add_rms_norm(partial, torch.zeros(4, 64), torch.ones(64), 1e-5))
    assert torch.equal(collectives(group, across=across).own_rows_sum(partial), 2 * partial[:2])
    assert (group.calls, across.calls) == ([], ["own part"])


@pytest.mark.parametrize(("place", "wanted"), [(ParallelFacts(), False), (ParallelFacts(tensor_size=2), True)])
def test_one_rank_reaches_no_memory_of_peers(monkeypatch: pytest.MonkeyPatch, place: ParallelFacts, wanted: bool) -> None:
    class OnGpu(Doubling):
        device = torch.device("cuda", 0)

        def __init__(self, *given: object, rank: int, size: int, **named: object) -> None:
            super().__init__(rank, size)

    bound = Kernel()
    monkeypatch.setattr(groups, "Group", OnGpu)
    monkeypatch.setattr(groups, "DeviceGroup", OnGpu)
    monkeypatch.setattr(groups, "bind_peer_ops", lambda *given: bound)
    made = groups.RankGroups(
        torch.distributed.HashStore(), place, host=groups.LOOPBACK, standing=Standing(), device=OnGpu.device
    ).collectives(reference_ops(), cast("Any", SimpleNamespace(ops=(), facts=SimpleNamespace(vocab_size=7))))
    assert made.peer_ops is (bound if wanted else None)


@pytest.mark.parametrize(("rows", "by_kernel"), [(1, True), (100, False)])
def test_bytes_decide_who_finds_the_best_of_columns(rows: int, by_kernel: bool) -> None:
    """Of 7 tokens the second of two ranks has the last three, and a column that only pads."""
    group, kernel = Doubling(rank=1), Kernel()
    logits = torch.arange(4.0).repeat(rows, 1)
    found = HeadColumns(cast("Any", group), 7, kernel).best(logits)
    assert torch.equal(found, torch.full((rows,), 6))
    assert (kernel.num_calls, group.calls) == ((1, []) if by_kernel else (0, ["of all"]))


def test_of_lanes_each_takes_its_own_rows_and_sums_these_alone() -> None:
    everyone, across, group, partial = Doubling(size=4), Doubling(rank=1), Doubling(), torch.randn(6, 64)
    found = collectives(group, head=HeadColumns(cast("Any", everyone), 10), across=across).own_rows_sum(partial)
    assert torch.equal(found, 4 * partial[3:])
    assert (everyone.calls, across.calls, group.calls) == ([], ["own part"], ["sum"])


@dataclass
class World:
    """All ranks, of which the others say the same as this one, but for their devices."""

    devices: tuple[str, ...]

    def texts(self, text: str) -> list[str]:
        return list(self.devices)

    def smallest(self, values: list[bool]) -> list[int]:
        return [int(value) for value in values]


def peers(*devices: str, rank: int = 0) -> Peers:
    own = torch.device("cuda", int(devices[rank]))
    return Peers(cast("Any", None), cast("Any", World(devices)), ParallelFacts(tensor_rank=rank, tensor_size=len(devices)), own)


def offer(peer_ops: PeerOpsSpec | None) -> Offer[OpSpec]:
    return op_offer(op_spec({}, peer_ops=peer_ops))


def test_a_rank_asks_for_the_gpus_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def can(own: int, other: int) -> bool:
        asked.append((own, other))
        return True

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can)
    assert peers("0", "1", "2", rank=1).are_in_reach()
    assert sorted(asked) == [(1, 0), (1, 2)]
    assert not peers("0", "0").are_in_reach(), "each sees its own alone, as where it joined"


@pytest.mark.parametrize(
    ("offered", "reach", "told"),
    [(False, True, "no chosen operations offer peer_ops"), (True, False, "the GPUs do not reach each other's memory")],
)
def test_where_no_kernel_can_sum_the_log_says_why(
    offered: bool, reach: bool, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reach)
    spec = PeerOpsSpec(num_bytes=8, bind=lambda memory: Kernel())
    with caplog.at_level(logging.INFO):
        assert bind_peer_ops([offer(None), offer(spec if offered else None)], peers("0", "1"), Standing()) is None
    assert told in caplog.text


def test_ranks_find_each_other_that_had_other_exchanges_before() -> None:
    """Torch numbers them by process: here one has had 3, the other none."""
    shared = torch.distributed.HashStore()

    def exchange(store: torch.distributed.Store, rank: int, number: int) -> list[str]:
        keys = [f"NAME/{number}/{each}" for each in range(2)]
        store.set(keys[rank], f"rank {rank}, {number}")
        store.wait([keys[1 - rank]])
        return [store.get(key).decode() for key in keys]

    counted = [CountedStore(shared) for _ in range(2)]
    stores = [torch.distributed.PrefixStore("a", store) for store in counted]
    with ThreadPoolExecutor(2) as pool:
        for turn in range(3):
            found = [pool.submit(exchange, store, rank, turn + 3 * rank) for rank, store in enumerate(stores)]
            assert [each.result(10) for each in found] == 2 * [[f"rank 0, {turn}", f"rank 1, {turn + 3}"]]


def test_a_kernel_that_waits_is_ended_with_the_other_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    kernel, standing, memory = Kernel(), Standing(), PeerMemory(rank=0, parts=())
    monkeypatch.setattr(Peers, "memory", lambda self, num_bytes: memory if num_bytes == 8 else None)
    bound = bind_peer_ops([offer(PeerOpsSpec(num_bytes=8, bind=lambda given: kernel))], peers("0", "1"), standing)
    assert bound is kernel
    assert not kernel.ended.is_set()
    standing.sever()
    assert kernel.ended.wait(5)


@pytest.mark.parametrize(("num_ranks", "num_bytes"), [(2, 11), (3, 8)])
def test_what_two_ranks_alone_need_others_do_not_take(num_ranks: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    taken = list[int]()
    monkeypatch.setattr(Peers, "memory", lambda self, num_bytes: taken.append(num_bytes))
    spec = PeerOpsSpec(num_bytes=8, more_of_two=3, bind=lambda memory: Kernel())
    found, offers = peers(*"012"[:num_ranks]), [offer(None), offer(spec)]
    bind_peer_ops(offers, found, Standing())
    planned = exchange_bytes(cast("Any", SimpleNamespace(parallel=found.parallel, ops=offers)))
    assert (taken, planned) == ([num_bytes], NCCL_BYTES + num_bytes)


class EarlyKernel(Kernel):
    """Sends what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, int]] = []

    def summed_early(self, product: LinearFn, columns: int) -> LinearFn:
        def begun(x: torch.Tensor) -> torch.Tensor:
            self.sent.append((len(x), columns))
            return product(x)

        return begun


@pytest.mark.parametrize("kernel", [EarlyKernel(), Kernel(), None])
def test_kernels_that_send_rows_early_are_given_products(kernel: Kernel | None) -> None:
    made, comm = BoundLinear(torch.nn.Identity(), (4, 3)), collectives(Doubling(), peer_ops=kernel)
    linear, x = comm.summed_early(made), torch.randn(5, 7)
    assert torch.equal(linear(x), x)
    assert linear.rows == (4, 3)
    if isinstance(kernel, EarlyKernel):
        assert kernel.sent == [(5, 7)]
    else:
        assert linear is made
    whole = BoundLinear(torch.nn.Identity(), (4, 3), torch.neg)
    assert comm.summed_early(whole) is whole, "it takes its sum itself"
