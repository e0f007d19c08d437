"""Index keys: a third row of each token, beside a layer's keys and values and in the same pages, by which it chooses what it sees.

They are a layer of their own whose values have no width. Family and backend are this module's, the engine's code is as it is. What
is right, transformers' Llama says, with a mask of the chosen keys.

T tokens, S rows and L keys of one request, H query heads, I index heads, D dims of an index key.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.rank_threads import on_threads
from pairwise import pairwise
from parity.engine_driver import assert_greedy, generate, options
from parity.oracle import FAMILIES, Oracle, latent_shape, randomise
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaForCausalLM

from enginery.api import (
    AttnBackend,
    AttnBackendSpec,
    AttnLayerFacts,
    Axis,
    BackendContext,
    Capabilities,
    Cut,
    DecoderShape,
    Fill,
    ForwardBatch,
    ForwardPlan,
    IndexerPart,
    IndexerPlan,
    LayerSpec,
    LinearShape,
    LocalLayerId,
    Model,
    ModelContext,
    ModelFacts,
    ModelSpec,
    NamedTensor,
    Phase,
    PlanKey,
    WeightSource,
    covering_plan,
    hookimpl,
)
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import Unsupported
from enginery.nn.attention import SelfAttention
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer, dense_mlp
from enginery.nn.latent_attention import LatentSelfAttention
from enginery.plugin.registry import Registry
from enginery_model_deepseek.spec import DeepseekShape
from enginery_model_deepseek.spec import shape as deepseek_shape
from enginery_model_llama.spec import describe as describe_llama
from enginery_model_llama.spec import shape

INDEX_HEADS, INDEX_DIM, TOP_K = 4, 12, 6
INDEX_ROWS = (INDEX_HEADS * INDEX_DIM, INDEX_DIM, INDEX_HEADS)  # queries, key, weights


def has_index(layer: int) -> bool:
    return layer % 2 == 1


def describe(config: Mapping[str, Any]) -> ModelFacts:
    plain = read_deepseek(config).facts() if is_latent(config) else describe_llama(config)
    layers: list[AttnLayerFacts] = []
    for index, layer in enumerate(plain.layers):
        layers.append(layer)
        if has_index(index):
            layers.append(
                AttnLayerFacts(
                    num_heads=INDEX_HEADS, num_kv_heads=1, head_dim=INDEX_DIM, v_head_dim=0, decoder_layer=layer.decoder_layer
                )
            )
    chosen = NamedTensor(name="chosen", dims=(TOP_K,), dtype="int32", axis=Axis.TOKEN, fill=Fill.ZERO)
    return dataclasses.replace(plain, layers=tuple(layers), num_decoder_layers=len(plain.layers), outputs=(chosen,))


def is_latent(config: Mapping[str, Any]) -> bool:
    return "IndexedLatentsForCausalLM" in config["architectures"]


def read_deepseek(config: Mapping[str, Any]) -> DeepseekShape:
    return deepseek_shape({**config, "architectures": ["DeepseekV3ForCausalLM"]})


class Indexed:
    """Attention that chooses first. Every rank scores all index heads, as all have to choose the same."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, attention: AttentionBlock, spec: LayerSpec) -> None:
        """spec: of the index keys."""
        self.attention, self.spec, self.pool, self.attend = attention, spec, context.pool, context.attend
        hidden = context.facts.hidden_size
        shape = LinearShape(names=("indexer",), rows=INDEX_ROWS, columns=hidden, cut=Cut.NONE)
        self.entry = self.indexer = weights.linear(shape)  # the first that x goes to

    def __call__(self, x: Tensor, cos_sin: Tensor, batch: ForwardBatch) -> Tensor:
        q, k, w = self.indexer(x).split(INDEX_ROWS, dim=-1)
        k = k[:, None]  # [T, 1, D]
        self.pool.write(self.spec.local_id, k, k[..., :0], batch.slots_for(self.spec))
        chosen = batch.outputs["chosen"].values  # [T, TOP_K]
        self.attend(q.unflatten(-1, (INDEX_HEADS, INDEX_DIM)), k, w, self.spec, batch, chosen)
        return self.attention(x, cos_sin, batch)


def layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    own = weights.scope("self_attn")
    attention: AttentionBlock
    if is_latent(context.config):
        spec, *of_index = context.stage.specs(index, scale=read_deepseek(context.config).scale)
        attention = LatentSelfAttention(context, own, spec=spec, q_rank=None, bias=False, norm_eps=1e-6)
    else:
        spec, *of_index = context.stage.specs(index, scale=shape.head_dim**-0.5)
        attention = SelfAttention(context, own, spec=spec, qkv_bias=False, out_bias=False, qk_norm_eps=None)
    if of_index:
        attention = Indexed(context, own, attention=attention, spec=of_index[0])
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=dense_mlp(context, weights, shape=shape))


def build(context: ModelContext) -> Model:
    config = context.config
    return Decoder(context, read_deepseek(config).decoder if is_latent(config) else shape(config), layer=layer)


def choice(q: Tensor, w: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """q: [S, I, D]; w: [S, I]; keys: [L, D]; visible: [S, L]. Returns [S, L]: the visible keys with the highest scores."""
    scores = torch.einsum("sid,ld,si->sl", q, keys, w).masked_fill(~visible, float("-inf"))
    best = scores.topk(min(TOP_K, len(keys)), dim=-1).indices
    return torch.zeros_like(visible).scatter_(1, best, value=True) & visible


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """A request: its rows, the slots of its keys [L], and which of them each row may see [S, L]."""

    rows: slice
    slots: Tensor
    visible: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SparsePlan(ForwardPlan):
    spans: tuple[Span, ...]


class SparseAttention:
    def __init__(self, context: BackendContext) -> None:
        self.backend_id, self.pool, self.page_size = context.instance, context.pool, context.geometry.page_size
        widths = [layer.value_dim for layer in context.geometry.layers]
        self.indexed = {place - 1 for place, width in enumerate(widths) if width == 0}

    @hookimpl
    def plan_forward_metadata(self, batch: ForwardBatch, capture: bool) -> SparsePlan:
        spans, row = [], 0
        for request, (count, length) in enumerate(zip(batch.q_lens_cpu.tolist(), batch.kv_lens_cpu.tolist(), strict=True)):
            positions = torch.arange(length)
            pages = batch.page_table_cpu[request, positions // self.page_size].long()
            visible = torch.arange(length - count, length)[:, None] >= positions
            slots = pages * self.page_size + positions % self.page_size
            spans.append(Span(rows=slice(row, row + count), slots=slots, visible=visible))
            row += count
        return SparsePlan(key=PlanKey.of(batch, self.backend_id, capture=capture), spans=tuple(spans))

    @hookimpl
    def indexer_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> IndexerPlan:
        lens, q_lens = batch.kv_lens_cpu, batch.q_lens_cpu
        request = torch.repeat_interleave(q_lens.long()).int()
        part = IndexerPart(
            rows=slice(0, len(request)), page_table=batch.page_table_cpu, row_request=request, row_lens=lens[request.long()]
        )
        return IndexerPlan(parts=(part,))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, batch: ForwardBatch, plan: ForwardPlan, out: Tensor
    ) -> None:
        """Of index keys: v: [T, I], weights; out: [T, TOP_K] int32, the chosen positions, -1 behind them."""
        spans = covering_plan(plan, batch, SparsePlan, backend=self.backend_id).spans
        stored = self.pool.by_slot(layer.local_id)
        for span in spans:
            keys, values = (rows[span.slots].float() for rows in stored)  # [L, K, D], [L, K, V]
            if layer.facts.value_dim == 0:
                picked = choice(q[span.rows], v[span.rows], keys[:, 0], span.visible)
                places = torch.arange(len(keys)).masked_fill(~picked, len(keys)).sort(-1).values[:, : out.shape[1]].int()
                out[span.rows] = -1
                out[span.rows, : places.shape[1]] = places.masked_fill(places == len(keys), -1)
                continue
            seen = span.visible
            if layer.local_id in self.indexed:
                places = batch.outputs["chosen"].values[span.rows].long()  # [S, TOP_K]
                wide = torch.zeros(len(seen), len(keys) + 1, dtype=torch.bool)
                seen = wide.scatter_(1, places.masked_fill(places < 0, len(keys)), value=True)[:, :-1]
            keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (keys, values))
            scores = torch.einsum("shd,lhd->hsl", q[span.rows].float(), keys) * layer.scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[span.rows] = torch.einsum("hsl,lhd->shd", weights, values).to(out.dtype)


DTYPES = frozenset({"float32"})
PHASES = frozenset({Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.VERIFY})


@hookimpl
def register_models() -> list[ModelSpec]:
    """This module as a plugin."""
    architectures = ("IndexedForCausalLM", "IndexedLatentsForCausalLM")
    return [ModelSpec(name="indexed", api=(2, 0), architectures=architectures, describe=describe, build=build)]


@hookimpl
def register_attn_backends() -> list[AttnBackendSpec]:
    can = Capabilities(devices=frozenset({"cpu"}), dtypes=DTYPES, kv_dtypes=DTYPES, phases=PHASES, sparse=True, mla=True)
    return [AttnBackendSpec(name="chosen", api=(2, 0), priority=0, summary="chosen keys", capabilities=can)]


@hookimpl
def create_attn_backend(context: BackendContext) -> AttnBackend:
    return SparseAttention(context)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    info = tmp_path_factory.mktemp("site") / "enginery_indexed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: enginery-indexed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[enginery]\nindexed = engine.test_index_keys\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(info.parent))
        yield Registry.load()


def written(folder: Path, model: LlamaForCausalLM | DeepseekV3ForCausalLM, architecture: str) -> Oracle:
    """A model whose odd layers are given a mask of the chosen keys."""
    model = model.eval().float()
    randomise(model)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for index, decoder_layer in enumerate(model.model.layers):
        if has_index(index):
            drawn = torch.randn(sum(INDEX_ROWS), model.config.hidden_size, generator=torch.Generator().manual_seed(index))
            weight = drawn * model.config.hidden_size**-0.5
            tensors[f"model.layers.{index}.self_attn.indexer.weight"] = weight
            decoder_layer.self_attn.register_forward_pre_hook(masking(weight), with_kwargs=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "architectures": [architecture]}))
    return Oracle(folder, model)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    config = copy.deepcopy(FAMILIES["llama"])
    config._attn_implementation = "eager"
    return written(tmp_path_factory.mktemp("indexed"), LlamaForCausalLM(config), "IndexedForCausalLM")


@pytest.fixture(scope="module")
def indexed_latents(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    config = DeepseekV3Config(**latent_shape(q_lora_rank=None), attn_implementation="eager")
    return written(tmp_path_factory.mktemp("latents"), DeepseekV3ForCausalLM(config), "IndexedLatentsForCausalLM")


def masking(weight: Tensor) -> Any:
    """A hook of transformers' attention: its mask leaves the keys that the indexer chooses."""

    def mask(module: object, args: object, kwargs: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        q, keys, w = (kwargs["hidden_states"][0] @ weight.T).split(INDEX_ROWS, dim=-1)
        causal = torch.ones(len(keys), len(keys), dtype=torch.bool).tril()
        chosen = choice(q.unflatten(-1, (INDEX_HEADS, INDEX_DIM)), w, keys, causal)
        return args, kwargs | {"attention_mask": torch.zeros(chosen.shape).masked_fill(~chosen, float("-inf"))[None, None]}

    return mask


@pairwise(("page_size", [1, 16]), ("chunk", [16, 4096]), ("num_tokens", [128, 1600]), ("micro_batches", [False, True]))
def test_greedy_tokens_are_those_of_the_masked_model(
    indexed: Oracle, registry: Registry, *, page_size: int, chunk: int, num_tokens: int, micro_batches: bool
) -> None:
    """In chunks, in parts, preempted where pages are few, and after prefixes that are cached."""
    pages = {"page_size": page_size, "num_pages": num_tokens // page_size}
    asked = options(indexed, max_batch_tokens=chunk, micro_batches=micro_batches, num_threads=1, **pages)
    engine = Engine.build(asked, registry)
    for _ in range(2):
        assert_greedy(indexed, generate(engine, indexed.prompts))


@pytest.mark.parametrize(("chunk", "num_tokens", "micro_batches"), [(16, 128, True), (4096, 1600, False)])
def test_greedy_tokens_with_latents_beside_index_keys_are_those_of_the_masked_model(
    indexed_latents: Oracle, registry: Registry, *, chunk: int, num_tokens: int, micro_batches: bool
) -> None:
    """As DeepSeek-V3.2 has them."""
    pages = {"page_size": 4, "num_pages": num_tokens // 4}
    asked = options(indexed_latents, max_batch_tokens=chunk, micro_batches=micro_batches, num_threads=1, **pages)
    engine = Engine.build(asked, registry)
    for _ in range(2):
        assert_greedy(indexed_latents, generate(engine, indexed_latents.prompts))


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}])
def test_several_ranks_choose_the_same_keys(indexed: Oracle, registry: Registry, mesh: dict[str, int]) -> None:
    with on_threads(options(indexed, **mesh), registry) as (engine, _):
        assert_greedy(indexed, generate(engine, indexed.prompts))


def test_index_keys_take_their_rows_of_each_page_and_no_values(indexed: Oracle, registry: Registry) -> None:
    pool = build_parts(options(indexed), registry).step.relay.backend.pool
    shapes = [tuple(rows.shape[-2:] for rows in pool.layer(LocalLayerId(place))) for place in range(6)]
    assert shapes == [((2, 16), (2, 16)), ((2, 16), (2, 16)), ((1, INDEX_DIM), (1, 0))] * 2


def test_a_backend_that_is_not_sparse_refuses_a_model_with_index_keys(indexed: Oracle, registry: Registry) -> None:
    """It would see all keys, and answer as if nothing were wrong."""
    with pytest.raises(Unsupported, match="sparse attention is needed and not offered"):
        build_parts(options(indexed, attention_backend="torch"), registry)
    (chosen,) = [value for name, value, _ in Engine.build(options(indexed), registry).facts.decisions if name == "attention"]
    assert chosen == "chosen"
