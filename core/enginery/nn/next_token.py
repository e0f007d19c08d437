"""A module behind a decoder's last layer that predicts one token more (multi-token prediction, DeepSeek-V3, arXiv:2412.19437).

    x = mix([norm of the embedding of token p + 1, norm of the hidden state at p]),  then one decoder layer and a norm of its own

Embedding and output head are the target's: checkpoints that store them again store the same. T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from enginery.checkpoint.decoder_shape import DecoderShape
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.drafting import CARRIED, FEATURES
from enginery.contracts.model import Model, ModelContext, WeightSource
from enginery.contracts.parallel import StageTensors
from enginery.contracts.weights import LinearShape
from enginery.nn.decoder import DecoderLayer, LayerFactory
from enginery.nn.norm import take_norm
from enginery.nn.rotary import rotary_table


class NextTokenNames(NamedTuple):
    """What the parts beside the layer are called."""

    embedding_norm: str
    hidden_norm: str
    mix: str
    norm: str


DEEPSEEK: Final = NextTokenNames("enorm", "hnorm", "eh_proj", "shared_head.norm")


class NextTokenModule:
    """Guesses further tokens by its own hidden states. Implements `enginery.contracts.model.Model`."""

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        shape: DecoderShape,
        layer: DecoderLayer,
        carries_normed: bool,
        names: NextTokenNames = DEEPSEEK,
        further: Sequence[Model] = (),
    ) -> None:
        """shape: `DecoderShape.one_more`. carries_normed: a guess leaves to the next what its norm gave, else what it was given.

        further: of a chain, the modules behind this one, which is the first.
        """
        size = shape.hidden_size
        norms = (names.embedding_norm, names.hidden_norm, names.norm)
        self.embedding_norm, self.hidden_norm, self.norm = (
            take_norm(weights, name, size, offset=shape.norm_offset) for name in norms
        )
        self.mix = weights.linear(LinearShape(names=(names.mix,), rows=(size,), columns=2 * size))
        self.modules = (self, *further)
        self.layer, self.carries_normed, self.eps = layer, carries_normed, shape.rms_eps
        self.target, self.rms_norm, self.embed = context.target, context.ops.rms_norm, context.ops.embed
        self.rotary = rotary_table(shape.rope, context.max_positions, dtype=context.dtype, device=context.device)

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        """arrived: FEATURES or CARRIED, [T, C]. What stands for the target's hidden state one token further: [T, C]."""
        assert self.target is not None, "a module runs beside its target"
        assert arrived is not None, "a module is given hidden states"
        hidden = arrived[FEATURES] if FEATURES in arrived else arrived[CARRIED]
        embedded = self.rms_norm(self.target.embedded(batch.input_ids), self.embedding_norm, self.eps)
        residual = self.mix(torch.cat((embedded, self.rms_norm(hidden, self.hidden_norm, self.eps)), dim=-1))
        x = self.layer.attention_input(None, residual)
        delta = self.layer.attention(x, self.embed(self.rotary, batch.positions), batch)
        normed = self.layer.add_mlp_output(self.layer.feed_forward(delta, residual), residual, self.norm)
        return normed if self.carries_normed else residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], by the target's head."""
        assert self.target is not None, "a module runs beside its target"
        return self.target.logits(hidden if self.carries_normed else self.rms_norm(hidden, self.norm, self.eps))


def modules_behind(
    context: ModelContext, shape: DecoderShape, layer: LayerFactory, *, carries_normed: bool, names: NextTokenNames = DEEPSEEK
) -> NextTokenModule:
    """The layers that are stored behind a decoder's last, each a module; several are a chain. shape: `DecoderShape.one_more`."""
    behind = int(context.config["num_hidden_layers"])

    def module(index: int, further: Sequence[Model] = ()) -> NextTokenModule:
        weights = context.weights.scope(f"{shape.stem}.layers.{behind + index}")
        own = layer(context, weights, shape=shape, index=index)
        return NextTokenModule(
            context, weights, shape=shape, layer=own, carries_normed=carries_normed, names=names, further=further
        )

    return module(0, [module(index) for index in range(1, len(shape.windows))])
