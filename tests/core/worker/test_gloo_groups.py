"""What processes exchange through gloo, here among threads, against sums in float64."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from enginery.worker.ranks.gloo import Group, Standing, open_store


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


def test_a_rank_that_is_alone_exchanges_nothing(tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    (found,) = on_ranks(tmp_path, 1, lambda group: group.sum(x))
    assert found is x
