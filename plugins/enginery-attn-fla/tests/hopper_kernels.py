"""Compiles the kernel before chunks of a delta rule for compute capability 9.0: no GPU is needed for it."""

from __future__ import annotations

import compile_only
import torch

from enginery.api import RecurrentFacts, RecurrentWeights
from enginery_attn_fla.delta_inputs import prepare_delta


def main() -> None:
    compile_only.install()
    for decay in ("head", "channel"):
        facts = RecurrentFacts(rule="delta", decay=decay, key_heads=2, value_heads=2, key_dim=128, value_dim=128, conv_kernel=4)
        weights = RecurrentWeights(a_log=torch.zeros(2), dt_bias=torch.zeros(2, 128 if decay == "channel" else 1))
        mixed, gates = (torch.zeros(3, width, dtype=torch.bfloat16) for width in (facts.mixed_width, facts.gates_width))
        made = prepare_delta(mixed, gates, facts, weights)
        assert made.v.shape == (1, 3, 2, 128)


if __name__ == "__main__":
    main()
