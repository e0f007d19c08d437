"""What processes exchange through gloo, here among threads, against sums in float64."""

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from quick_processes import run_python

from enginery.worker.ranks import gloo
from enginery.worker.ranks.collectives import Agreement, HeadColumns
from enginery.worker.ranks.gloo import Group, LostRank, Standing, open_store
from enginery.worker.sampling import NAN_TOKEN


def on_ranks(tmp_path: Path, size: int, work: Callable[[Group], object]) -> list[object]:
    """What `work` returns of each rank's group."""

    def run(rank: int) -> object:
        return work(Group(open_store(str(tmp_path / "meeting"), size), "all", rank=rank, size=size, standing=Standing()))

    with ThreadPoolExecutor(size) as threads:
        return [found.result(timeout=50) for found in [threads.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_its_rows_of_the_sum(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Rounded once, in whatever order the tensor was laid out; it is left as it was."""
    parts = torch.randn(size, 8, size * 5, generator=torch.Generator().manual_seed(0)).to(dtype).transpose(1, 2)
    given = parts.clone()
    found = on_ranks(tmp_path, size, lambda group: group.own_part_sum(parts[group.rank]))
    exact = parts.double().sum(0)
    for own, expected in zip(found, exact.chunk(size), strict=True):
        assert isinstance(own, torch.Tensor)
        assert own.shape == (5, 8)
        torch.testing.assert_close(own, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(parts, given)


@pytest.mark.parametrize(("vocab_size", "size"), [(10, 3), (6, 2), (5, 4)])  # the last rank's columns pad: some, none, or all
def test_the_best_of_all_ranks_columns_is_what_one_rank_finds(vocab_size: int, size: int, tmp_path: Path) -> None:
    """Of equal logits the first, on whichever ranks they are; where one is NaN there is none; what pads is never the best."""
    logits = -torch.randint(1, 3, (64, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    logits[range(vocab_size), range(vocab_size)] = torch.nan
    padded = torch.nn.functional.pad(logits, (0, -vocab_size % size))
    found = on_ranks(tmp_path, size, lambda group: HeadColumns(group, vocab_size).best(padded.chunk(size, dim=-1)[group.rank]))
    wanted = logits.argmax(-1).masked_fill(logits.isnan().any(-1), NAN_TOKEN)
    for best in found:
        assert isinstance(best, torch.Tensor)
        assert torch.equal(best, wanted)


@pytest.mark.parametrize(("vocab_size", "size"), [(10, 3), (6, 2), (5, 4)])
def test_a_guess_is_drawn_from_the_draft_models_tokens_alone(vocab_size: int, size: int, tmp_path: Path) -> None:
    """By the first rank, which tells the others; what pads the last columns is no token, also where the target has as many more."""
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(logits, (0, -vocab_size % size), value=9.0)
    drawn_from = list[torch.Tensor]()

    def likeliest(whole: torch.Tensor) -> torch.Tensor:
        drawn_from.append(whole)
        return whole.argmax(-1)

    def guess(group: Group) -> torch.Tensor:
        of_target = HeadColumns(group, padded.shape[1])
        agreement = Agreement.of(Mock(shared=of_target), Mock(vocab_size=vocab_size))
        return agreement.guess(padded.chunk(size, dim=-1)[group.rank], likeliest, greedy=False)

    for found in on_ranks(tmp_path, size, guess):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, logits.argmax(-1))
    (whole,) = drawn_from
    assert torch.equal(whole, logits)


def two_groups(tmp_path: Path, standing: Standing) -> list[Group]:
    """The first with this standing."""

    def meet(rank: int) -> Group:
        own = Standing() if rank else standing
        return Group(open_store(str(tmp_path / "meeting"), 2), "all", rank=rank, size=2, standing=own)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(meet, range(2)))


def waiting(exchange: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
    """What it gives, by a thread that the process does not wait for."""
    found = Future[torch.Tensor]()

    def run() -> None:
        try:
            found.set_result(exchange())
        except LostRank as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def test_who_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_LOOK", datetime.timedelta(milliseconds=20))
    first, second = two_groups(tmp_path, Standing())
    sums = [waiting(lambda: first.sum(torch.full((3,), 1.0)))]
    with pytest.raises(TimeoutError):
        sums[0].result(timeout=0.3)
    sums.append(waiting(lambda: second.sum(torch.full((3,), 2.0))))
    assert [found.result(timeout=50).tolist() for found in sums] == [[3.0] * 3] * 2


EXCHANGES: dict[str, Callable[[Group], torch.Tensor]] = {
    "sum": lambda group: group.sum(torch.ones(3)),
    "receive from rank 1": lambda group: group.receive((3,), torch.float32, 1),
}


@pytest.mark.parametrize("what", EXCHANGES)
def test_an_exchange_with_a_rank_that_goes_says_so(what: str, tmp_path: Path) -> None:
    standing = Standing()
    groups = two_groups(tmp_path, standing)
    found = waiting(lambda: EXCHANGES[what](groups[0]))
    while standing.waits != what:
        time.sleep(0.01)
    del groups[1]
    with pytest.raises(LostRank, match=f"'{what}' with other ranks failed: .*[Cc]onnection"):
        found.result(timeout=50)


LOST = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from enginery.worker.ranks.gloo import Group, LostRank, Standing, open_store

standing = Standing()
meet = lambda rank: Group(open_store(sys.argv[1], 2), "all", rank=rank, size=2, standing=standing)
with ThreadPoolExecutor(2) as threads:
    groups = list(threads.map(meet, range(2)))
standing.connections.clear()  # as if gloo had heard of their end, and forgotten what it was to send
threading.Timer(0.2, standing.sever).start()
try:
    groups[0].sum(torch.ones(3))
except LostRank as error:
    print(error)
del groups[0]  # while the other's connections are open
"""


def test_an_exchange_that_gloo_has_forgotten_ends_and_the_process_too(tmp_path: Path) -> None:
    done = run_python("-c", LOST, str(tmp_path / "meeting"), capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout) == (0, "the exchange 'sum' with other ranks failed: it was ended\n"), done.stderr


def test_a_rank_that_is_alone_exchanges_nothing(tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    (found,) = on_ranks(tmp_path, 1, lambda group: group.sum(x))
    assert found is x


TAKEN_APART = """
import os, sys
from enginery.worker.ranks.gloo import open_store
store = open_store(sys.argv[1], 1)
store.set("address", "here")
os.unlink(sys.argv[1])
os.mkdir(sys.argv[1])  # there, and no file, as one that goes between two looks
del store
"""


def test_a_store_whose_file_goes_while_it_is_taken_apart_does_not_end_the_process(tmp_path: Path) -> None:
    """torch throws where nothing may be thrown: a rank that an engine kept was killed by SIGABRT, after a minute."""
    ended = run_python("-c", TAKEN_APART, str(tmp_path / "meeting"), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
