"""What a model asks of a backend, and what is said of a backend that cannot."""

from __future__ import annotations

import dataclasses

from enginery.config.resolve import DeviceFacts, resolve
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnLayerFacts, AttnNeeds, Capabilities, LatentFacts, capability_refusals
from enginery.contracts.memory import RecurrentFacts
from enginery.contracts.model import ModelFacts
from enginery.worker.needs import LayerNeeds


def test_the_needs_of_a_model_are_its_facts_and_the_settings() -> None:
    layer = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=8)
    linear = AttnLayerFacts(
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        recurrent=RecurrentFacts(rule="linear", decay="head", key_heads=2, value_heads=2, key_dim=8, value_dim=8),
    )
    facts = ModelFacts(vocab_size=8, hidden_size=8, max_positions=64, activation_width=8, layers=(layer, linear))
    device = DeviceFacts(kind="cuda", name="card", available_bytes=0, num_threads=1, compute_capability=(9, 0))
    settings = resolve(EngineOptions(dtype="bfloat16", kv_dtype="fp8", page_size=32), device, facts, config={})
    needs = LayerNeeds.of(facts.layers, settings, device).softmax
    assert (needs.dtype, needs.kv_dtype, needs.page_size, needs.layers) == ("bfloat16", "float8_e4m3fn", 32, (layer,))
    assert needs.compute_capability == (9, 0)
    recurrent = LayerNeeds.of(facts.layers, settings, device).recurrent
    assert (recurrent.kv_dtype, recurrent.layers) == ("bfloat16", (linear,))


def test_what_a_model_needs_and_a_backend_lacks_is_a_reason() -> None:
    latent = AttnLayerFacts(
        num_heads=2, num_kv_heads=1, head_dim=24, latent=LatentFacts(rank=16, rope_dim=8, nope_dim=8, value_dim=8)
    )
    linear = AttnLayerFacts(
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        recurrent=RecurrentFacts(rule="linear", decay="head", key_heads=2, value_heads=2, key_dim=8, value_dim=8),
    )
    softmax = dataclasses.replace(linear, recurrent=None)
    sets = dict(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), kv_dtypes=frozenset({"float32"}))
    where = dict(device="cpu", dtype="float32", kv_dtype="float32", page_size=16)

    def rules(layer: AttnLayerFacts, *, ragged: bool = False, **claims: object) -> list[str]:
        needs = AttnNeeds(**where, layers=(layer,), mla_ragged=ragged, lse=ragged)
        return [reason.rule for reason in capability_refusals(Capabilities(**sets, **claims), needs)]

    assert rules(latent) == ["MLA"]
    assert rules(latent, mla=True, head_dims=frozenset({128})) == []
    assert rules(latent, mla=True, latent_dims=frozenset({(512, 64)})) == ["latent rank and rope dim"]
    assert rules(latent, ragged=True, mla=True) == ["ragged MLA prefill", "a log-sum-exp"]
    assert rules(latent, ragged=True, mla=True, mla_ragged=True, lse_base="2") == []
    assert rules(linear) == ["recurrence"]
    layers = (softmax, dataclasses.replace(softmax, head_dim=16))
    no_head_dim = capability_refusals(Capabilities(**sets, head_dims=frozenset()), AttnNeeds(**where, layers=layers))
    assert [reason.text for reason in no_head_dim] == ["no head dim is offered"]
    assert rules(linear, recurrences=frozenset({("linear", "head")}), causal=False) == []
    assert rules(linear, recurrences=frozenset({("delta", "head")})) == ["recurrence"]
    assert rules(softmax, recurrences=frozenset({("linear", "head")}), causal=False) == ["softmax attention"]


def test_a_card_whose_capability_nobody_knows_is_not_called_no_card() -> None:
    can = Capabilities(devices=frozenset({"cuda", "cpu"}), dtypes=frozenset({"float32"}), kv_dtypes=frozenset({"float32"}))
    can = dataclasses.replace(can, min_compute_capability=(8, 0))
    layer = AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=8)
    texts = {}
    for device in ("cuda", "cpu"):
        needs = AttnNeeds(device=device, dtype="float32", kv_dtype="float32", page_size=16, layers=(layer,))
        texts[device] = [reason.text for reason in capability_refusals(can, needs)]
    assert texts["cuda"] == ["needs compute capability 8.0 or more, that of the device is not known"]
    assert texts["cpu"] == ["needs compute capability 8.0 or more, the device is no CUDA device"]
