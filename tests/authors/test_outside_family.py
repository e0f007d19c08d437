"""A family that an outside author writes from docs/write-a-model.md: parallel blocks, windows beside layers without positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cohere2Config, Cohere2ForCausalLM

from enginery.api import DecoderShape, ModelContext, ModelFacts, ModelSpec, WeightSource, read_decoder_shape, read_windows
from enginery.nn.decoder import Decoder, DecoderLayer, dense_mlp, layer_attention
from enginery.nn.norm import take_norm
from enginery.testing.kits.ranks import RankThreads
from enginery.testing.kits.weights import WholeTensors


def shape(config: Mapping[str, Any]) -> DecoderShape:
    windows = read_windows(config, lambda index: (index + 1) % 4 != 0)
    plain = read_decoder_shape({**config, "rms_norm_eps": config["layer_norm_eps"]}, windows)
    without = dataclasses.replace(plain.rope, rotary_dim=0)
    return dataclasses.replace(plain, rotates_neighbours=True, rope=without, window_rope=plain.rope)


def describe(config: Mapping[str, Any]) -> ModelFacts:
    return shape(config).facts()


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), eps=eps).to(x.dtype)


class ParallelLayer(DecoderLayer):
    """Cohere's: one norm, of which attention and MLP are both given the rows."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> None:
        self.eps, self.comm = shape.rms_eps, context.comm
        self.norm = take_norm(weights, "input_layernorm", shape.hidden_size)
        self.attention = layer_attention(context, weights, shape=shape, index=index)
        self.mlp = dense_mlp(context, weights, shape=shape)

    def attention_input(self, delta: Tensor | None, residual: Tensor) -> Tensor:
        return layer_norm(residual, self.norm, self.eps) if delta is None else self.add_mlp_output(delta, residual, self.norm)

    def feed_forward(self, delta: Tensor, residual: Tensor) -> Tensor:
        return delta + self.mlp(layer_norm(residual, self.norm, self.eps))

    def add_mlp_output(self, delta: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        residual.add_(self.comm.sum(delta))
        return layer_norm(residual, weight, self.eps)


class ScaledLogits(Decoder):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context, shape(context.config), layer=ParallelLayer)
        self.logit_scale = context.config["logit_scale"]

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.logit_scale


@pytest.mark.parametrize("ranks", [{}, {"tensor_size": 2}, {"num_stages": 2}], ids=["one", "two tensor ranks", "two stages"])
def test_layers_are_put_in_order_for_the_rope_that_is_theirs(ranks: dict[str, int]) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, max_position_embeddings=64)
    config = Cohere2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=6, initializer_range=0.2)
    theirs = Cohere2ForCausalLM(config).eval()
    family = ModelSpec(name="cohere2", api=(2, 0), architectures=("Cohere2ForCausalLM",), describe=describe, build=ScaledLogits)
    threads = RankThreads(family=family, config=config.to_dict(), tensors=WholeTensors(theirs.state_dict(), torch.float32), **ranks)
    ids = list(range(3, 27))
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(threads.run(ids)[-1].logits, wanted, rtol=1e-4, atol=1e-4)
