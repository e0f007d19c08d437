"""What a recording of a step on a CPU does again, and what is refused. The reference is the function, run on the same numbers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import pytest
import torch

from enginery.api import HostCalls, only_torch
from enginery.errors import Unsupported
from enginery.worker.paths.host_capture import HostCapture, HostRecording

SHAPE = (3, 4)


class Kernel:
    """A kernel past torch: adds one to so many floats at an address. Tells its calls if it was asked to."""

    def __init__(self) -> None:
        self.calls: HostCalls | None = None

    def record(self, calls: HostCalls | None) -> None:
        self.calls = calls

    def add_one(self, x: torch.Tensor) -> None:
        arguments = (x.data_ptr(), x.numel())
        self.call(*arguments)
        if self.calls is not None:
            self.calls.append((self.call, arguments))

    @staticmethod
    def call(address: int, count: int) -> None:
        numbers = (ctypes.c_float * count).from_address(address)
        for place in range(count):
            numbers[place] += 1.0


def record(run: Callable[[], None], kernel: Kernel | None = None) -> HostRecording:
    with torch.inference_mode():
        return HostCapture([only_torch if kernel is None else kernel.record])(run)


def views_and_products(x: torch.Tensor, out: torch.Tensor) -> None:
    halves = (x @ x.t().contiguous()).reshape(-1).split(3)
    out.copy_(torch.cat([halves[2], halves[0], torch.nn.functional.rms_norm(x, (4,)).flatten()[:6]]).view(SHAPE))


def written_in_place(x: torch.Tensor, out: torch.Tensor) -> None:
    sums = torch.zeros(SHAPE)
    sums += x
    sums[:, :2] = 1.0
    sums.view(-1)[torch.tensor([0, 5])] *= x[0, 0]
    torch.where(x > 0, sums, x, out=out)


def several_results(x: torch.Tensor, out: torch.Tensor) -> None:
    values, places = x.topk(2, dim=-1)
    best, at = x.max(dim=0)
    out.copy_(torch.cat([values, places.float()], dim=1) + best + at)


def empty_and_filled(x: torch.Tensor, out: torch.Tensor) -> None:
    room = torch.empty_like(x)
    room.copy_(x.softmax(-1))
    room.view(-1).index_copy_(0, torch.arange(2), x[:2, 0])
    out.copy_(room.masked_fill(x.isnan(), 0).to(torch.bfloat16).float())


@pytest.mark.parametrize("run", [views_and_products, written_in_place, several_results, empty_and_filled])
def test_a_replay_gives_what_the_function_gives_for_other_numbers(run: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    x, out, wanted = torch.randn(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    recording = record(lambda: run(x, out))
    for seed in range(3):
        x.copy_(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))
        with torch.inference_mode():
            run(x, wanted)
            garbage = [torch.full(SHAPE, 7.0) for _ in range(50)]  # in memory that something recorded might have left
            recording.replay()
        assert torch.equal(out, wanted)
        assert len(garbage) == 50


def test_kernels_are_called_again_between_torchs_operators_with_the_same_addresses() -> None:
    kernel, x, out = Kernel(), torch.zeros(SHAPE), torch.zeros(SHAPE)

    def run() -> None:
        made = x * 2
        kernel.add_one(made)
        out.copy_(made * 3)

    recording = record(run, kernel)
    assert kernel.calls is None, "nobody records any more"
    assert [len(arguments) for _, arguments in recording.calls] == [2, 2, 2, 2]
    x.fill_(5.0)
    with torch.inference_mode():
        recording.replay()
    assert torch.equal(out, torch.full(SHAPE, 33.0))


def test_an_operator_of_torchs_that_tells_its_kernel_too_is_done_once() -> None:
    kernel, x = Kernel(), torch.zeros(SHAPE)
    library = torch.library.Library("recorded_once", "DEF")
    library.define("add_one_(Tensor(a!) x) -> ()")
    library.impl("add_one_", kernel.add_one, "CPU")
    recording = record(lambda: torch.ops.recorded_once.add_one_(x), kernel)
    with torch.inference_mode():
        recording.replay()
    assert torch.equal(x, torch.full(SHAPE, 2.0))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x[0, 0].item(), "reads numbers back"),
    "if": (lambda x: bool((x > 0).any()), "reads numbers back"),
    "tolist": (lambda x: x.tolist(), "tolist reads numbers back"),
    "numpy": (lambda x: x.numpy(), "numpy reads numbers back"),
    "equal": (lambda x: torch.equal(x, x + 1), "reads numbers back"),
    "nonzero": (lambda x: x.nonzero(), "shape depends on numbers"),
    "mask": (lambda x: x[x > 0], "shape depends on numbers"),
    "unique": (lambda x: x.unique(), "shape depends on numbers"),
    "repeats": (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0]), dim=0), "shape depends on numbers"),
    "random": (lambda x: torch.randn(3), "draws random numbers"),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5), "draws random numbers"),
    "in place random": (lambda x: x.exponential_(), "draws random numbers"),
    "resized": (lambda x: torch.mul(x, 2, out=torch.empty(0)), "another shape or other memory"),
    "moved": (lambda x: (x + 1).set_(x * 2), "another shape or other memory"),
    "constant": (lambda x: torch.tensor([1.0, 2.0]).add_(x[0, :2]), "made of Python's numbers"),
    "address": (lambda x: x.data_ptr(), "an address was taken for a call that nobody told"),
    "meta": (lambda x: x.to("meta"), "no tensor of the host"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_again_is_refused(name: str) -> None:
    run, why = REFUSED[name]
    with pytest.raises(Unsupported, match=re.escape(why)):
        record(lambda: [run(torch.ones(SHAPE)), None][1])


def test_a_kernel_that_is_not_told_is_refused() -> None:
    kernel, x = Kernel(), torch.zeros(SHAPE)
    with pytest.raises(Unsupported, match="nobody told"):
        record(lambda: kernel.add_one(x))


def test_a_teller_hears_that_a_recording_ended_however_it_ended() -> None:
    kernel = Kernel()
    with pytest.raises(Unsupported):
        record(lambda: print(torch.ones(1).item()), kernel)
    assert kernel.calls is None


def test_compiled_kernels_tell_this_threads_calls_alone() -> None:
    native = pytest.importorskip("enginery_ops_cpu.native", reason="the plugin is not installed")
    if native.KERNELS is None:
        pytest.skip(f"its compiled part was not built: {native.WHY_NOT}")
    import threading

    x, out, calls = torch.randn(2, 8), torch.empty(2, 4), []
    arguments = (0, x.data_ptr(), out.data_ptr(), 2, 4, 8)
    native.KERNELS.record_calls(calls)
    try:
        native.KERNELS.gate(*arguments)
        other = threading.Thread(target=native.KERNELS.gate, args=arguments)
        other.start()
        other.join()
        with pytest.raises(ValueError, match="no kernel for dtype"):
            native.KERNELS.gate(9, *arguments[1:])
    finally:
        native.KERNELS.record_calls(None)
    native.KERNELS.gate(*arguments)
    assert calls == [(native.KERNELS.gate, arguments)]
    with pytest.raises(TypeError, match="takes a list"):
        native.KERNELS.record_calls(3)
