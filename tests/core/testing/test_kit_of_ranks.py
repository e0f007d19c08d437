"""What the kit of ranks says of a model that changes the result of a product that is summed early."""

from __future__ import annotations

import math

import pytest
import torch

from enginery.contracts.parallel import ParallelFacts
from enginery.nn.reference_ops import reference_ops
from enginery.testing.kits.ranks import Meeting, ThreadCollectives
from enginery.testing.rules import BrokenRule
from enginery.worker.weights.rank import BoundLinear

ONES = torch.ones(2, 4)


def summed_behind_a_product(change: torch.Tensor) -> torch.Tensor:
    """The norm of one rank's rows [2, 4], in which there are NaN and infinity, with `change` added to what left early."""
    alone = Meeting(1)
    comm = ThreadCollectives(ParallelFacts(), alone, alone, reference_ops(), 4)
    product = BoundLinear(lambda x: x * torch.tensor([1.0, math.nan, math.inf, 2.0]), (4,))
    partial = comm.summed_early(product)(ONES)
    partial += change
    return comm.add_rms_norm(partial, torch.zeros(2, 4), torch.ones(4), 1e-6)


def test_nan_that_left_early_is_no_changed_result() -> None:
    assert bool(summed_behind_a_product(torch.zeros(2, 4)).isnan().any())


@pytest.mark.parametrize("change", [1e-6, math.nan])
def test_a_result_that_is_changed_behind_its_product_is_told(change: float) -> None:
    changed = torch.zeros(2, 4)
    changed[1, 3] = change
    with pytest.raises(BrokenRule, match="was changed before it was summed"):
        summed_behind_a_product(changed)
