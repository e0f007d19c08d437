"""Ling 1 and 2.0, from files as the hub has them, equal models of transformers that compute the same: see `ling_made`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairwise import EVERYTHING, crossed, in_turn
from parity.engine_driver import assert_greedy, assert_last_logits, assert_ranks, generate, options, rounding_error
from parity.ling_made import LINGS, write_ling
from parity.oracle import NUM_GREEDY, Oracle
from parity.test_moe_parity import prompt_logits

from enginery.checkpoint.files import scan_checkpoint
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry


@pytest.fixture(scope="session")
def made(write_oracle: Callable[..., Oracle], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Each once."""
    known: dict[str, Oracle] = {}

    def ling(name: str) -> Oracle:
        if name not in known:
            known[name] = write_ling(write_oracle(f"as {name}", LINGS[name]), tmp_path_factory.mktemp(name))
        return known[name]

    return ling


@pytest.fixture(params=LINGS)
def oracle(request: pytest.FixtureRequest, made: Callable[[str], Oracle]) -> Oracle:
    return made(request.param)


def test_files_have_the_hubs_names(made: Callable[[str], Oracle]) -> None:
    stored = scan_checkpoint(made("ling-2").folder)
    assert stored["model.layers.1.attention.query_key_value.weight"].shape == ((4 + 2 * 2) * 16, 64)
    assert stored["model.layers.1.mlp.gate.expert_bias"].shape == (16,)
    assert {name.split(".")[1] for name in stored if name.startswith("model.")} == {"word_embeddings", "layers", "norm"}
    assert "lm_head.weight" not in scan_checkpoint(made("ling-2-yarn").folder)
    assert not any("self_attn" in name or "shared_expert." in name for name in [*stored, *scan_checkpoint(made("ling").folder)])


@pytest.mark.parametrize("ops", ["packed", "reference"])
def test_logits_of_a_prompt_are_within_1e_4(oracle: Oracle, ops: str) -> None:
    registry = Registry.load(blocked=() if ops == "packed" else ("ops-cpu",))
    expected = oracle.logits(oracle.prompts[4])
    torch.testing.assert_close(prompt_logits(registry, oracle, oracle.prompts[4]), expected, atol=1e-4, rtol=0)


@in_turn(("oracle", LINGS), ("page_size, chunk, batch", crossed([1, 16], [16, 4096], [1, 7])), indirect=["oracle"])
def test_greedy_tokens_are_equal(oracle: Oracle, registry: Registry, *, page_size: int, chunk: int, batch: int) -> None:
    asked = options(oracle, page_size=page_size, max_batch_tokens=chunk, max_batch_requests=min(chunk, 256))
    prompts = oracle.prompts if batch == 7 else [oracle.prompts[1]]
    assert_greedy(oracle, generate(Engine.build(asked, registry), prompts), prompts)


def test_a_cached_prompt_gives_the_same_tokens(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, page_size=16), registry)
    prompt = oracle.prompts[5]
    (first,) = generate(engine, [prompt])
    assert_greedy(oracle, [first, *generate(engine, [prompt])], [prompt, prompt])
    assert engine.meter.stats().pages["full"].cached >= 4
    longer = prompt + first[:20]
    assert generate(engine, [longer], max_tokens=NUM_GREEDY - 20) == [first[20:]]


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(2, 1), (1, 2), (4, 2)] if EVERYTHING else [(4, 2)])
def test_ranks_have_their_parts_of_what_is_in_one_piece(oracle: Oracle, tensor_size: int, num_stages: int) -> None:
    assert_ranks(oracle, oracle.prompts[4], tensor_size=tensor_size, num_stages=num_stages)


def test_half_precision_stays_close(oracle: Oracle, registry: Registry) -> None:
    assert rounding_error(oracle, registry) < 0.06


def test_rotated_dims_may_be_stated_in_place_of_the_factor(
    made: Callable[[str], Oracle], registry: Registry, tmp_path: Path
) -> None:
    """As Ling-1T's file does."""
    oracle = made("ling-2")
    config = json.loads((oracle.folder / "config.json").read_text())
    del config["partial_rotary_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rotary_dim": 8}))
    (tmp_path / "model.safetensors").symlink_to(oracle.folder / "model.safetensors")
    assert_last_logits(oracle, registry, oracle.prompts[4:5], model=str(tmp_path))
