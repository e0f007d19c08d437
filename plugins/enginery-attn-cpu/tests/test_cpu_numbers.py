"""Sizes that are no multiple of anything against float64, on each instruction set; and what is the same to the last bit."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from enginery.api import (
    FULL,
    AttnLayerFacts,
    AttnNeeds,
    BackendContext,
    ForwardBatch,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
    Phase,
    Unsupported,
    View,
)
from enginery.kv.arena import DeviceArena
from enginery.kv.pool import TORCH_DTYPES, PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.testing import reference
from enginery_attn_cpu import native_part
from enginery_attn_cpu.backend import CpuAttention
from enginery_attn_cpu.spec import CPU

built = pytest.mark.skipif(native_part.kernels is None, reason="the compiled part was not built")
INSTRUCTION_SETS = native_part.kernels.supported if native_part.kernels else ()
DEVICE, LAYER = torch.device("cpu"), LocalLayerId(0)
TOLERANCES = {"float32": 2e-5, "bfloat16": 1.6e-2}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if native_part.kernels is not None:
        native_part.kernels.use(native_part.kernels.isa)


@dataclass(kw_only=True)
class Setting:
    """One layer; requests of `lens` tokens, of which the last `rows` are asked for. All memory is noise, or no number."""

    facts: AttnLayerFacts
    lens: list[int]
    rows: list[int]
    dtype: str = "float32"
    kv_dtype: str = "float32"
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        stream, facts = torch.Generator().manual_seed(self.seed), self.facts
        per_request = [-(-length // self.page_size) for length in self.lens]
        pages = torch.randperm(sum(per_request) + 1, generator=stream)
        geometry = KVGeometry(pages={FULL: len(pages)}, page_size=self.page_size, layers=(facts,), dtype=self.kv_dtype)
        self.pool = PagedKVPool(geometry, DEVICE)
        stored = self.pool.layer(LAYER)
        for part in stored:
            part.fill_(float("nan"))  # whoever reads what is nobody's shows it
        self.table = torch.full((len(self.lens), max(per_request, default=0)), 1 << 30, dtype=torch.int32)
        first = 0
        self.keys, self.values = [], []
        for row, (length, count) in enumerate(zip(self.lens, per_request, strict=True)):
            own = pages[first : first + count]
            first += count
            self.table[row, :count] = own
            slots = (own[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:length]
            for part, kept in zip(stored, (self.keys, self.values), strict=True):
                numbers = torch.randn(length, *part.shape[2:], generator=stream).to(part.dtype)
                part.flatten(0, 1)[slots] = numbers
                kept.append(numbers)
        total = sum(self.rows)
        whole = torch.randn(total, facts.num_heads + 3, facts.head_dim, generator=stream).to(TORCH_DTYPES[self.dtype])
        self.q = whole[:, 1 : 1 + facts.num_heads]  # beside keys and values, as a merged projection leaves it
        sinks = torch.randn(facts.num_heads, generator=stream) if facts.sinks else None
        scale = 1.3 * facts.head_dim**-0.5
        self.layer = LayerSpec(global_id=GlobalLayerId(3), local_id=LAYER, facts=facts, scale=scale, sinks=sinks)
        self.backend = CpuAttention(
            BackendContext(
                instance="cpu#0",
                geometry=geometry,
                pool=self.pool,
                states=RecurrentStatePool(geometry, DEVICE),
                device=DEVICE,
                dtype=TORCH_DTYPES[self.dtype],
                arena=DeviceArena(DEVICE),
            )
        )

    def batch(self) -> ForwardBatch:
        tokens = torch.zeros(sum(self.rows), dtype=torch.int64)
        q_lens, kv_lens = (torch.tensor(lens, dtype=torch.int32) for lens in (self.rows, self.lens))
        return ForwardBatch(
            phase=Phase.VERIFY,
            input_ids=tokens,
            positions=tokens,
            q_lens_cpu=q_lens,
            kv_lens_cpu=kv_lens,
            num_logits_cpu=q_lens,
            seats_cpu=q_lens,
            views={FULL: View(slots=tokens, page_table_cpu=self.table)},
        )

    def attend(self) -> torch.Tensor:
        """[T, H, V], between other numbers."""
        batch, heads = self.batch(), self.facts.num_heads
        whole = torch.full((sum(self.rows), heads + 2, self.facts.value_dim), 77.0, dtype=self.q.dtype)
        plan = self.backend.plan_forward_metadata(batch, False)
        unused = self.q[:, :1]
        self.backend.attend(self.q, unused, unused, self.layer, batch, plan, whole[:, 1:-1])
        assert bool((whole[:, [0, -1]] == 77.0).all()), "it writes outside of `out`"
        return whole[:, 1:-1].clone()

    def expected(self) -> torch.Tensor:
        parts = [
            reference.attention(q, k, v, facts=self.facts, scale=self.layer.scale, sinks=self.layer.sinks)[0]
            for q, k, v in zip(self.q.split(self.rows), self.keys, self.values, strict=True)
        ]
        return torch.cat(parts)


def random_setting(stream: random.Random) -> Setting:
    kv_heads = stream.choice([1, 1, 2, 3, 5])
    dims = [stream.choice([1, 3, 8, 15, 16, 17, 31, 33, 64, 72, 80, 96, 120, 128, 200, 257]) for _ in range(2)]
    facts = AttnLayerFacts(
        num_heads=kv_heads * stream.choice([1, 2, 3, 4, 5, 7, 8]),
        num_kv_heads=kv_heads,
        head_dim=dims[0],
        v_head_dim=stream.choice([None, dims[1]]),
        sliding_window=stream.choice([None, None, 1, 7, 100, 130, 300]),
        softcap=stream.choice([None, None, 1.5, 30.0]),
        sinks=stream.random() < 0.3,
    )
    rows = [stream.choice([1, 1, 2, 5, 9, 16, 17, 40, 97, 130]) for _ in range(stream.randrange(1, 5))]
    lens = [max(count, stream.choice([1, 5, 127, 128, 129, 255, 256, 300, 511, 700])) for count in rows]
    return Setting(
        facts=facts,
        lens=lens,
        rows=rows,
        dtype=stream.choice(["float32", "bfloat16"]),
        kv_dtype=stream.choice(["float32", "bfloat16"]),
        page_size=stream.choice([1, 3, 16, 64, 200]),
        seed=stream.randrange(1 << 30),
    )


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_any_sizes_equal_float64(isa: str) -> None:
    assert native_part.kernels is not None
    native_part.kernels.use(isa)
    stream = random.Random(isa)
    for index in range(40):
        setting = random_setting(stream)
        torch.set_num_threads(2 if index % 8 == 0 else 1)
        error = float((setting.attend().double() - setting.expected()).abs().max())
        assert error <= TOLERANCES[setting.dtype] * 4, (index, setting, error)


@built
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_threads_and_neighbours_change_no_bit(kv_dtype: str) -> None:
    """Of requests with work for two threads; and several rows of a request are what they are one after the other."""
    facts = AttnLayerFacts(num_heads=12, num_kv_heads=4, head_dim=64, sliding_window=900)
    asked = {"facts": facts, "lens": [2000, 40, 1300], "rows": [3, 1, 2], "kv_dtype": kv_dtype, "dtype": kv_dtype}
    setting = Setting(**asked)
    found = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[threads] = setting.attend()
    assert torch.equal(found[1], found[2])
    for row in range(3):
        alone = Setting(**asked)
        alone.q, alone.lens, alone.rows, alone.table = setting.q[row : row + 1], [1998 + row], [1], setting.table[:1]
        assert torch.equal(alone.attend()[0], found[1][row]), row


@built
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_where_a_prompt_is_cut_changes_no_bit(kv_dtype: str, window: int | None) -> None:
    """Neither into chunks nor among threads: blocks of rows begin elsewhere then, each row's sums do not."""
    facts = AttnLayerFacts(num_heads=6, num_kv_heads=2, head_dim=72, sliding_window=window)
    asked = {"facts": facts, "lens": [700], "rows": [700], "kv_dtype": kv_dtype, "dtype": kv_dtype}
    setting = Setting(**asked)
    torch.set_num_threads(1)
    whole = setting.attend()
    torch.set_num_threads(2)
    assert torch.equal(setting.attend(), whole)
    for first, last in ((0, 50), (50, 411), (411, 700)):
        chunk = Setting(**asked)
        chunk.q, chunk.lens, chunk.rows = setting.q[first:last], [last], [last - first]
        assert torch.equal(chunk.attend(), whole[first:last]), (first, last)


@built
def test_large_scores_and_sinks_do_not_overflow() -> None:
    facts = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=32, sinks=True)
    setting = Setting(facts=facts, lens=[300, 150], rows=[1, 40])
    setting.q.mul_(3000)
    torch.testing.assert_close(setting.attend().double(), setting.expected(), atol=1e-3, rtol=0)


@built
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_no_number_stays_none(dtype: str, rows: int) -> None:
    facts = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=32)
    setting = Setting(facts=facts, lens=[300], rows=[rows], dtype=dtype, kv_dtype=dtype)
    setting.q[0, 1, 5] = float("nan")
    out = setting.attend()
    assert bool(out[1:].isfinite().all())
    assert bool(out[0, 1].isnan().all())
    assert bool(out[0, 0].isfinite().all())


@built
@pytest.mark.parametrize("page", [-1, 1000])
def test_a_page_that_is_not_there_is_an_index_error(page: int) -> None:
    setting = Setting(facts=AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=32), lens=[300], rows=[1])
    setting.table[0, 7] = page
    with pytest.raises(IndexError, match="not among the layer's"):
        setting.attend()


@built
@pytest.mark.parametrize(
    ("q", "out"),
    [
        ((3, 2, 32), (4, 2, 32)),
        ((4, 2, 32), (3, 2, 32)),
        ((4, 1, 32), (4, 1, 32)),
        ((4, 2, 32), (4, 2, 16)),
        ((4, 2, 16), (4, 2, 32)),
    ],
)
def test_rows_heads_or_dims_that_are_not_the_layer_s_are_refused_before_a_kernel_has_their_address(
    q: tuple[int, ...], out: tuple[int, ...]
) -> None:
    """A model's block, or an operation before it, has made them; kernels would write over other memory."""
    setting = Setting(facts=AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=32), lens=[9], rows=[4])
    batch, given = setting.batch(), torch.zeros(q)
    plan = setting.backend.plan_forward_metadata(batch, False)
    with pytest.raises(Unsupported, match=r"for 4 tokens; by its facts layer 3 has q \[T, 2, 32\] and out \[T, 2, 32\]"):
        setting.backend.attend(given, given, given, setting.layer, batch, plan, torch.zeros(out))
    with pytest.raises(Unsupported, match=r"torch.float64 for 4 tokens"):
        setting.backend.attend(setting.q, given, given, setting.layer, batch, plan, torch.zeros(4, 2, 32, dtype=torch.float64))


@built
def test_other_strides_and_dims_are_refused() -> None:
    facts = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=32)
    setting = Setting(facts=facts, lens=[3], rows=[1])
    setting.q = setting.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(Unsupported, match="adjacent"):
        setting.attend()
    wide = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=1025)
    assert [reason.text for reason in CPU.refuse(needs(wide))] == ["head dim 1025 is more than 1024"]


def needs(facts: AttnLayerFacts) -> AttnNeeds:
    phases = frozenset({Phase.DECODE})
    return AttnNeeds(device="cpu", dtype="float32", kv_dtype="float32", page_size=16, layers=(facts,), phases=phases)


def test_without_the_compiled_part_it_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_part, "kernels", None)
    monkeypatch.setattr(native_part, "why_absent", "no module")
    facts = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=32)
    (reason,) = CPU.refuse(needs(facts))
    assert "install a C++ compiler" in reason.text
    assert "no module" in reason.text
    with pytest.raises(Unsupported, match="without its compiled part"):
        Setting(facts=facts, lens=[3], rows=[1])


def test_it_installs_without_a_compiler(tmp_path: Path) -> None:
    """The extension is optional: building it fails, and the package does not."""
    folder = Path(__file__).parents[1]
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path / "lib"),
        "--build-temp",
        str(tmp_path / "temp"),
    ]
    environment = {"PATH": "/nowhere", "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "building extension" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))


@built
@pytest.mark.parametrize(("wanted", "status"), [("generic", 0), ("z80", 1)])
def test_the_instruction_set_can_be_narrowed(wanted: str, status: int) -> None:
    code = "from enginery_attn_cpu import _kernels; print(_kernels.isa)"
    environment = {**os.environ, "ENGINERY_CPU_ISA": wanted, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == status, done.stderr
    assert wanted in done.stdout + done.stderr


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(("rows", "dtype"), [(6, "float32"), (16, "bfloat16"), (17, "float32"), (40, "bfloat16"), (127, "float32")])
def test_rows_of_a_tree_see_those_on_their_way(isa: str, rows: int, dtype: str) -> None:
    """Few rows and blocks of them, with nothing before them or a chunk's end amid them."""
    assert native_part.kernels is not None
    native_part.kernels.use(isa)
    facts = AttnLayerFacts(num_heads=6, num_kv_heads=2, head_dim=24)
    before = [0, 1, 125, 128 - rows // 2, 300]
    made = Setting(facts=facts, lens=[count + rows for count in before], rows=[rows] * len(before), dtype=dtype, kv_dtype=dtype)
    chance = random.Random(rows)
    ways: list[list[list[int]]] = []
    for count in before:
        ways.append([[count]])
        ways[-1] += [[]] * (rows - 1)
        for row in range(1, rows):
            ways[-1][row] = [*ways[-1][chance.randrange(row)], count + row]
    batch = dataclasses.replace(made.batch(), decode_len=rows, trees=True)
    plan = made.backend.plan_forward_metadata(batch, False)
    (part,) = made.backend.verify_mask(plan).parts
    assert (part.requests, tuple(part.buffer.shape)) == (slice(0, len(before)), (len(before), rows, rows))
    for request, of_rows in enumerate(ways):
        for row, way in enumerate(of_rows):
            part.buffer[request, row, [place - before[request] for place in way]] = True
    out = torch.empty(len(before) * rows, facts.num_heads, facts.head_dim, dtype=made.q.dtype)
    made.backend.attend(made.q, made.q[:, :1], made.q[:, :1], made.layer, batch, plan, out)
    for request, of_rows in enumerate(ways):
        for row, way in enumerate(of_rows):
            seen = [*range(before[request]), *way]
            k, v = made.keys[request][seen], made.values[request][seen]
            place = request * rows + row
            wanted = reference.attention(made.q[place : place + 1], k, v, facts=facts, scale=made.layer.scale, sinks=None)[0]
            error = (out[place : place + 1].double() - wanted).abs().max() / wanted.abs().max()
            assert error < TOLERANCES[dtype], (request, row)


@built
def test_more_rows_of_a_tree_than_kernels_take_are_refused() -> None:
    made = Setting(facts=AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=8), lens=[130], rows=[128])
    with pytest.raises(Unsupported, match="trees of 128 rows are more than the 127"):
        made.backend.plan_forward_metadata(dataclasses.replace(made.batch(), decode_len=128, trees=True), False)
