"""States after thousands of tokens, prompts in pieces and then tokens one by one, against the recurrences in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from enginery.api import (
    FULL,
    STATE,
    AttnLayerFacts,
    BackendContext,
    ForwardBatch,
    GlobalLayerId,
    KVGeometry,
    LayerSpec,
    LocalLayerId,
    Phase,
    RecurrentFacts,
    RecurrentWeights,
    StateView,
    View,
)
from enginery.kv.arena import DeviceArena
from enginery.kv.pool import PagedKVPool
from enginery.kv.states import RecurrentStatePool
from enginery.testing import reference
from enginery_attn_linear.backend import LinearAttention

RULES = {
    "lightning": {"rule": "linear", "decay": "constant"},
    "Mamba2": {"rule": "linear", "decay": "head", "ssm": True},
    "gated delta": {"rule": "delta", "decay": "head", "conv_kernel": 4},
    "KDA": {"rule": "delta", "decay": "channel", "conv_kernel": 4},
    "KDA with a floor": {"rule": "delta", "decay": "channel", "gate_floor": -5.0},
    "scan": {"rule": "scan", "decay": "channel"},
}
PIECES = [1500, 1, 1, 2047, 546, 1]  # of 4,096 tokens
HEADS, DIM = 2, 16


def facts_of(name: str) -> RecurrentFacts:
    sizes = {"key_heads": HEADS, "value_heads": HEADS, "key_dim": DIM, "value_dim": DIM}
    if name == "scan":
        sizes |= {"key_heads": 1, "value_heads": 24, "value_dim": 1}
    return RecurrentFacts(**sizes | RULES[name])


def weights_of(facts: RecurrentFacts, dtype: torch.dtype) -> RecurrentWeights:
    """Decays of thousands of tokens, so that an error is not forgotten."""
    heads, per_key = facts.value_heads, (facts.value_heads, facts.key_dim)
    conv = (torch.randn(facts.mixed_width, 4) / 2).to(dtype) if facts.conv_kernel else None
    if facts.decay == "constant":
        return RecurrentWeights(log_decay=-torch.rand(heads) / 1000)
    a_log = torch.randn(per_key if facts.rule == "scan" else (heads,)) - (0.0 if facts.gate_floor else 7.0)
    shift = 8.0 if facts.gate_floor else 0.0
    bias = None if facts.rule == "scan" else torch.randn(per_key if facts.decay == "channel" else (heads,)) - shift
    return RecurrentWeights(conv=conv, a_log=a_log, dt_bias=bias, skip=torch.randn(heads) if facts.ssm else None)


def rows_of(facts: RecurrentFacts, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    mixed, gates = torch.randn(count, facts.mixed_width), torch.randn(count, facts.gates_width)
    if facts.rule == "scan":
        gates[:, : facts.value_heads] = torch.nn.functional.softplus(gates[:, : facts.value_heads])
    return mixed.to(dtype), gates.to(dtype)


def piece(before: int, count: int) -> ForwardBatch:
    """So many tokens of the only request, whose state is in page 1."""
    tokens, pages = torch.zeros(count, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    return ForwardBatch(
        phase=Phase.PREFILL if count > 1 else Phase.DECODE,
        input_ids=tokens,
        positions=tokens,
        q_lens_cpu=torch.tensor([count], dtype=torch.int32),
        kv_lens_cpu=torch.tensor([before + count], dtype=torch.int32),
        num_logits_cpu=torch.ones(1, dtype=torch.int32),
        seats_cpu=pages,
        views={
            FULL: View(slots=tokens, page_table_cpu=torch.zeros(1, 1, dtype=torch.int32)),
            STATE: StateView(reads_cpu=pages, writes_cpu=pages),
        },
    )


DTYPES = itertools.cycle((torch.float32, torch.bfloat16))


@pytest.mark.parametrize(("rule", "dtype"), list(zip(RULES, DTYPES, strict=False)), ids=str)
def test_a_state_is_exact_after_4096_tokens(rule: str, dtype: torch.dtype) -> None:
    """Of rows in half precision too: what they are moved on by is float32."""
    facts, cpu = facts_of(rule), torch.device("cpu")
    layer = AttnLayerFacts(num_heads=facts.key_heads, num_kv_heads=facts.key_heads, head_dim=DIM, recurrent=facts)
    geometry = KVGeometry(
        pages={FULL: 1, STATE: 2}, page_size=4, layers=(layer,), dtype="float32", state_dtype=str(dtype).removeprefix("torch.")
    )
    states = RecurrentStatePool(geometry, cpu)
    backend = LinearAttention(
        BackendContext(
            instance="linear#0",
            geometry=geometry,
            pool=PagedKVPool(geometry, cpu),
            states=states,
            device=cpu,
            dtype=dtype,
            arena=DeviceArena(cpu),
        )
    )
    weights, (mixed, gates) = weights_of(facts, dtype), rows_of(facts, sum(PIECES), dtype)
    spec = LayerSpec(global_id=GlobalLayerId(0), local_id=LocalLayerId(0), facts=layer, scale=DIM**-0.5, recurrent=weights)
    for count, stop in zip(PIECES, itertools.accumulate(PIECES), strict=True):
        batch, rows = piece(stop - count, count), slice(stop - count, stop)
        out = torch.empty(count, facts.value_heads, facts.value_dim, dtype=dtype)
        backend.advance(mixed[rows], gates[rows], spec, batch, backend.plan_forward_metadata(batch, capture=False), out)
    _, expected = reference.recurrence(mixed, gates, facts=facts, weights=weights, scale=spec.scale)
    found, matrix = states.layer(LocalLayerId(0))["matrix"][1].double(), expected["matrix"]
    assert matrix.norm() > 1
    assert (found - matrix).norm() / matrix.norm() <= 1e-5
