"""The compiled kernels equal the references: on every instruction set of this CPU, for sizes that are no multiple of anything.

Other sets run in processes of their own, which see this file with ENGINERY_CPU_ISA set; `engine test-op` runs there too.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from quick_processes import run_python

from enginery.api import OpNeeds
from enginery.nn import reference_ops
from enginery_ops_cpu import compiled, native, spec

KERNELS = native.KERNELS
if KERNELS is None:
    pytest.skip(f"the compiled operations were not built: {native.WHY_NOT}", allow_module_level=True)

OPS = compiled.CompiledOps(KERNELS)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
ROWS = (0, 1, 2, 5, 6, 7, 11, 12, 13, 17, 40, 131)
SEEDS = range(3)
NUM_SLOTS = 200


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.fixture(params=OPS.codes, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    given: torch.dtype = request.param
    return given


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seed", SEEDS)
def test_products_equal_those_in_float64(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FEW_ROWS", compiled.ALL_ROWS)  # none of them in torch
    monkeypatch.setattr(compiled, "MOST_ROWS", {})
    draw = random.Random(seed)
    torch.manual_seed(seed)
    outputs, columns, gap = draw.randint(1, 300), draw.randint(1, 500), draw.randint(0, 3)
    weight = (torch.randn(outputs, columns) * columns**-0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if seed % 2 else None
    linear = OPS.bind_linear(weight, bias)
    for rows in ROWS:
        x = torch.randn(rows, columns + gap).to(dtype)[:, :columns]
        got = linear(x)
        wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert got.dtype == dtype
        close(got, wanted, TOLERANCES[dtype])
        for row in range(0, rows, 7):
            assert torch.equal(got[row : row + 1], linear(x[row : row + 1])), "a row does not depend on the others"


@pytest.mark.parametrize("seed", SEEDS)
def test_norms_and_gates_equal_the_references(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, size, heads = draw.choice(ROWS), draw.randint(1, 400), draw.randint(1, 5)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, size), (rows, size), (size,)))
    close(OPS.rms_norm(x, weight, 1e-5), reference_ops.rms_norm(x, weight, 1e-5), TOLERANCES[dtype])
    mine, theirs = residual.clone(), residual.clone()
    close(OPS.add_rms_norm(x, mine, weight, 1e-5), reference_ops.add_rms_norm(x, theirs, weight, 1e-5), TOLERANCES[dtype])
    assert torch.equal(mine, theirs)
    by_head, scales = torch.randn(rows, heads, size).to(dtype), torch.randn(heads, size).to(dtype)
    close(OPS.rms_norm(by_head, scales, 1e-6), reference_ops.rms_norm(by_head, scales, 1e-6), TOLERANCES[dtype])
    halves = (torch.randn(rows, 2 * size) * 20).to(dtype)
    close(OPS.gated_silu(halves), reference_ops.gated_silu(halves.double()), TOLERANCES[dtype])


@pytest.mark.parametrize("seed", SEEDS)
def test_heads_are_rotated_and_written_as_by_the_reference(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tokens, query, kv, dim = draw.choice(ROWS), draw.randint(1, 5), draw.randint(1, 3), 2 * draw.randint(1, 40)
    rotary = 2 * draw.randint(1, dim // 2)
    heads, angles = torch.randn(tokens, query + 2 * kv, dim).to(dtype), torch.randn(tokens, rotary).to(dtype)
    weight = torch.randn(query + kv, dim).to(dtype) if seed % 2 else None
    slots = torch.randperm(NUM_SLOTS)[:tokens]
    for kept in OPS.codes:
        found = []
        for ops in (OPS, reference_ops):
            qkv, keys, values = heads.clone(), *(torch.zeros(NUM_SLOTS, kv, dim, dtype=kept) for _ in range(2))
            ops.qk_norm_rotary_write(qkv, weight, 1e-6, angles, keys=keys, values=values, slots=slots)
            found.append((qkv, keys, values))
        for mine, theirs in zip(*found, strict=True):
            close(mine, theirs, 3 * max(TOLERANCES[dtype], TOLERANCES[kept]))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_token_is_torchs_with_equals_infinities_and_nan(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    logits = torch.randint(-3, 3, (draw.choice(ROWS), draw.randint(1, 4000))).to(dtype)
    if len(logits):
        logits[0, draw.randrange(logits.shape[1])] = float("nan")
        logits[-1] = float("-inf")
        logits[len(logits) // 2, draw.randrange(logits.shape[1])] = float("inf")
    assert torch.equal(OPS.greedy(logits), logits.argmax(-1))


def test_rows_that_do_not_exist_are_refused_before_anything_is_written() -> None:
    table, keys = torch.randn(5, 8), torch.zeros(4, 1, 8)
    for bad in (-1, 5):
        with pytest.raises(IndexError, match=r"is not in 0\.\.4"):
            OPS.embed(table, torch.tensor([0, bad]))
    for bad in (-1, 4):
        with pytest.raises(IndexError, match=r"is not in 0\.\.3"):
            OPS.qk_norm_rotary_write(
                torch.randn(2, 3, 8), None, 0.0, torch.randn(2, 8), keys=keys, values=keys, slots=torch.tensor([0, bad])
            )
    assert not keys.any()


@pytest.mark.parametrize("wrong", [{"slots": 3}, {"angles": 2}, {"dim": 6}])
def test_rows_and_dims_that_do_not_agree_reach_no_kernel(wrong: dict[str, int]) -> None:
    """What an operation or a block before has made of another shape; torch refuses it, kernels would read and write beside it."""
    sizes = {"slots": 4, "angles": 4, "dim": 8} | wrong
    keys = torch.zeros(8, 1, sizes["dim"])
    with pytest.raises((RuntimeError, IndexError), match=r"size|shape|must match|dimension"):
        OPS.qk_norm_rotary_write(
            torch.randn(4, 3, 8),
            None,
            0.0,
            torch.randn(sizes["angles"], 8),
            keys=keys,
            values=keys,
            slots=torch.arange(sizes["slots"]),
        )


def test_there_is_one_pool_of_threads() -> None:
    """A second OpenMP runtime would be in the process's memory, and its threads among the process's."""
    code = (
        "import os, torch; torch.set_num_threads(2)\n"
        "x, w = torch.randn(16, 2048), torch.randn(4096, 2048)\n"
        "for _ in range(3): torch.nn.functional.linear(x, w)\n"
        "alone = len(os.listdir('/proc/self/task'))\n"
        "from enginery_ops_cpu import native, compiled\n"
        "ops = compiled.CompiledOps(native.KERNELS)\n"
        "for _ in range(3): torch.nn.functional.linear(x, w); ops.bind_linear(w, None)(x)\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if '/lib' in line}\n"
        "print(native.KERNELS.has_threads, len([name for name in maps if 'omp' in os.path.basename(name).split('.')[0]]), "
        "len(os.listdir('/proc/self/task')), alone)"
    )
    done = run_python("-c", code, kind="torch", capture_output=True, text=True, check=True)
    has_threads, runtimes, tasks, alone = done.stdout.split()
    assert (has_threads, runtimes) == ("1", "1")
    assert int(tasks) <= int(alone)


@pytest.mark.parametrize("isa", [] if os.environ.get("ENGINERY_CPU_ISA") else KERNELS.supported[1:])
def test_every_narrower_instruction_set_does_the_same(isa: str) -> None:
    if os.environ.get("FULL_TESTS") == "1":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not pool", str(Path(__file__))]
        done = subprocess.run(command, env={**os.environ, "ENGINERY_CPU_ISA": isa}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]
    command = [sys.executable, "-m", "enginery", "test-op", "cpu-compiled", "--device", "cpu"]
    done = subprocess.run(command, env={**os.environ, "ENGINERY_CPU_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_set_that_this_cpu_lacks_is_an_error_and_no_fallback() -> None:
    environ = {**os.environ, "ENGINERY_CPU_ISA": "sse9"}
    done = run_python("-c", "import enginery_ops_cpu.native", kind="torch", env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ENGINERY_CPU_ISA=sse9 is none of what this CPU has" in done.stderr


def test_without_the_extension_the_set_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "WHY_NOT", "No module named 'enginery_ops_cpu._kernels'")
    (reason,) = spec.COMPILED.refuse(OpNeeds(device="cpu", dtype="float32"))
    assert reason.rule == "compiled"
    assert "install a C++ compiler" in reason.text
