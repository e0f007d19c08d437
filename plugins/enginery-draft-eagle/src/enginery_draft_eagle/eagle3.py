"""The head of EAGLE-3 (arXiv:2503.01840): attention over a token's embedding beside a mix of the target's hidden states before it.

    h = fc([three hidden states at p]), or what the guess before left
    x = attention([norm of the embedding of token p + 1, norm of h]) + h,  then the MLP;  logits by the norm of x, its own head

T tokens, C hidden size, H query heads, K KV heads, D head dim, V vocabulary of the target, V' of the head.
"""

from __future__ import annotations

import torch

from enginery.api import (
    CARRIED,
    FEATURES,
    CheckpointError,
    Cut,
    DecoderShape,
    ForwardBatch,
    Linear,
    LinearShape,
    ModelContext,
    StageTensors,
    WeightSource,
)
from enginery.nn.attention import take_out
from enginery.nn.decoder import dense_mlp
from enginery.nn.norm import take_norm
from enginery.nn.rotary import rotary_table
from enginery_draft_eagle.spec.eagle import with_stored_biases
from enginery_draft_eagle.spec.eagle3 import Eagle3Shape


class WideAttention:
    """Causal self-attention whose input is twice as wide as its output, bound to its backend's `attend` when built."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, shape: DecoderShape) -> None:
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        rows = (heads * dim, kv_heads * dim, kv_heads * dim)
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv = weights.linear(
            LinearShape(names=names, rows=rows, columns=2 * shape.hidden_size, cut=Cut.ROWS, unit=(dim,) * 3, bias=shape.qkv_bias)
        )
        self.out = take_out(weights, "o_proj", hidden=shape.hidden_size, heads=heads, dim=dim, bias=shape.out_bias)
        self.spec, self.dim = context.stage.spec(0, scale=dim**-0.5), dim
        self.num_heads = self.spec.facts.num_heads  # of this rank
        self.num_rotated = self.num_heads + self.spec.facts.num_kv_heads
        self.write = context.ops.qk_norm_rotary_write
        self.attend, self.memory = context.attend, context.pool.by_slot(self.spec.local_id)

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, 2 C], cos_sin: [T, D]. Returns [T, C]: with several ranks a partial sum."""
        qkv = self.qkv(x).view(len(x), -1, self.dim)  # [T, H + 2 K, D]
        keys, values = self.memory
        self.write(qkv, None, 0.0, cos_sin, keys=keys, values=values, slots=batch.slots_for(self.spec))
        q, k, v = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_rotated], qkv[:, self.num_rotated :]
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [T, H, D]
        self.attend(q, k, v, self.spec, batch, attended)
        return self.out(attended.view(len(x), -1))


class Eagle3Head:
    """Implements `enginery.api.Model` and `MappedVocabulary`.

    The embedding is the target's, unless that is of another width or the head was trained with its own; so is the output head, if
    the checkpoint has none and the vocabulary is the same.
    """

    def __init__(self, context: ModelContext, head: Eagle3Shape) -> None:
        """Raises `CheckpointError` for a `d2t` that maps to no token."""
        shape, weights = head.decoder, context.weights
        size, mixed = shape.hidden_size, head.num_features * head.target_size
        layer = weights.scope("layers.0" if weights.has("layers.0.hidden_norm.weight") else "midlayer")
        self.target, self.ops, self.comm = context.target, context.ops, context.comm
        self.eps, self.shape = shape.rms_eps, head
        self.fc = weights.linear(LinearShape(names=("fc",), rows=(size,), columns=mixed, bias=head.bias))
        self.mixed_norm = take_norm(weights, "input_norm", mixed) if head.norms_features else None
        self.embedding_norm, self.hidden_norm = (take_norm(layer, name, size) for name in ("input_layernorm", "hidden_norm"))
        self.attention = WideAttention(context, layer.scope("self_attn"), shape=with_stored_biases(shape, layer))
        self.mlp_norm = take_norm(layer, shape.norms.mlp, size)
        self.mlp = dense_mlp(context, layer, shape=shape)
        self.norm = take_norm(weights, "norm", size)
        self.embedding: torch.Tensor | None = None
        if head.own_embedding:
            self.embedding = weights.take("embed_tokens.weight", (shape.vocab_size, size))
        self.head: Linear | None = None
        is_smaller = head.vocab_size != shape.vocab_size
        if is_smaller or head.target_size != size or weights.has("lm_head.weight"):
            self.head = weights.linear(
                LinearShape(names=("lm_head",), rows=(head.vocab_size,), columns=size, cut=Cut.ROWS, padded=True)
            )
        self.target_ids = _target_ids(weights, head) if is_smaller or weights.has("d2t") else None
        self.rotary = rotary_table(shape.rope, context.max_positions, dtype=context.dtype, device=context.device)

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        """arrived: FEATURES [T, F * C], or CARRIED [T, C]. What stands for the hidden state one token further: [T, C]."""
        assert arrived is not None, "a head is given the target's hidden states"
        hidden = self._mixed(arrived[FEATURES]) if FEATURES in arrived else arrived[CARRIED].clone()  # it is added to
        embedded = self.ops.rms_norm(self._embedded(batch.input_ids), self.embedding_norm, self.eps)
        normed = self.ops.rms_norm(hidden, self.hidden_norm, self.eps)
        delta = self.attention(torch.cat((embedded, normed), dim=-1), self.ops.embed(self.rotary, batch.positions), batch)
        residual = normed if self.shape.norms_residual else hidden
        x = self.comm.add_rms_norm(delta, residual, self.mlp_norm, self.eps)  # `delta` is in both
        made = residual + self.comm.own_rows_sum(self.mlp(self.comm.all_rows(x)))
        return self.ops.rms_norm(made, self.norm, self.eps) if self.shape.carries_normed else made

    def _mixed(self, features: torch.Tensor) -> torch.Tensor:
        """[T, F * C] -> [T, C]."""
        return self.fc(features if self.mixed_norm is None else self.ops.rms_norm(features, self.mixed_norm, self.eps))

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            return self.ops.embed(self.embedding, ids)
        assert self.target is not None, "a head runs beside its target"
        return self.target.embedded(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V']; of several ranks each has some columns."""
        normed = hidden if self.shape.carries_normed else self.ops.rms_norm(hidden, self.norm, self.eps)
        if self.head is not None:
            return self.head(normed)
        assert self.target is not None, "a head runs beside its target"
        return self.target.logits(normed)


def _target_ids(weights: WeightSource, head: Eagle3Shape) -> torch.Tensor:
    """The target's token for each of the head's: [V'] int64. `d2t` has what is to be added to its number."""
    offsets, count = weights.take("d2t", (head.vocab_size,), dtype=torch.int64), head.decoder.vocab_size
    own = torch.arange(head.vocab_size, device=offsets.device)
    ids = own + offsets
    if ids.is_meta:
        return ids
    strange = (ids < 0) | (ids >= count)
    if not weights.has("d2t"):  # random weights
        return own
    if bool(strange.any()):
        token = int(strange.nonzero()[0])
        raise CheckpointError(
            f"d2t of the EAGLE-3 head gives its token {token} the number {int(ids[token]):,}, and the vocabulary has {count:,} "
            "tokens; it must have what is to be added to each number; fetch the head again"
        )
    return ids
