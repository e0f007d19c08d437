"""The CPU's compiled attention gives the tokens that torch's gives, in every kind of layer that it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from parity.engine_driver import drain, greedy, options
from parity.oracle import FAMILIES, Oracle

from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose

compiled = pytest.importorskip("enginery_attn_cpu.native_part", reason="the plugin is not installed").kernels
pytestmark = pytest.mark.skipif(compiled is None, reason="its compiled part was not built")
NUM_TOKENS = 64


def tokens(oracle: Oracle, **asked: object) -> dict[str, list[int]]:
    """Of seven prompts, which decode beside each other's chunks."""
    wanted = options(oracle, max_batch_tokens=16, **asked)
    engine = Engine.build(wanted, Registry.load())
    for number, prompt in enumerate(oracle.prompts):
        engine.submit(greedy(str(number), prompt, max_tokens=NUM_TOKENS))
    found: dict[str, list[int]] = {}
    drain(engine, found)
    return found


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_sixty_four_greedy_tokens_are_those_of_torch(write_oracle: Callable[..., Oracle], family: str) -> None:
    oracle = write_oracle(family, FAMILIES[family])
    mine = tokens(oracle)
    assert mine == tokens(oracle, attention_backend="torch")
    assert {len(each) for each in mine.values()} == {NUM_TOKENS}


def test_it_is_chosen_where_it_can_attend(write_oracle: Callable[..., Oracle]) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    chosen = choose(options(oracle), Registry.load()).attention
    assert {role: offer.name for role, offer in chosen.by_role.items()} == {"softmax": "cpu"}
    latent = write_oracle("deepseek-v2", FAMILIES["deepseek-v2"])
    assert choose(options(latent), Registry.load()).attention.name == "torch"


def test_without_the_compiled_part_torch_does_all(write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginery_attn_cpu.native_part.kernels", None)
    oracle = write_oracle("llama", FAMILIES["llama"])
    chosen = choose(options(oracle), Registry.load()).attention
    assert {role: offer.name for role, offer in chosen.by_role.items()} == {"softmax": "torch"}
    assert any("install a C++ compiler" in line for line in chosen.considered)
