"""The kits' recurrences in float64 beside those that fla-core writes out token by token in torch: two authors, one formula."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

from enginery.api import RecurrentFacts, RecurrentWeights
from enginery.testing import reference

FLA = importlib.util.find_spec("fla")
pytestmark = pytest.mark.skipif(
    FLA is None, reason="fla-core is not installed beside the tests: transformers would take its kernels, which refuse CPUs"
)

LENGTH, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 300, 2, 4, 32, 24
ROUNDING = 1e-5  # fla-core's are in float32


def facts_of(rule: str, decay: str) -> RecurrentFacts:
    heads = {"key_heads": HEADS if decay == "channel" else KEY_HEADS, "value_heads": HEADS}
    return RecurrentFacts(rule=rule, decay=decay, key_dim=KEY_DIM, value_dim=VALUE_DIM, **heads)


def heads_of(mixed: torch.Tensor, facts: RecurrentFacts) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values: each [1, L, HV, its dim]."""
    q, k, v = mixed.split(list(facts.mixed_widths), dim=-1)
    q, k = (part.view(1, LENGTH, facts.key_heads, KEY_DIM).repeat_interleave(HEADS // facts.key_heads, dim=2) for part in (q, k))
    if facts.rule == "delta":
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    return q, k, v.view(1, LENGTH, HEADS, VALUE_DIM)


def gates_of(gates: torch.Tensor, facts: RecurrentFacts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What decays are made of, and what is written of each token; None: all of it."""
    if facts.rule == "linear":
        return gates, None
    if facts.decay == "channel":
        return gates[:, :-HEADS], gates[:, -HEADS:]
    return gates[:, HEADS:], gates[:, :HEADS]


@pytest.mark.parametrize(
    ("rule", "decay", "module", "function"),
    [
        ("delta", "head", "gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        ("delta", "channel", "kda", "naive_recurrent_kda"),
        ("linear", "head", "simple_gla", "naive_recurrent_simple_gla"),
    ],
)
def test_outputs_and_states_are_those_of_fla_core(rule: str, decay: str, module: str, function: str) -> None:
    (folder,) = FLA.submodule_search_locations  # the file alone: the package would import all kernels
    naive = runpy.run_path(str(Path(folder) / "ops" / module / "naive.py"))[function]
    facts, generator = facts_of(rule, decay), torch.Generator().manual_seed(7)
    mixed = torch.randn(LENGTH, facts.mixed_width, generator=generator)
    gates = torch.randn(LENGTH, facts.gates_width, generator=generator)
    a_log = torch.randn(HEADS, generator=generator) - 3
    weights = RecurrentWeights(a_log=a_log)
    q, k, v = heads_of(mixed, facts)
    sizes = (HEADS, KEY_DIM) if decay == "channel" else (HEADS,)
    raw, beta = gates_of(gates, facts)
    steps = torch.nn.functional.softplus(raw).view(1, LENGTH, *sizes)
    decays = -a_log.exp().view(HEADS, *[1] * (len(sizes) - 1)) * steps
    given = {"q": q, "k": k, "v": v, "g": decays, "scale": KEY_DIM**-0.5, "output_final_state": True}
    theirs, their_state = naive(**given if beta is None else given | {"beta": beta.sigmoid()[None]})
    ours, states = reference.recurrence(mixed, gates, facts=facts, weights=weights, scale=KEY_DIM**-0.5)
    for found, expected in ((theirs[0], ours), (their_state[0].mT, states["matrix"])):
        assert (found - expected).norm() < ROUNDING * expected.norm()
