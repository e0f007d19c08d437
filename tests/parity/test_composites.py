"""Engines whose attention is composed give transformers' tokens, and are composed as asked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from offers import offering
from pairwise import in_turn
from parity.engine_driver import assert_greedy, generate, options
from parity.oracle import FAMILIES, Oracle

from enginery.contracts.attention import AttnBackendSpec
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, PluginError, Unsupported
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose

SPLIT = {"prefill_attention_backend": "torch", "decode_attention_backend": "torch"}
ASKED = {
    "split": (SPLIT, "split(target/0/prefill/torch#N, target/0/decode/torch#N)"),
    "prefill named": ({"prefill_attention_backend": "torch"}, "split(target/0/prefill/torch#N, target/0/decode/torch#N)"),
    "micro": ({"micro_batches": True}, "micro(target/0/softmax/torch#N)"),
    "both": ({**SPLIT, "micro_batches": True}, "micro(split(target/0/prefill/torch#N, target/0/decode/torch#N))"),
}


def without_numbers(backend_id: str) -> str:
    """What is composed of what: the numbers count over the process."""
    return re.sub("#[0-9]+", "#N", backend_id)


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Without the CPU's backend for decoding, which would be a part of every composite if it was compiled here."""
    return Registry.load(blocked=("attn-cpu",))


@in_turn(("asked", ASKED), ("family, max_batch_tokens", [("mistral", 4096), ("llama", 4096), ("llama", 16), ("mistral", 16)]))
def test_composed_attention_changes_no_token(
    write_oracle: Callable[..., Oracle], registry: Registry, *, family: str, asked: str, max_batch_tokens: int
) -> None:
    oracle = write_oracle(family, FAMILIES[family])
    changes, composed = ASKED[asked]
    wanted = options(oracle, max_batch_tokens=max_batch_tokens, **changes)
    parts = build_parts(wanted, registry)
    if family == "mistral":  # its windows are a kind of memory of their own, told apart in each of the micro-batches
        composed = re.sub(r"^(micro\()?(.*?)(?(1)\))$", r"\1kinds(\2)", composed) + ")" * changes.get("micro_batches", False)
    assert without_numbers(parts.step.relay.backend_id) == composed
    engine = Engine(parts, registry, wanted)
    assert engine.facts.attn_backend == "torch"
    assert_greedy(oracle, generate(engine, oracle.prompts))


def test_left_to_choose_it_takes_the_best_for_each_phase(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    torch_offer = next(offer for offer in registry.offers(AttnBackendSpec) if offer.name == "torch")
    spec = dataclasses.replace(torch_offer.spec, name="prefiller", priority=0, prefill_priority=99)
    prefiller = dataclasses.replace(torch_offer, name="prefiller", spec=spec)
    both = offering(registry, AttnBackendSpec, *registry.offers(AttnBackendSpec), prefiller)
    wanted = options(write_oracle("llama", FAMILIES["llama"]))
    chosen = {role: offer.name for role, offer in choose(wanted, both).attention.by_role.items()}
    assert chosen == {"prefill": "prefiller", "decode": "torch"}
    assert set(choose(wanted, registry).attention.by_role) == {"softmax"}


@pytest.mark.parametrize("strategy", ["auto", "chunked"])
def test_latent_attention_under_a_split_and_micro_batches_changes_no_token(
    write_oracle: Callable[..., Oracle], registry: Registry, strategy: str
) -> None:
    oracle = write_oracle("deepseek-v2", FAMILIES["deepseek-v2"])
    wanted = options(oracle, **SPLIT, micro_batches=True, mla_prefill=strategy, mla_chunk_tokens=24, max_batch_tokens=24)
    parts = build_parts(wanted, registry)
    composed = "micro(split(mla(target/0/prefill/torch#N), mla(target/0/decode/torch#N)))"
    assert without_numbers(parts.step.relay.backend_id) == composed
    assert_greedy(oracle, generate(Engine(parts, registry, wanted), oracle.prompts))


def test_what_cannot_be_honoured_is_refused_with_its_reason(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    with pytest.raises(ConfigError, match="mla_prefill is 'ragged', but must be one of auto, absorbed, one-shot, chunked"):
        build_parts(options(oracle, mla_prefill="ragged"), registry)
    for name in ("mla_prefill", "linear_attention_backend"):
        with pytest.raises(ConfigError, match=f"{name} is 'chunked', but the model has no (MLA|recurrent) layers; leave it out"):
            build_parts(options(oracle, **{name: "chunked"}), registry)
    with pytest.raises(PluginError, match="no attention backend 'troch'; did you mean torch"):
        build_parts(options(oracle, decode_attention_backend="troch"), registry)
    with pytest.raises(Unsupported, match="softmax attention is needed and not offered"):
        build_parts(options(oracle, prefill_attention_backend="linear"), registry)
