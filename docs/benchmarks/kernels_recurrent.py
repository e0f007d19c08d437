"""Recurrent layers of decoding steps with enginery-attn-delta: `python docs/benchmarks/kernels_recurrent.py --output FILE`.

One layer's recurrence and its convolution on random inputs, each alone, and both as the backend runs them in a step: by one kernel
for one or two requests, else by two of which the second starts early. They are checked against float64 first. Then the same for
requests that verify three guesses each: without states written, and written. A time is that of one call among several in a CUDA
graph, each with states of its own. The floor is the states, read once and written once, over the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from kernels_moe import DEVICE, READ_TB_S, relative_error, time_us
from moe_shapes import DTYPE

from enginery_attn_delta.backend import CONVOLVED_WITHIN
from enginery_attn_delta.launch import CHUNK_ROWS, Conv, Gating, Heads, Rows, can_chain, convolve, recur

REQUESTS = (1, 64, 256)
WIDTH = 4
CHECKED = 4  # requests
VERIFYING = (1, 8, 64)
ROWS = 4  # of a request that verifies


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A recurrent layer of a model. decay: "head", "channel" or "constant"; delta, steps: as in Gating; convolves: as most do."""

    name: str
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    decay: str
    delta: bool = True
    steps: bool = False
    convolves: bool = True

    @property
    def heads(self) -> Heads:
        keys = self.num_keys * self.key_dim
        return Heads(
            num_keys=self.num_keys,
            num_values=self.num_values,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            q_at=0,
            k_at=keys,
            v_at=2 * keys,
        )

    @property
    def channels(self) -> int:
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def num_gates(self) -> int:
        return self.num_values * (self.key_dim + 1 if self.decay == "channel" else 2)

    def gating(self) -> Gating:
        per_key = (self.num_values, self.key_dim) if self.decay == "channel" else (self.num_values,)
        return Gating(
            decay=self.decay,  # type: ignore[arg-type]
            delta=self.delta,
            a_log=torch.rand(self.num_values, device=DEVICE).mul(8).add(1).log(),
            dt_bias=None if self.decay == "constant" else torch.randn(per_key, device=DEVICE) - 2,
            log_decay=-torch.rand(self.num_values, device=DEVICE),
            steps=self.steps,
        )


LAYERS = (
    Layer(name="Qwen3-Next", num_keys=16, num_values=32, key_dim=128, value_dim=128, decay="head"),
    Layer(name="Kimi-Linear-48B", num_keys=32, num_values=32, key_dim=128, value_dim=128, decay="channel"),
    Layer(
        name="MiniMax-Text-01",
        num_keys=64,
        num_values=64,
        key_dim=128,
        value_dim=128,
        decay="constant",
        delta=False,
        convolves=False,
    ),
    Layer(name="Nemotron-H-8B", num_keys=8, num_values=128, key_dim=128, value_dim=64, decay="head", delta=False, steps=True),
)


class Step:
    """One decoding step's inputs and states."""

    def __init__(self, layer: Layer, requests: int) -> None:
        self.layer, self.gating = layer, layer.gating()
        self.x = torch.randn((requests, layer.channels), dtype=DTYPE, device=DEVICE)
        self.gates = torch.randn((requests, layer.num_gates), dtype=DTYPE, device=DEVICE)
        self.weight = torch.randn((layer.channels, WIDTH), dtype=DTYPE, device=DEVICE)
        shape = (layer.num_values, layer.value_dim, layer.key_dim)
        self.states = torch.randn((requests, *shape), device=DEVICE)
        self.inputs = torch.randn((requests, WIDTH - 1, layer.channels), dtype=DTYPE, device=DEVICE)
        self.out = torch.full((requests, *shape[:2]), torch.nan, dtype=DTYPE, device=DEVICE)
        self.convolved = torch.full_like(self.x, torch.nan)
        self.handed_on = torch.full_like(self.x, torch.nan, dtype=torch.float32)
        self.conv = Conv(
            weight=self.weight,
            bias=None,
            states=self.inputs,
            activates=True,
            arrived=torch.zeros(requests * layer.num_keys, dtype=torch.int32, device=DEVICE),
        )
        pages = torch.randperm(requests, device=DEVICE).int()
        begins = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
        self.rows = Rows(first_rows=begins[:-1], stop_rows=begins[1:], reads=pages, writes=pages, tiles=None, longest=1)

    def recur(self, x: torch.Tensor | None = None, *, rows: Rows | None = None, conv: Conv | None = None) -> None:
        """x: after the convolution, or before conv."""
        gates = None if self.layer.decay == "constant" else self.gates
        settings: dict[str, Any] = dict(heads=self.layer.heads, gating=self.gating, scale=self.layer.key_dim**-0.5, conv=conv)
        recur(self.x if x is None else x, gates, states=self.states, rows=rows or self.rows, out=self.out, **settings)

    def convolve(self) -> None:
        convolve(self.x, self.weight, None, states=self.inputs, rows=self.rows, out=self.convolved)

    def advance(self) -> None:
        """Both, as `DeltaAttention.advance_rows` has it."""
        rows = dataclasses.replace(self.rows, chained=can_chain(self.x.device))
        if self.layer.convolves and len(self.x) <= CONVOLVED_WITHIN:
            self.recur(rows=rows, conv=self.conv)
        else:
            self.advance_apart(rows)

    def advance_apart(self, rows: Rows) -> None:
        """The convolution, if there is one, then the recurrence."""
        if self.layer.convolves:
            convolve(self.x, self.weight, None, states=self.inputs, rows=rows, out=self.handed_on)
        self.recur(self.handed_on if self.layer.convolves else self.x, rows=rows)

    def exact(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: of the first requests, [CHECKED, channels] float64 -> outputs and states, in float64."""
        layer, gating, pages = self.layer, self.gating, self.rows.reads[:CHECKED].long()
        keys, groups = layer.num_keys * layer.key_dim, layer.num_values // layer.num_keys
        gates = self.gates[:CHECKED].double()
        q, k = (x[:, at : at + keys].unflatten(1, (-1, layer.key_dim)).repeat_interleave(groups, 1) for at in (0, keys))
        v = x[:, 2 * keys :].unflatten(1, (-1, layer.value_dim))
        written, beta = v, gates[:, -layer.num_values :].sigmoid()[..., None]
        if layer.delta:
            q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
        if layer.decay == "constant":
            decay = gating.log_decay.double().exp()[None, :, None]
        elif layer.decay == "channel":
            raw = gates[:, : -layer.num_values].unflatten(1, (-1, layer.key_dim)) + gating.dt_bias
            decay = (-gating.a_log.double().exp()[:, None] * F.softplus(raw)).exp()
        else:
            beta = gates[:, : layer.num_values].sigmoid()[..., None]
            step = F.softplus(gates[:, layer.num_values if layer.delta else 0 :][:, : layer.num_values] + gating.dt_bias)
            decay = (-gating.a_log.double().exp() * step).exp()[..., None]
            written = v * step[..., None] if layer.steps else v
        state = self.states[pages].double() * decay[:, :, None, :]
        if layer.delta:
            written = (v - (state @ k[..., None]).squeeze(-1)) * beta
        state += written[..., None] * k[:, :, None, :]
        return (state @ q[..., None]).squeeze(-1) * layer.key_dim**-0.5, state

    def exactly_convolved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first requests' convolutions in float64, [CHECKED, channels], and their inputs from there on."""
        taps = torch.cat([self.inputs[self.rows.reads[:CHECKED].long()], self.x[:CHECKED, None]], 1)
        return F.silu((taps.double() * self.weight.double().T).sum(1)), taps[:, 1:]

    def check(self) -> dict[str, float]:
        """Relative errors of outputs, states and convolutions, each alone; then of both as in a step."""
        pages = self.rows.reads[:CHECKED].long()
        x = self.x[:CHECKED].double()
        convolved, inputs = self.exactly_convolved()
        expected, state = self.exact(x)
        self.recur()
        self.convolve()
        assert not self.out.isnan().any()
        assert not self.convolved.isnan().any()
        assert torch.equal(self.inputs[pages], inputs)
        found = {
            "error": relative_error(self.out[:CHECKED], expected),
            "error_of_state": relative_error(self.states[pages], state),
            "error_of_convolution": relative_error(self.convolved[:CHECKED], convolved),
        }
        convolved, inputs = self.exactly_convolved()
        expected, state = self.exact(convolved if self.layer.convolves else x)
        self.out.fill_(torch.nan)
        self.advance()
        assert not self.out.isnan().any()
        assert not self.layer.convolves or torch.equal(self.inputs[pages], inputs)
        found["error_of_layer"] = relative_error(self.out[:CHECKED], expected)
        found["error_of_layer_state"] = relative_error(self.states[pages], state)
        assert found["error_of_layer"] < 1e-2, found
        assert found["error_of_layer_state"] < 1e-5, found
        assert found["error"] < 1e-2, found
        assert found["error_of_state"] < 1e-5, found
        assert found["error_of_convolution"] < 1e-2, found
        return found


class Verification:
    """Three guesses of each request and the token before them."""

    def __init__(self, layer: Layer, requests: int) -> None:
        assert ROWS <= CHUNK_ROWS
        self.steps = [Step(layer, requests) for _ in range(ROWS)]
        self.together, self.last = Step(layer, requests), self.steps[-1]
        for name in ("x", "gates"):
            setattr(self.together, name, torch.stack([getattr(step, name) for step in self.steps], 1).flatten(0, 1))
        for step in self.steps:
            step.weight, step.gating, step.rows = self.together.weight, self.together.gating, self.together.rows
            step.states, step.inputs = self.last.states, self.last.inputs
        self.last.states.copy_(self.together.states)
        self.last.inputs.copy_(self.together.inputs)
        self.together.out = self.together.out.repeat_interleave(ROWS, 0)
        self.together.handed_on = torch.empty(self.together.x.shape, device=DEVICE)
        begins = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * ROWS
        tiles = torch.stack([torch.arange(requests), torch.zeros(requests)], 1).int().to(DEVICE)
        moved = dataclasses.replace(
            self.together.rows,
            first_rows=begins[:-1],
            stop_rows=begins[1:],
            tiles=tiles,
            longest=ROWS,
            chained=can_chain(begins.device),
        )
        self.moved, self.kept = moved, dataclasses.replace(moved, writes=torch.full_like(moved.writes, -1))

    def verify(self) -> None:
        """No state is written."""
        self.together.advance_apart(self.kept)

    def commit(self) -> None:
        """All rows stand."""
        self.together.advance_apart(self.moved)

    def check(self) -> float:
        """The relative error to tokens one after the other, which were compared with float64."""
        before = self.together.states.clone()
        self.verify()
        assert torch.equal(before, self.together.states)
        verified = self.together.out.clone()
        self.commit()
        assert torch.equal(verified, self.together.out)
        for step in self.steps:
            step.advance_apart(step.rows)
        assert torch.equal(self.last.inputs, self.together.inputs) or not self.last.layer.convolves
        error = relative_error(self.together.states, self.last.states.double())
        assert error < 1e-5, error
        found = relative_error(verified, torch.stack([step.out for step in self.steps], 1).flatten(0, 1).double())
        assert found < 1e-2, found
        return found


def compare() -> Iterator[dict[str, Any]]:
    for layer in LAYERS:
        for requests in REQUESTS:
            steps = [Step(layer, requests) for _ in range(12 if requests > 1 else 24)]
            num_bytes = 2 * steps[0].states.nbytes
            found = {"model": layer.name, "requests": requests, "state_bytes": num_bytes, **steps[0].check()}
            found["floor_us"] = round(num_bytes / READ_TB_S / 1e6, 2)
            found["recurrence_us"] = round(time_us([partial(step.recur) for step in steps], replays=21), 2)
            found["convolution_us"] = round(time_us([partial(step.convolve) for step in steps], replays=21), 2)
            found["layer_us"] = round(time_us([partial(step.advance) for step in steps], replays=21), 2)
            yield found


def verified() -> Iterator[dict[str, Any]]:
    for layer in LAYERS:
        for requests in VERIFYING:
            error = Verification(layer, requests).check()
            each = [Verification(layer, requests) for _ in range(6)]
            yield {
                "model": layer.name,
                "requests": requests,
                "error": error,
                "verify_us": round(time_us([one.verify for one in each], replays=21), 2),
                "commit_us": round(time_us([one.commit for one in each], replays=21), 2),
            }


LINE = "{model:16} {requests:4} requests: {layer_us:8.2f} us, floor {floor_us:8.2f}; {recurrence_us:8.2f} and {convolution_us:7.2f}"


def main() -> None:
    """Prints a line each; the report goes to --output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="unknown")
    asked = parser.parse_args()
    found = []
    for each in compare():
        found.append(each)
        print(LINE.format(**each))
    verifying = []
    for each in verified():
        verifying.append(each)
        print("{model:16} {requests:4} verify: {verify_us:8.2f} us, written {commit_us:8.2f}".format(**each))
    if asked.output:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        report = {
            "command": " ".join(sys.argv),
            "commit": asked.commit,
            "device": torch.cuda.get_device_name(),
            "versions": versions,
        }
        asked.output.write_text(
            json.dumps({**report, "versions": versions, "rows": found, "verifying": verifying}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
