"""Kernels equal recurrences in float64, token after token: any lengths, states read from one page and written to another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import compile_only
import pytest
import torch
import torch.nn.functional as F
from pairwise import crossed, in_turn

from enginery_attn_delta.kernels import chunks, conv, recurrence
from enginery_attn_delta.kernels.launch import INTERPRETED
from enginery_attn_delta.launch import CHUNK_ROWS, Conv, Gating, Heads, Rows, can_chain, convolve, linear_chunks, recur, scan

NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED.value, reason="triton was imported for the compiler in this process")
DEVICES = [pytest.param("cpu", marks=NEEDS_INTERPRETER), pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_rows(lengths: list[int], reads: list[int], writes: list[int], device: str) -> Rows:
    first = [0, *itertools.accumulate(lengths)]
    tiles = [(request, begin) for request, length in enumerate(lengths) for begin in range(0, length, CHUNK_ROWS)]
    return Rows(
        first_rows=torch.tensor(first[:-1], dtype=torch.int32, device=device),
        stop_rows=torch.tensor(first[1:], dtype=torch.int32, device=device),
        reads=torch.tensor(reads, dtype=torch.int32, device=device),
        writes=torch.tensor(writes, dtype=torch.int32, device=device),
        tiles=None if set(lengths) == {1} else torch.tensor(tiles, dtype=torch.int32, device=device),
        longest=max(lengths),
        chained=can_chain(torch.device(device)),
    )


def each(lengths: list[int]) -> list[slice]:
    return [slice(stop - length, stop) for length, stop in zip(lengths, itertools.accumulate(lengths), strict=True)]


# Interpreted, each token of a head takes milliseconds.
LENGTHS = [[1, 1], [2, 1, 35]] if not torch.cuda.is_available() else [[1, 1, 1], [5], [3, 1, 700, 2], [33, 64], [1] * 64]
PLACES = {"in place": (list(range(1, 65)), list(range(1, 65))), "apart": ([0, 1, 0, 3] * 16, list(range(4, 68)))}
WITH_NONE = {**PLACES, "from zeros and nowhere": ([0, -1, -1, 1] * 16, [page if page % 2 else -1 for page in range(4, 68)])}


@on_devices
@pytest.mark.parametrize("places", WITH_NONE)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("dtype", "width", "biased"), [(torch.float32, 4, False), (torch.bfloat16, 3, True)], ids=str)
def test_convolutions(lengths: list[int], places: str, dtype: torch.dtype, width: int, biased: bool, device: str) -> None:
    reads, writes = (pages[: len(lengths)] for pages in WITH_NONE[places])
    channels = 300
    x = torch.randn(sum(lengths), channels + 7).to(dtype)[:, :channels]
    weight, bias = torch.randn(width, channels).T, torch.randn(channels) if biased else None  # taps side by side
    states = torch.randn(71, width - 1, channels).to(dtype)  # the first page is in front of those that there are
    expected, kept = torch.empty(x.shape, dtype=torch.float64), states.clone()
    for rows, read, write in zip(each(lengths), reads, writes, strict=True):
        before = states[1 + read] if read >= 0 else torch.zeros_like(states[0])
        inputs = torch.cat([before, x[rows]]).double().T[None]  # [1, C, W - 1 + T]
        made = F.conv1d(inputs, weight.double()[:, None], None if bias is None else bias.double(), groups=channels)
        expected[rows] = F.silu(made)[0].T
        if write >= 0:
            kept[1 + write] = torch.cat([before, x[rows]])[-(width - 1) :]
    held = states.to(device)
    placed = make_rows(lengths, reads, writes, device)
    wide = torch.zeros(x.shape[0], channels + 7, dtype=dtype, device=device)
    wide[:, :channels] = x
    out = torch.empty(x.shape, dtype=dtype, device=device)
    placed_bias = None if bias is None else bias.to(device)
    convolve(wide[:, :channels], weight.to(device), placed_bias, states=held[1:], rows=placed, out=out)
    torch.testing.assert_close(out.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(held.cpu(), kept)


RULES = {
    "gated delta": Gating(decay="head", delta=True),
    "a decay for each channel": Gating(decay="channel", delta=True),
    "with a floor": Gating(decay="channel", delta=True, floor=-5.0),
    "constant": Gating(decay="constant", delta=False),
    "mamba2": Gating(decay="head", delta=False, skip=torch.ones(1), steps=True, step_limits=(0.01, 2.0)),
}


def expected_of(
    x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, *, heads: Heads, gating: Gating, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, V] and the state [H, V, K] after them, in float64."""
    groups = heads.num_values // heads.num_keys
    size = heads.num_keys * heads.key_dim
    q, k = (x[:, at : at + size].unflatten(1, (-1, heads.key_dim)).repeat_interleave(groups, 1) for at in (heads.q_at, heads.k_at))
    v = x[:, heads.v_at : heads.v_at + heads.num_values * heads.value_dim].unflatten(1, (-1, heads.value_dim))
    num, out = heads.num_values, []
    state = state.clone()
    for t in range(len(x)):
        queries, keys, values, gate = q[t], k[t], v[t], gates[t]
        written, beta = values, None
        if gating.delta:
            queries, keys = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (queries, keys))
        if gating.decay == "constant":
            log_decay = gating.log_decay.double()[:, None]
        elif gating.decay == "head":
            step = F.softplus(gate[num if gating.delta else 0 :][:num] + gating.dt_bias.double()).clamp(*gating.step_limits)
            log_decay = (-gating.a_log.double().exp() * step)[:, None]
            written = values if gating.delta else values * step[:, None]
            beta = gate[:num].sigmoid()
        else:
            raw = gate[: num * heads.key_dim].view(num, -1) + gating.dt_bias.double()
            rate = gating.a_log.double().exp()[:, None]
            log_decay = -rate * F.softplus(raw) if gating.floor is None else gating.floor * (rate * raw).sigmoid()
            beta = gate[num * heads.key_dim :].sigmoid()
        state = state * log_decay.exp()[:, None, :]
        if gating.delta:
            written = (values - (state @ keys[..., None]).squeeze(-1)) * beta[:, None]
        state = state + written[..., None] * keys[:, None, :]
        seen = (state @ queries[..., None]).squeeze(-1) * scale
        out.append(seen if gating.skip is None else seen + gating.skip.double()[:, None] * values)
    return torch.stack(out), state


@on_devices
@in_turn(("rule", RULES), ("lengths, places", crossed(LENGTHS, PLACES)))
def test_recurrences(rule: str, lengths: list[int], places: str, device: str) -> None:
    check_recurrence(rule, lengths, places, device, recur, tolerance=2e-5)


@on_devices
@pytest.mark.parametrize(
    ("rule", "dims"), [("constant", (24, 40)), ("mamba2", (128, 64)), ("mamba2", (8, 4)), ("constant", (160, 80))], ids=str
)
def test_linear_attention_in_chunks(rule: str, dims: tuple[int, int], device: str) -> None:
    """Two requests amid a chunk, one of whole chunks, one of a token; states in place and apart, from zeros and to nowhere."""
    lengths, exact = [70, 64, 1, 9], {"tolerance": 1e-4, "dims": dims}
    for places in PLACES:
        check_recurrence(rule, lengths, places, device, linear_chunks, **exact)
    check_recurrence(rule, lengths, "apart", device, linear_chunks, tolerance=2e-2, dims=dims, dtype=torch.bfloat16)


@on_devices
def test_decays_of_a_chunk_may_be_as_large_as_float32_has_them(device: str) -> None:
    """A chunk's tokens are 64 steps of up to e^-70 each apart: nothing overflows where a key comes behind its query."""
    check_recurrence("mamba2", [100], "apart", device, linear_chunks, tolerance=1e-3, shift=9.0)


def check_recurrence(
    rule: str,
    lengths: list[int],
    places: str,
    device: str,
    run: Callable[..., None],
    *,
    tolerance: float,
    dims: tuple[int, int] = (24, 40),
    dtype: torch.dtype = torch.float32,
    shift: float = -2.0,
) -> None:
    """Outputs and states against float64. dims: of a key and of a value; shift: of what decays are made of."""
    reads, writes = (pages[: len(lengths)] for pages in PLACES[places])
    asked, num_values, (key_dim, value_dim) = RULES[rule], 2, dims
    num_keys = num_values if asked.decay == "channel" else 1
    keys = num_keys * key_dim
    heads = Heads(
        num_keys=num_keys, num_values=num_values, key_dim=key_dim, value_dim=value_dim, q_at=3, k_at=3 + keys, v_at=3 + 2 * keys
    )
    per_key = (num_values, key_dim) if asked.decay == "channel" else (num_values,)
    gating = Gating(
        decay=asked.decay,
        delta=asked.delta,
        a_log=torch.rand(num_values).mul(8).add(1).log(),
        dt_bias=torch.randn(per_key) + shift,
        log_decay=-torch.rand(num_values),
        skip=None if asked.skip is None else torch.randn(num_values),
        floor=asked.floor,
        steps=asked.steps,
        step_limits=asked.step_limits if shift < 0 else (0.0, math.inf),
    )
    num_gates = num_values * (key_dim + 1 if asked.decay == "channel" else 2)
    x, gates = torch.randn(sum(lengths), 3 + 2 * keys + num_values * value_dim).to(dtype), torch.randn(sum(lengths), num_gates)
    states = torch.randn(70, num_values, value_dim, key_dim)
    kept, expected = states.double(), torch.empty(sum(lengths), num_values, value_dim, dtype=torch.float64)
    for rows, read, write in zip(each(lengths), reads, writes, strict=True):
        expected[rows], kept[write] = expected_of(
            x[rows].double(), gates[rows].double(), states[read].double(), heads=heads, gating=gating, scale=key_dim**-0.5
        )
    held, out = states.to(device), torch.empty(expected.shape, device=device)
    moved = Gating(**{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in vars(gating).items()})
    run(
        x.to(device),
        gates.to(device),
        states=held,
        rows=make_rows(lengths, reads, writes, device),
        heads=heads,
        gating=moved,
        scale=key_dim**-0.5,
        out=out,
    )
    for made, right in ((out, expected), (held, kept)):
        size = right.abs().max().item() if dtype is torch.bfloat16 else 1.0
        torch.testing.assert_close(made.cpu().double(), right, atol=tolerance * size, rtol=tolerance / 2)


@on_devices
@pytest.mark.parametrize("lengths", [[1, 1], [2]], ids=str)
def test_a_convolution_may_be_without_an_activation(lengths: list[int], device: str) -> None:
    x, weight, states = (torch.randn(size, device=device) for size in ((2, 5), (5, 2), (2, 1, 5)))
    before = torch.cat([states[:, 0], x[:1]])[[0, 1 if len(lengths) == 2 else 2]]
    out = torch.empty_like(x)
    convolve(x, weight, None, states=states, rows=make_rows(lengths, [0, 1], [0, 1], device), out=out, activates=False)
    torch.testing.assert_close(out, before * weight[:, 0] + x * weight[:, 1])


SCANNED = [*((lengths, "apart") for lengths in LENGTHS), *(([length, 1], "from zeros and nowhere") for length in (1, 2))]


@on_devices
@pytest.mark.parametrize(("lengths", "places"), SCANNED, ids=str)
def test_selective_scans(lengths: list[int], places: str, device: str) -> None:
    reads, writes = (pages[: len(lengths)] for pages in WITH_NONE[places])
    channels, state_dim = 70, 11
    x, skip = torch.randn(sum(lengths), channels), torch.randn(channels)
    gates = torch.randn(sum(lengths), channels + 2 * state_dim)
    gates[:, :channels] = F.softplus(gates[:, :channels] - 3)
    a_log, states = torch.rand(channels, state_dim).mul(8).add(1).log(), torch.randn(71, channels, state_dim)  # as of convolutions
    kept, expected = states.double(), torch.empty(x.shape, dtype=torch.float64)
    for rows, read, write in zip(each(lengths), reads, writes, strict=True):
        state = states[1 + read].double() if read >= 0 else torch.zeros(channels, state_dim, dtype=torch.float64)
        for t in range(rows.start, rows.stop):
            step, b, c = gates[t].double().split([channels, state_dim, state_dim])
            state = state * (-a_log.double().exp() * step[:, None]).exp() + (step * x[t].double())[:, None] * b
            expected[t] = state @ c + skip.double() * x[t].double()
        if write >= 0:
            kept[1 + write] = state
    held, out = states.to(device), torch.empty(x.shape, device=device)
    rows = make_rows(lengths, reads, writes, device)
    scan(
        x.to(device), gates.to(device), a_log=a_log.to(device), skip=skip.to(device), states=held[1:], rows=rows, scale=1.0, out=out
    )
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(held.cpu().double(), kept, atol=2e-5, rtol=1e-5)


def test_kernels_compile_for_hopper_without_a_gpu() -> None:
    compile_only.run(Path(__file__).with_name("hopper_kernels.py"))


@on_devices
@pytest.mark.parametrize("places", WITH_NONE)
@pytest.mark.parametrize(("rule", "width", "biased"), [("gated delta", 4, False), ("a decay for each channel", 2, True)], ids=str)
def test_recurrences_that_convolve_what_they_read(rule: str, width: int, biased: bool, places: str, device: str) -> None:
    """As a convolution of its own before them, and states are moved on once."""
    reads, writes = (pages[:3] for pages in WITH_NONE[places])
    decay, num, dim = RULES[rule].decay, 2, 24
    keys = num * dim if decay == "channel" else dim
    channels = 2 * keys + num * dim
    heads = Heads(num_keys=keys // dim, num_values=num, key_dim=dim, value_dim=dim, q_at=0, k_at=keys, v_at=2 * keys)
    per_key = (num, dim) if decay == "channel" else (num,)
    gating = Gating(decay=decay, delta=True, a_log=torch.rand(num, device=device), dt_bias=torch.randn(per_key, device=device))
    x, gates = torch.randn(3, channels, device=device), torch.randn(3, num * (dim + 1 if decay == "channel" else 2), device=device)
    weight, bias = torch.randn(width, channels, device=device).T, torch.randn(channels, device=device) if biased else None
    states, held = torch.randn(8, num, dim, dim, device=device), torch.randn(9, width - 1, channels, device=device)
    (before, inputs), in_front = held.split([1, 8]), held[:1].clone()
    rows, given = make_rows([1, 1, 1], reads, writes, device), dict(heads=heads, gating=gating, scale=dim**-0.5)
    kept, moved, convolved = states.clone(), inputs.clone(), torch.empty_like(x)
    expected, actual = (torch.empty(3, num, dim, device=device) for _ in range(2))
    convolve(x, weight, bias, states=moved, rows=rows, out=convolved)
    recur(convolved, gates, states=kept, rows=rows, out=expected, **given)
    arrived = torch.zeros(3 * heads.num_keys, dtype=torch.int32, device=device)
    conv = Conv(weight=weight, bias=bias, states=inputs, activates=True, arrived=arrived)
    recur(x, gates, states=states, rows=rows, out=actual, conv=conv, **given)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, kept, atol=1e-5, rtol=1e-5)
    assert torch.equal(inputs, moved)
    assert torch.equal(before, in_front), "page -1 is written"
    assert not arrived.any()


def calls_over(rows: Rows, *, single: bool) -> dict[str, Callable[[dict[str, torch.Tensor]], None]]:
    """Every kernel that runs over such rows, on memory that it is given."""
    heads, weight = Heads(num_keys=1, num_values=1, key_dim=8, value_dim=8, q_at=0, k_at=8, v_at=16), torch.randn(24, 4)
    delta = Gating(decay="head", delta=True, a_log=torch.zeros(1), dt_bias=torch.zeros(1))
    linear, a_log = Gating(decay="constant", delta=False, log_decay=-torch.ones(1)), torch.zeros(24, 4)
    arrived, given = torch.zeros(len(rows.reads), dtype=torch.int32), {"rows": rows, "scale": 1.0}

    def recurring(run: Callable[..., None], gating: Gating) -> Callable[..., None]:
        def call(of: dict[str, torch.Tensor], **conv: Conv) -> None:
            run(of["x"], of["gates"], states=of["matrix"], heads=heads, gating=gating, out=of["out"], **given, **conv)

        return call

    def within(of: dict[str, torch.Tensor]) -> None:
        conv = Conv(weight=weight, bias=None, states=of["inputs"], activates=True, arrived=arrived)
        recurring(recur, delta)(of, conv=conv)

    return {
        "convolve": lambda of: convolve(of["x"], weight, None, states=of["inputs"], rows=rows, out=of["flat"]),
        "recur": recurring(recur, delta),
        "chunks": recurring(linear_chunks, linear),
        "scan": lambda of: scan(of["x"], of["gates"], a_log=a_log, skip=None, states=of["scanned"], out=of["flat"], **given),
        **({"within": within} if single else {}),
    }


@NEEDS_INTERPRETER
@pytest.mark.parametrize("lengths", [[1, 1], [2, 9]], ids=str)
def test_kernels_that_start_early_read_what_others_write_when_they_have_waited(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And write nothing before. States are read before by single tokens' kernels alone: those of others may be the same step's."""
    count, single = sum(lengths), max(lengths) == 1
    sizes = {"x": (count, 24), "gates": (count, 32), "matrix": (3, 1, 8, 8), "inputs": (3, 3, 24), "scanned": (3, 24, 4)}
    there = {name: torch.randn(size) for name, size in {**sizes, "out": (count, 1, 8), "flat": (count, 24)}.items()}
    late = ["x", "gates"] if single else list(sizes)
    early = {name: torch.full_like(value, math.nan) if name in late else value for name, value in there.items()}
    memory: dict[str, torch.Tensor] = {}
    waits: list[bool] = []

    def wait(CHAINED: object) -> None:
        if not waits:
            for name, value in memory.items():
                assert torch.equal(value.view(torch.int32), early[name].view(torch.int32)), f"{name} is written"
                value.copy_(there[name])
        waits.append(True)

    for name, call in calls_over(make_rows(lengths, [0, 1], [2, 1], "cpu"), single=single).items():
        right = {name: value.clone() for name, value in there.items()}
        call(right)
        memory.update((name, value.clone()) for name, value in early.items())
        waits.clear()
        with monkeypatch.context() as patched:
            for module in (conv, recurrence, chunks):
                patched.setattr(module, "wait_for_predecessor", wait)
            call(memory)
        assert all(torch.equal(memory[part], value) for part, value in right.items()), f"{name} reads too early"
