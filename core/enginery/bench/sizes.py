"""What a token makes a device read and multiply: counted from what the model asks for when it is built, and from its layers' facts.

weights   every tensor but vectors, once, in the bytes in which the checkpoint stores it, a scheme's scales among them; a token is
          multiplied with all of it but other tokens' experts. An embedding that is not the head too is looked up and left out
memory    of a token, keys and values, or a latent, in each layer that sees it; of a request, the states of recurrent layers

E experts of a layer, k of a token: n tokens that choose uniformly use E (1 - (1 - k / E)^n) of them. An expert's tensors are those
of a module `experts.{i}`, whoever binds them. k, and how many experts have no weights, are in config.json. Weights of a scheme that
the engine makes plain in memory are counted as they are stored all the same: what that costs is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from enginery.checkpoint.files import StoredTensor, scan_checkpoint, unstack
from enginery.checkpoint.folder import read_config
from enginery.contracts.attention import AttnLayerFacts, KVGeometry
from enginery.contracts.engine import EngineFacts
from enginery.contracts.model import ModelFacts, ModelSpec
from enginery.contracts.weights import FormatNeeds, WeightFormatSpec
from enginery.kv.pool import TORCH_DTYPES, page_bytes
from enginery.kv.states import state_bytes
from enginery.plugin.registry import Registry
from enginery.worker.weights.formats import FormatReader, choose_format, stated_quantization
from enginery.worker.weights.needed_weights import ReadTensor, expert_share, needed_weights, tensors_read


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """All experts of the layers of which a token uses the same share, k / E."""

    share: float
    num_bytes: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class ContextSizes:
    """All layers that see as far back. window: in tokens, None for everything.

    token_bytes: of a token that is seen. key_flop: of a prompt's token and one that it sees; of latents, made into keys and values.
    """

    window: int | None
    token_bytes: int
    key_flop: int


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """dense: what every token is multiplied with. state_bytes: of a request's states in all layers."""

    dense_bytes: int
    dense_parameters: int
    experts: tuple[ExpertSizes, ...]
    contexts: tuple[ContextSizes, ...]
    state_bytes: int

    @property
    def token_parameters(self) -> float:
        """What one token is multiplied with: all that is dense, and its experts."""
        return self.dense_parameters + sum(each.share * each.parameters for each in self.experts)

    def weight_bytes(self, num_tokens: int) -> float:
        """What a step of so many tokens reads: all that is dense, and each expert that one of them is expected to choose."""
        return self.dense_bytes + sum((1 - (1 - each.share) ** num_tokens) * each.num_bytes for each in self.experts)


def engine_sizes(engine: EngineFacts, registry: Registry) -> ModelSizes | None:
    """Of the model that an engine runs, whose folder must be there, with or without weights. None: see `family_sizes`."""
    folder, kv_dtypes = Path(engine.folder), [value for setting, value, _ in engine.decisions if setting == "kv_dtype"]
    config, stored = read_config(folder), None
    if list(folder.glob("*.safetensors")):
        offer, _ = registry.find_model(config)
        stored = unstack(scan_checkpoint(folder), offer.spec.stacked_weights)
    return read_sizes(config, registry, dtype=engine.dtype, kv_dtype=next(iter(kv_dtypes), None), stored=stored)


def read_sizes(
    config: Mapping[str, object],
    registry: Registry,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> ModelSizes | None:
    """Of the model that config.json describes, on any machine: it takes no memory for weights. None: see `family_sizes`.

    dtype: of weights that are stored in no scheme. kv_dtype: of the memory, if it is another. stored: the checkpoint's tensors,
    where there are some.
    """
    (offer, _), stated, reader = registry.find_model(config), stated_quantization(config), None
    if stated is not None:
        needs = FormatNeeds(config=stated, device="cpu", dtype=dtype)
        reader = FormatReader.load(choose_format(stated, registry.offers(WeightFormatSpec), needs)[0], stated, stored)
    return family_sizes(offer.spec, config, dtype=dtype, kv_dtype=kv_dtype, reader=reader)


def family_sizes(
    family: ModelSpec, config: Mapping[str, object], *, dtype: str, kv_dtype: str | None = None, reader: FormatReader | None = None
) -> ModelSizes | None:
    """Of a family's model. None: it has no weights, or has experts and config.json does not say how many a token uses."""
    facts = family.describe(config)
    read = tuple(tensors_read(needed_weights(family, config, TORCH_DTYPES[dtype], reader=reader), facts))
    dense = [tensor for tensor in read if tensor.expert is None]
    experts = _expert_sizes(read, config)
    if not read or experts is None:
        return None
    return ModelSizes(
        dense_bytes=sum(tensor.num_bytes for tensor in dense),
        dense_parameters=sum(tensor.parameters for tensor in dense),
        experts=experts,
        contexts=tuple(_context_sizes(facts, kv_dtype or dtype)),
        state_bytes=state_bytes(KVGeometry(pages={}, page_size=1, layers=facts.layers, dtype=dtype)),
    )


def _expert_sizes(read: tuple[ReadTensor, ...], config: Mapping[str, object]) -> tuple[ExpertSizes, ...] | None:
    """By how many experts a layer has. None: nothing says how many a token uses."""
    by_count: dict[int, list[ReadTensor]] = {}
    for tensors in _by_layer(read):
        by_count.setdefault(len({tensor.expert for tensor in tensors}), []).extend(tensors)
    if by_count and expert_share(config, 1) is None:
        return None
    return tuple(
        ExpertSizes(
            share=expert_share(config, count) or 0.0,
            num_bytes=sum(tensor.num_bytes for tensor in tensors),
            parameters=sum(tensor.parameters for tensor in tensors),
        )
        for count, tensors in by_count.items()
    )


def _by_layer(read: Iterable[ReadTensor]) -> Iterable[list[ReadTensor]]:
    """The tensors of experts, those of each layer together."""
    layers: dict[str, list[ReadTensor]] = {}
    for tensor in read:
        if tensor.expert is not None:
            layers.setdefault(tensor.expert[0], []).append(tensor)
    return layers.values()


def _context_sizes(facts: ModelFacts, dtype: str) -> Iterator[ContextSizes]:
    layers = [layer for layer in facts.layers if layer.recurrent is None]
    for window in dict.fromkeys(layer.sliding_window for layer in layers):
        alike = tuple(layer for layer in layers if layer.sliding_window == window)
        geometry = KVGeometry(pages={}, page_size=1, layers=alike, dtype=dtype)
        yield ContextSizes(window=window, token_bytes=page_bytes(geometry), key_flop=sum(map(_key_flop, alike)))


def _key_flop(layer: AttnLayerFacts) -> int:
    if layer.latent is not None:
        return 2 * layer.num_heads * (layer.latent.nope_dim + layer.latent.rope_dim + layer.latent.value_dim)
    return 2 * layer.num_heads * (layer.head_dim + layer.value_dim)
