"""A dense pre-norm decoder from its shape: what Llama, Mistral, Qwen, GLM and Gemma have in common.

T tokens, C hidden size, R rotary dim, V vocabulary. A family that differs in a block brings its own layers and reuses the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from enginery.checkpoint.decoder_shape import DecoderShape
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.drafting import FEATURES
from enginery.contracts.model import ModelContext, Point, WeightSource
from enginery.contracts.ops import LinearFn, NormingLinear
from enginery.contracts.parallel import Cut, StageTensors
from enginery.contracts.weights import SILU, Activation, Linear, LinearShape
from enginery.nn.activation import gate_function, gated_product
from enginery.nn.attention import SelfAttention
from enginery.nn.norm import take_norm
from enginery.nn.parallel import SingleRank
from enginery.nn.rotary import rotary_table


class GatedMLP:
    """down(activation(gate(x), up(x))), gate and up as one product."""

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        intermediate_size: int,
        bias: bool,
        activation: Activation = SILU,
        packed: str | None = None,
    ) -> None:
        """packed: the module that has gate and up in one piece, where the checkpoint stores them so."""
        hidden, inner, weights = context.facts.hidden_size, intermediate_size, weights.over_lanes()
        names = ("gate_proj", "up_proj") if packed is None else (packed,)
        self.gate_up = weights.linear(LinearShape(names=names, rows=(inner, inner), columns=hidden, cut=Cut.ROWS, bias=bias))
        self.down = weights.linear(
            LinearShape(names=("down_proj",), rows=(hidden,), columns=inner, cut=Cut.COLUMNS, bias=bias, complete=False)
        )
        self.gate = gate_function(activation, context.ops)
        self.gated = gated_product(self.gate_up, activation, context.ops)
        self.entry = self.gated if isinstance(self.gated, NormingLinear) else self.gate_up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]: with several ranks a partial sum."""
        return self.down(self.gated(x))


class AttentionBlock(Protocol):
    """A layer's attention: x [T, C], cos_sin [T, R] -> [T, C], with several ranks a partial sum."""

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor: ...


@runtime_checkable
class Entered(Protocol):
    """A block whose rows go to one product first, or to this one before all others."""

    entry: LinearFn


class DecoderLayer:
    """Attention and MLP, each on the norm of the residual stream and added back to it, where it may be normed once more.

    The sums over ranks are taken here: with the norm that follows, or before the norm of what is added.
    """

    def __init__(
        self,
        context: ModelContext,
        weights: WeightSource,
        *,
        shape: DecoderShape,
        attention: AttentionBlock,
        mlp: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """attention, mlp: give partial sums. shape: of the whole model."""

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else take_norm(weights, name, shape.hidden_size, offset=shape.norm_offset)

        self.eps, self.comm = shape.rms_eps, context.comm
        self.rms_norm, self.add_rms_norm = context.ops.rms_norm, context.ops.add_rms_norm
        self.attention_norm = take_norm(weights, shape.norms.attention, shape.hidden_size, offset=shape.norm_offset)
        self.mlp_norm = take_norm(weights, shape.norms.mlp, shape.hidden_size, offset=shape.norm_offset)
        self.attention_out_norm, self.mlp_out_norm = norm(shape.norms.attention_out), norm(shape.norms.mlp_out)
        self.attention = attention
        self.mlp = mlp
        is_alone = isinstance(context.comm, SingleRank)  # no sum stands between what is added and the norm
        entries = (block.entry if is_alone and isinstance(block, Entered) else None for block in (attention, mlp))
        self.entries = [entry if isinstance(entry, NormingLinear) else None for entry in entries]

    def attention_input(self, delta: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Adds `delta`, the last layer's output, to the residual stream in place and returns it normalised: all [T, C]."""
        if delta is None:
            return self.rms_norm(residual, self.attention_norm, self.eps)
        x = self._entered(delta, residual, self.attention_norm, self.entries[0])
        return self.add_mlp_output(delta, residual, self.attention_norm) if x is None else x

    def add_mlp_output(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds what `feed_forward` returned, here or in a layer before, to the residual stream in place; its norm: [T, C]."""
        if self.mlp_out_norm is not None:
            return self.add_rms_norm(delta, residual, weight, self.eps)  # it is the whole sum already
        return self.comm.add_rms_norm(delta, residual, weight, self.eps, of_all_lanes=True)

    def _entered(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, entry: NormingLinear | None
    ) -> torch.Tensor | None:
        """The norm of the sum, if the product that is given it takes both; see `NormingLinear`."""
        return None if entry is None else entry.add_rms_norm(delta, residual, weight, self.eps)

    def feed_forward(self, delta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Each row for itself: adds attention's output to the residual stream in place and returns the MLP's, all [T, C]."""
        if self.attention_out_norm is not None:
            delta = self.rms_norm(self.comm.sum(delta), self.attention_out_norm, self.eps)
        x = self._entered(delta, residual, self.mlp_norm, self.entries[1])
        if x is None:
            add_norm = self.comm.add_rms_norm if self.attention_out_norm is None else self.add_rms_norm
            x = add_norm(delta, residual, self.mlp_norm, self.eps)
        out = self.mlp(self.comm.all_rows(x))
        if self.mlp_out_norm is None:
            return out
        return self.rms_norm(self.comm.own_rows_sum(out), self.mlp_out_norm, self.eps)


class LayerFactory(Protocol):
    """Builds decoder layer `index`, whose tensors `weights` has without a prefix."""

    def __call__(self, context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer: ...


def layer_attention(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> SelfAttention:
    """Layer `index`'s grouped-query attention."""
    scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
    own, sinks = weights.scope("self_attn"), None
    rope = shape.rope if shape.windows[index] is None else shape.window_rope or shape.rope
    if index in shape.sinks:
        sinks = own.take("sinks", (shape.num_heads,), dtype=torch.float32, cut=Cut.ROWS)
    return SelfAttention(
        context,
        own,
        spec=context.stage.spec(index, scale=scale, sinks=sinks),
        qkv_bias=shape.qkv_bias,
        out_bias=shape.out_bias,
        qk_norm_eps=shape.rms_eps if shape.qk_norm else None,
        norm_offset=shape.norm_offset,
        neighbours=rope.rotary_dim if shape.rotates_neighbours else 0,
    )


def dense_mlp(context: ModelContext, weights: WeightSource, *, shape: DecoderShape) -> GatedMLP:
    """A layer's gated MLP, as `shape` describes it."""
    return GatedMLP(
        context,
        weights.scope("mlp"),
        intermediate_size=shape.intermediate_size,
        bias=shape.mlp_bias,
        activation=shape.activation,
        packed="gate_up_proj" if shape.packed_mlp else None,
    )


def summed_early(context: ModelContext, layer: DecoderLayer) -> DecoderLayer:
    """A layer of a `Decoder`, which changes no output of a block in place: sums before norms may begin within products."""
    if isinstance(layer.attention, SelfAttention) and layer.attention_out_norm is None:
        layer.attention.out = context.comm.summed_early(layer.attention.out)
    if isinstance(layer.mlp, GatedMLP) and layer.mlp_out_norm is None:
        layer.mlp.down = context.comm.summed_early(layer.mlp.down)
    return layer


def dense_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """A layer as `DecoderShape` describes it: grouped-query attention and a gated MLP."""
    attention, mlp = layer_attention(context, weights, shape=shape, index=index), dense_mlp(context, weights, shape=shape)
    return summed_early(context, DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp))


def _names(weights: WeightSource, shape: DecoderShape) -> tuple[str, str]:
    """What the names of layers and last norm begin with, and the embedding's module."""
    stem = f"{shape.stem}."
    if weights.has(f"{shape.embedding}.weight") and not weights.has(f"{stem}{shape.embedding}.weight"):
        stem = ""  # of a model that was saved without a head, as those that embed are
    embedding = f"{stem}{shape.embedding}"
    if shape.tied and weights.has("lm_head.weight") and not weights.has(f"{embedding}.weight"):
        embedding = "lm_head"  # of two names for one tensor, `safetensors.torch.save_model` keeps the first
    return stem, embedding


class Decoder:
    """Embedding, layers, last norm, head: those of one pipeline stage. Implements `enginery.contracts.model.Model` and `Tapped`."""

    def __init__(self, context: ModelContext, shape: DecoderShape, *, layer: LayerFactory = dense_layer) -> None:
        weights, stage = context.weights, context.stage
        stem, embedding = _names(weights, shape)
        self.eps, self.embed, self.stage, self.comm = shape.rms_eps, context.ops.embed, stage, context.comm
        self.logit_cap, self.embedding_scale, self.taps = shape.logit_cap, 1.0, context.taps
        if shape.embedding_scale is not None:  # rounded, as transformers rounds it
            self.embedding_scale = torch.tensor(shape.embedding_scale, dtype=context.dtype).item()
        self.embedding: torch.Tensor | None = None
        if stage.is_first:
            self.embedding = weights.take(f"{embedding}.weight", (shape.vocab_size, shape.hidden_size))
        below = weights.scope(f"{stem}layers")
        self.layers = [layer(context, below.scope(str(index)), shape=shape, index=index) for index in stage.layers]
        self.norm: torch.Tensor | None = None
        self.head: Linear | None = None
        if stage.is_last:
            self.norm = take_norm(weights, f"{stem}norm", shape.hidden_size, offset=shape.norm_offset)
            head = LinearShape(
                names=(embedding if shape.tied else "lm_head",),
                rows=(shape.vocab_size,),
                columns=shape.hidden_size,
                cut=Cut.ROWS,
                padded=True,
            )
            self.head = weights.linear(head)
        ropes = [shape.rope] if shape.window_rope is None else [shape.rope, shape.window_rope]
        self.rotary = [rotary_table(rope, context.max_positions, dtype=context.dtype, device=context.device) for rope in ropes]
        self.rotary_of = [len(ropes) - 1 if shape.windows[index] is not None else 0 for index in stage.layers]

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor | StageTensors:
        """Hidden states after the last norm: [T, C], or [N, C] of the rows that need logits.

        Of a long prompt that is one row, and what follows the last attention is a thirtieth of the work. Stages before the last
        return the last layer's output and the residual stream.
        """
        delta, residual = self._begin(batch, arrived)
        cos_sin = self.rotations(batch.positions)
        narrows = self.stage.is_last and batch.logits_rows is not None
        for index, layer, rotary in zip(self.stage.layers, self.layers, self.rotary_of, strict=True):
            x = layer.attention_input(delta, residual)
            self.tap(batch, residual, index)
            delta = layer.attention(x, cos_sin[rotary], batch)
            if narrows and layer is self.layers[-1]:
                assert batch.logits_rows is not None
                delta, residual = delta.index_select(0, batch.logits_rows), residual.index_select(0, batch.logits_rows)
            delta = layer.feed_forward(delta, residual)
        assert delta is not None, "a stage has layers"
        if self.norm is None:
            return {"delta": delta, "residual": residual}
        hidden = self.layers[-1].add_mlp_output(delta, residual, self.norm)
        self.tap(batch, residual, self.stage.layers.stop)
        self.tap(batch, hidden, self.stage.layers.stop, "final")
        return hidden

    def rotations(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """By each table of `rotary`, cosines and sines of these positions, [T]: [T, R]."""
        return [self.embed(table, positions) for table in self.rotary]

    def tap(self, batch: ForwardBatch, values: torch.Tensor, layer: int, point: Point = "input") -> None:
        """Write these hidden states, [T, C], of a `Feature` where a draft model finds them, if it takes them and follows."""
        if FEATURES not in batch.outputs:
            return
        width = values.shape[-1]
        for place, wanted in enumerate(self.taps):
            if wanted == (layer, point):
                batch.outputs[FEATURES].values[:, place * width : (place + 1) * width] = values

    def _begin(self, batch: ForwardBatch, arrived: StageTensors | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The last layer's output and the residual stream without it, [T, C]."""
        if arrived is not None:
            return arrived["delta"], arrived["residual"]
        return None, self.embedded(batch.input_ids)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, C], what the first layer is given for these tokens."""
        assert self.embedding is not None, "a stage behind the first is given what arrived"
        found = self.embed(self.embedding, ids)
        return found if self.embedding_scale == 1.0 else found * self.embedding_scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V]; of several ranks each has some columns."""
        assert self.head is not None, "the last stage has the head"
        logits = self.head(hidden)
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap
