"""What is counted of a model: a family of every kind of layer, small enough to add up by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from enginery.bench.sizes import ContextSizes, ExpertSizes, ModelSizes, family_sizes
from enginery.contracts.attention import AttnLayerFacts, LatentFacts
from enginery.contracts.memory import RecurrentFacts
from enginery.contracts.model import ModelContext, ModelFacts, ModelSpec
from enginery.contracts.weights import ExpertNames, ExpertsShape, LinearShape

VOCAB, HIDDEN, INNER = 50, 8, 6
FULL = AttnLayerFacts(num_heads=4, num_kv_heads=1, head_dim=4)
NARROW = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=2, sliding_window=3)
LATENT = AttnLayerFacts(
    num_heads=4, num_kv_heads=1, head_dim=16 + 2, latent=LatentFacts(rank=16, rope_dim=2, nope_dim=3, value_dim=5)
)
DELTA = RecurrentFacts(rule="delta", decay="head", key_heads=2, value_heads=4, key_dim=8, value_dim=16, conv_kernel=4)
RECURRENT = AttnLayerFacts(num_heads=2, num_kv_heads=2, head_dim=8, recurrent=DELTA)


def sizes(*layers: AttnLayerFacts, kv_dtype: str | None = None, **config: object) -> ModelSizes | None:
    """Of a model with these layers, and one mixture for each number of experts in `experts`. tied: the head is the embedding."""

    vocab = config.get("vocab", VOCAB)

    def describe(config: Mapping[str, object]) -> ModelFacts:
        return ModelFacts(vocab_size=vocab, hidden_size=HIDDEN, max_positions=64, activation_width=1, layers=layers or (FULL,))

    def build(context: ModelContext) -> None:
        weights = context.weights
        weights.take("embed.weight", (vocab, HIDDEN))
        weights.take("norm.weight", (HIDDEN,))
        weights.linear(LinearShape(names=("q",), rows=(HIDDEN,), columns=HIDDEN, bias=True))
        weights.linear(LinearShape(names=("k", "v"), rows=(2, 2), columns=HIDDEN))
        weights.take("conv.weight", (5, 1, 4))
        for index, count in enumerate(config.get("experts", ())):
            block = weights.scope(f"layers.{index}.mlp")
            block.take("gate.weight", (count, HIDDEN), dtype=torch.float32)
            block.experts(ExpertsShape(names=ExpertNames(), count=count, inner=INNER, hidden=HIDDEN, joined=1))
        name = "embed" if config.get("tied") else "lm_head"
        weights.linear(LinearShape(names=(name,), rows=(vocab,), columns=HIDDEN))

    family = ModelSpec(name="every kind", api=(2, 0), architectures=(), describe=describe, build=build)
    return family_sizes(family, config, dtype="bfloat16", kv_dtype=kv_dtype)


PRODUCTS = 8 * 8 + 4 * 8 + 5 * 4 + 50 * 8  # q, k and v, the convolution, the head: no vector, and no embedding
MLP = 3 * 6 * 8


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_looked_up_is_not_read_but_the_head_is(tied: bool) -> None:
    counted = sizes(tied=tied)
    assert (counted.dense_parameters, counted.dense_bytes) == (PRODUCTS, 2 * PRODUCTS)
    assert counted.token_parameters == PRODUCTS


@pytest.mark.parametrize("tied", [True, False])
def test_a_product_as_large_as_the_embedding_is_read(tied: bool) -> None:
    weights = 8 * 8 + 4 * 8 + 5 * 4 + 8 * 8
    assert sizes(tied=tied, vocab=HIDDEN).dense_parameters == weights


@pytest.mark.parametrize("key", ["num_experts_per_tok", "num_experts_per_token", "moe_topk"])
def test_experts_are_apart_and_the_shared_one_is_dense(key: str) -> None:
    counted = sizes(experts=(4, 4, 10), **{key: 2})
    routers_and_shared = (4 + 4 + 10) * 8 + 3 * MLP
    assert counted.dense_parameters == PRODUCTS + routers_and_shared
    assert counted.dense_bytes == 2 * counted.dense_parameters  # a float32 router counts as it is stored
    of_four = ExpertSizes(share=0.5, num_bytes=2 * 8 * MLP, parameters=8 * MLP)
    assert counted.experts == (of_four, ExpertSizes(share=0.2, num_bytes=2 * 10 * MLP, parameters=10 * MLP))
    assert counted.weight_bytes(1) - counted.dense_bytes == pytest.approx(2 * (2 + 2 + 2) * MLP)
    assert counted.token_parameters == counted.dense_parameters + (2 + 2 + 2) * MLP


def test_a_choice_may_be_of_experts_that_have_no_weights() -> None:
    counted = sizes(experts=(4,), moe_topk=3, zero_expert_num=2)
    assert counted.weight_bytes(1) - counted.dense_bytes == pytest.approx(2 * 2 * MLP)  # 4 of 6 have some


def test_experts_of_which_nobody_says_how_many_a_token_uses_have_no_floor() -> None:
    assert sizes(experts=(4,)) is None
    assert sizes(experts=(4,), text_config={"num_experts_per_tok": 1}) is not None


def test_a_model_without_weights_has_no_floor() -> None:
    facts = ModelFacts(vocab_size=VOCAB, hidden_size=1, max_positions=64, activation_width=1, layers=(FULL,))
    echo = ModelSpec(name="echo", api=(2, 0), architectures=(), describe=lambda config: facts, build=lambda context: None)
    assert family_sizes(echo, {}, dtype="bfloat16") is None


def test_layers_are_together_by_how_far_back_they_see() -> None:
    counted = sizes(FULL, NARROW, FULL, NARROW, LATENT)
    everything = ContextSizes(window=None, token_bytes=2 * (2 * (4 + 4) + 18), key_flop=2 * (2 * 4 * (4 + 4)) + 2 * 4 * (3 + 2 + 5))
    windows = ContextSizes(window=3, token_bytes=2 * 2 * 2 * (4 + 2), key_flop=2 * (2 * 4 * (4 + 2)))
    assert counted.contexts == (everything, windows)
    assert counted.state_bytes == 0
    assert sizes(FULL, kv_dtype="float8_e4m3fn").contexts[0].token_bytes == 4 + 4


def test_states_are_what_a_request_keeps_in_recurrent_layers() -> None:
    counted = sizes(RECURRENT, FULL, RECURRENT)
    matrix, conv = 4 * 16 * 8 * 4, 3 * (16 + 16 + 64) * 2  # float32; three inputs of queries, keys and values
    assert counted.state_bytes == 2 * (matrix + conv)
    assert [layers.token_bytes for layers in counted.contexts] == [2 * (4 + 4)]
    assert sizes(RECURRENT).contexts == ()
