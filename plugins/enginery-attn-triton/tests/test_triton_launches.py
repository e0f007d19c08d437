"""Kernels that are launched again without a look at every argument (fakes note how), and which layers steps are planned for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from enginery.api import AttnLayerFacts, ForwardBatch, Phase, View
from enginery_attn_triton.launches import Launches
from enginery_attn_triton.plan import GraphState, Planner
from enginery_attn_triton.tiling import Device, LayerCuts

CONSTANTS = {"WIDE": 4, "CAUSAL": True, "num_warps": 8}
NAMES = ["x", "out", "scale", "WIDE", "CAUSAL"]


class Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """Notes what it compiles, and hands out what is launched again, or nothing, as the interpreter does."""

    def __init__(self, *, compiles: bool = True) -> None:
        self.arg_names, self.looked_at, self.again, self.compiles = NAMES, list[Any](), list[Any](), compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled | None:
            self.looked_at.append((grid, arguments, constants))
            return Compiled(self.again) if self.compiles else None

        return launch


def run(launches: Launches, kernel: Kernel, x: torch.Tensor, *, grid: tuple[int, int] = (2, 3), kind: str = "a") -> torch.Tensor:
    out = torch.zeros(4, 8)
    launches.run(kernel, grid, (x, out), (0.5,), lambda: dict(CONSTANTS), kind=kind)
    return out


def test_the_second_layer_of_a_kind_has_the_compiled_kernel_with_its_own_tensors_and_grid() -> None:
    launches, kernel = Launches(), Kernel()
    run(launches, kernel, torch.zeros(4, 8))
    x = torch.ones(4, 8)
    out = run(launches, kernel, x, grid=(5, 7))
    assert [(grid, constants) for grid, _, constants in kernel.looked_at] == [((2, 3), CONSTANTS)]
    [(grid, arguments)] = kernel.again
    assert grid == (5, 7, 1)
    assert (arguments[0] is x, arguments[1] is out, arguments[2:]) == (True, True, (0.5, 4, True))


@pytest.mark.parametrize(
    "other",
    [torch.zeros(4, 16)[:, :8], torch.zeros(40)[1:33].view(4, 8), torch.zeros(4, 8, dtype=torch.bfloat16)],
    ids=["other strides", "not aligned", "another dtype"],
)
def test_a_tensor_that_wants_another_variant_is_looked_at(other: torch.Tensor) -> None:
    launches, kernel = Launches(), Kernel()
    run(launches, kernel, torch.zeros(4, 8))
    run(launches, kernel, other)
    assert len(kernel.looked_at) == 2


def test_another_kind_and_another_kernel_are_looked_at() -> None:
    launches, kernel, other = Launches(), Kernel(), Kernel()
    for each, kind in ((kernel, "a"), (kernel, "b"), (other, "a")):
        run(launches, each, torch.zeros(4, 8), kind=kind)
    assert (len(kernel.looked_at), len(other.looked_at)) == (2, 1)


def test_what_is_interpreted_is_launched_as_it_is_each_time() -> None:
    launches, kernel = Launches(), Kernel(compiles=False)
    for _ in range(3):
        run(launches, kernel, torch.zeros(4, 8))
    assert len(kernel.looked_at) == 3


def test_layers_that_are_cut_alike_are_of_one_kind() -> None:
    full = AttnLayerFacts(num_heads=8, num_kv_heads=2, head_dim=64)
    window = AttnLayerFacts(num_heads=8, num_kv_heads=2, head_dim=64, sliding_window=32)
    cuts = LayerCuts([full, window, full], itemsize=2, device=Device(num_units=4, shared_bytes=1 << 20)).of(1)
    assert cuts.layers[0] is cuts.layers[2]
    assert cuts.distinct == (cuts.layers[0], cuts.layers[1])


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_backend_for_one_kind_of_memory_plans_for_its_layers_alone(kind: str) -> None:
    """Both have the whole model's facts; to cut what the other one runs took more of a step's time than all else on the host."""
    full, windowed = (AttnLayerFacts(num_heads=8, num_kv_heads=2, head_dim=64, sliding_window=size) for size in (None, 32))
    cuts = LayerCuts([full, windowed], itemsize=2, device=Device(num_units=4, shared_bytes=1 << 20), kinds=["full", "window"])
    planner = Planner(cuts=cuts, page_size=16, device=torch.device("cpu"), facts=Device(num_units=4, shared_bytes=1 << 20))
    rows, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    batch = ForwardBatch(
        phase=Phase.DECODE,
        input_ids=rows,
        positions=rows,
        q_lens_cpu=ones,
        kv_lens_cpu=40 * ones,
        num_logits_cpu=ones,
        seats_cpu=ones,
        views={kind: View(slots=rows, page_table_cpu=torch.zeros(2, 3, dtype=torch.int32))},
    )
    assert [cut.window for cut in planner.tables(batch).decode] == [None if kind == "full" else 32]
    state = GraphState(cuts, max_batch_size=4, max_rows=4, num_pages=8, device=torch.device("cpu"))
    state.refresh(batch, page_size=16)
    assert [cut.window for cut in state.recent] == [None if kind == "full" else 32]
    assert all(layer.decode in state.tables(2).decode for layer in cuts.of(1).distinct)  # one memory for all
