"""Tiny checkpoints of heads that draft, in the layouts that people publish, and what these heads compute, written plainly.

EAGLE-3: float64, whole sequences, no cache (arXiv:2503.01840). Modules for multi-token prediction: the layer is transformers' own.
T tokens, C hidden size, F hidden states of the target.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from parity.ling_made import hub_config, hub_tensors
from parity.oracle import Oracle
from safetensors.torch import load_file, save_file

SIZE, VOCABULARY, HEADS, KV_HEADS, DIM = 64, 256, 4, 2, 16
OWN_VOCABULARY = 96
EPS = 1e-5
LAYER = dict(
    hidden_size=SIZE,
    intermediate_size=2 * SIZE,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    num_hidden_layers=1,
    max_position_embeddings=2048,
    rms_norm_eps=EPS,
    model_type="llama",
)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """[H, T, D], each head's halves as pairs."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def drawn(shapes: Mapping[str, Sequence[int]], seed: int = 3) -> dict[str, torch.Tensor]:
    """Norms about one, products about as large as what goes in."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, size in shapes.items():
        noise = torch.randn(*size, generator=generator)
        found[name] = 1 + 0.2 * noise if len(size) == 1 else noise / math.sqrt(size[-1])
    return found


def biases(at: str) -> dict[str, tuple[int, ...]]:
    """Of queries, keys and values, as in Qwen2's layers."""
    return {f"{at}.{name}_proj.bias": (heads * DIM,) for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}


def behind_attention(residual: torch.Tensor, x: torch.Tensor, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[T, C]: what a head's layer, whose attention is given `x`, leaves of the residual stream. own: its tensors."""
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", 0.0))
        .view(len(x), -1, DIM)
        .transpose(0, 1)
        for name in "qkv"
    )  # [H, T, D]
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (rotated(k), v))
    scores = rotated(q) @ k.transpose(1, 2) / math.sqrt(DIM)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
    residual = residual + attended @ own["self_attn.o_proj.weight"].T
    x = norm(residual, own["post_attention_layernorm.weight"])
    inner = F.silu(x @ own["mlp.gate_proj.weight"].T) * (x @ own["mlp.up_proj.weight"].T)
    return residual + inner @ own["mlp.down_proj.weight"].T


@dataclass(frozen=True, kw_only=True)
class Eagle3:
    """An EAGLE-3 head. config: beside its layer's. layer: what its tensors begin with. own: size of its vocabulary.

    maps_all: it has `d2t` though that is the target's.
    """

    config: dict[str, Any] = field(default_factory=dict)
    layer: str = "midlayer"
    own: int = OWN_VOCABULARY
    has_head: bool = True
    maps_all: bool = False
    is_speculators: bool = False
    num_features: int = 3
    target_size: int = SIZE
    vocab_size: int = VOCABULARY

    @property
    def has_embedding(self) -> bool:
        """One of its own: as wide as it is, or trained with it, as speculators does where it is told to."""
        return self.target_size != SIZE or bool(self.config.get("embed_requires_grad"))

    def tensors(self) -> dict[str, torch.Tensor]:
        at, inner = self.layer, 2 * SIZE
        found = drawn(
            {
                "fc.weight": (SIZE, self.num_features * self.target_size),
                f"{at}.input_layernorm.weight": (SIZE,),
                f"{at}.hidden_norm.weight": (SIZE,),
                f"{at}.self_attn.q_proj.weight": (HEADS * DIM, 2 * SIZE),
                f"{at}.self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * SIZE),
                f"{at}.self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * SIZE),
                f"{at}.self_attn.o_proj.weight": (SIZE, HEADS * DIM),
                f"{at}.post_attention_layernorm.weight": (SIZE,),
                f"{at}.mlp.gate_proj.weight": (inner, SIZE),
                f"{at}.mlp.up_proj.weight": (inner, SIZE),
                f"{at}.mlp.down_proj.weight": (SIZE, inner),
                "norm.weight": (SIZE,),
                **({"lm_head.weight": (self.own, SIZE)} if self.has_head else {}),
                **({"input_norm.weight": (self.num_features * self.target_size,)} if self.config.get("norm_before_fc") else {}),
                **({"embed_tokens.weight": (self.vocab_size, SIZE)} if self.has_embedding else {}),
                **(biases(f"{at}.self_attn") if self.config.get("qkv_bias") else {}),
            }
        )
        if self.own < self.vocab_size or self.maps_all:
            kept = torch.randperm(self.vocab_size, generator=torch.Generator().manual_seed(9))[: self.own].sort().values
            found["d2t"] = kept - torch.arange(self.own)
            found["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
        return found

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, **config: object) -> Path:
        layer = {**LAYER, "vocab_size": self.vocab_size}
        beside = {"draft_vocab_size": self.own, **self.config, **config}
        if self.is_speculators:
            stated = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer}
        else:
            stated = {"architectures": ["LlamaForCausalLMEagle3"], **layer}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**stated, **beside}))
        save_file(dict(tensors or self.tensors()), folder / "model.safetensors")
        return folder

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[T, C] each, of what is mixed already: [T, C], before the last norm."""
        own = {name.removeprefix(f"{self.layer}."): each.double() for name, each in self.tensors().items()}
        normed = norm(hidden, own["hidden_norm.weight"])
        x = torch.cat((norm(embedded, own["input_layernorm.weight"]), normed), -1)
        residual = normed if self.config.get("norm_before_residual", self.is_speculators) else hidden
        return behind_attention(residual, x, own)

    def layers_of(self, count: int) -> tuple[int, ...]:
        """Whose input it takes, of a target with so many layers."""
        if stated := self.config.get("eagle_aux_hidden_state_layer_ids"):
            return tuple(stated)
        if nested := self.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids"):
            return tuple(each + 1 for each in nested)
        return (2, count // 2, count - 3)


def double(oracle: Oracle) -> torch.nn.Module:
    return copy.deepcopy(oracle.model).double()


@torch.no_grad()
def states_of(model: torch.nn.Module, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """What goes into each layer, [T, C], and last what comes out of the last norm."""
    found = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False).hidden_states
    return tuple(each[0] for each in found)


DEEPSEEK = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
MIMO = LING = ("enorm", "hnorm", "final_layernorm", "eh_proj")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def guessed_by_chain(
    steps: Sequence[Step], features: torch.Tensor, shifted: Sequence[int], count: int, *, by_features: bool = False
) -> tuple[list[int], list[torch.Tensor]]:
    """As `guessed`, by modules one behind the other: the same rows, each time with the tokens one further.

    by_features: each is given the target's hidden states, not what the one before it returned.
    """
    ids, hidden = list(shifted), features
    tokens, every = [], []
    for step in steps[:count]:
        carried, logits = step(torch.tensor(ids), hidden)
        hidden = hidden if by_features else carried
        every.append(logits[-1])
        tokens.append(int(logits[-1].argmax()))
        ids = [*ids[1:], tokens[-1]]
    return tokens, every


@torch.no_grad()
def guessed(
    step: Step, features: torch.Tensor, shifted: Sequence[int], count: int, *, mixed: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens, and the logits that they are of. step: of ids [T] and hidden states [T, C], to what is carried on and logits, of all.

    features: of the rows that the target ran over. shifted: each row's next token. mixed: features as the head's own states.
    """
    ids, hidden = list(shifted), mixed(features)
    tokens, every = [], []
    for _ in range(count):
        carried, logits = step(torch.tensor(ids), hidden)
        every.append(logits[-1])
        tokens.append(int(logits[-1].argmax()))
        ids, hidden = [*ids, tokens[-1]], torch.cat((hidden, carried[-1:]))
    return tokens, every


def eagle3_step(head: Eagle3, target: torch.nn.Module) -> tuple[Step, Callable[[torch.Tensor], torch.Tensor]]:
    own = {name: each.double() for name, each in head.tensors().items() if each.is_floating_point()}
    embedding = own.get("embed_tokens.weight", target.model.embed_tokens.weight)
    output = own.get("lm_head.weight", target.lm_head.weight)
    offsets = head.tensors().get("d2t", torch.zeros(head.own, dtype=torch.int64))

    def mixed(features: torch.Tensor) -> torch.Tensor:
        if head.config.get("norm_before_fc"):
            features = norm(features, own["input_norm.weight"])
        return features @ own["fc.weight"].T

    def step(ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = head.forward(embedding[ids], hidden)
        normed = norm(made, own["norm.weight"])
        logits = torch.full((len(ids), head.vocab_size), -math.inf, dtype=torch.float64)
        logits[:, torch.arange(head.own) + offsets] = normed @ output.T
        return (normed if head.config.get("norm_output") else made), logits

    return step, mixed


def write_eagle(folder: Path, target: torch.nn.Module, *, has_biases: bool, **config: object) -> Step:
    """An EAGLE head for a target of float64, as its authors publish it, and what it computes."""
    at, inner = "layers.0", 2 * SIZE
    sizes = {
        "fc.weight": (SIZE, 2 * SIZE),
        "fc.bias": (SIZE,),
        **{f"{at}.self_attn.{name}_proj.weight": (count * DIM, SIZE) for name, count in (("q", HEADS), ("k", KV_HEADS))},
        f"{at}.self_attn.v_proj.weight": (KV_HEADS * DIM, SIZE),
        f"{at}.self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        f"{at}.post_attention_layernorm.weight": (SIZE,),
        **{f"{at}.mlp.{name}_proj.weight": (inner, SIZE) for name in ("gate", "up")},
        f"{at}.mlp.down_proj.weight": (SIZE, inner),
        **(biases(f"{at}.self_attn") if has_biases else {}),
    }
    tensors, stated = drawn(sizes), {"architectures": ["LlamaForCausalLM"], **LAYER, "vocab_size": VOCABULARY, **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "model.safetensors")
    own = {name.removeprefix(f"{at}."): each.double() for name, each in tensors.items()}

    def step(ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat((target.model.embed_tokens.weight[ids], hidden), -1) @ own["fc.weight"].T + own["fc.bias"]
        made = behind_attention(x, x, own)
        return made, made @ target.lm_head.weight.T

    return step


@dataclass(frozen=True, kw_only=True)
class Module:
    """Modules for multi-token prediction in a checkpoint: the last layers of a model that transformers made are theirs.

    names: of the norms and products beside each layer, those of each module. window: of its layers, if they have one.
    """

    oracle: Oracle
    folder: Path
    beside: Mapping[str, torch.Tensor]
    names: tuple[tuple[str, ...], ...]
    carries_normed: bool
    is_qwen: bool
    is_ling: bool = False
    window: int | None = None

    def features(self, target: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
        """[T, C]: what goes into the first layer too many; of Qwen and Ling behind the target's norm."""
        found = states_of(target, tokens)[target.config.num_hidden_layers - len(self.names)]
        return target.model.norm(found) if self.is_qwen or self.is_ling else found

    def steps(self) -> tuple[torch.nn.Module, list[Step]]:
        """The target of float64 behind which they stand, with layers too many, and the modules."""
        target = double(self.oracle)
        layers = target.model.layers[-len(self.names) :]
        return target, [self._step(target, layer, names) for layer, names in zip(layers, self.names, strict=True)]

    def _step(self, target: torch.nn.Module, layer: torch.nn.Module, names: Sequence[str]) -> Step:
        *norms, mix = (self.beside[name].double() for name in names)
        embedding_norm, hidden_norm, last_norm = (each + self.is_qwen for each in norms)
        eps = target.config.rms_norm_eps

        def step(ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            embedded = norm(target.model.embed_tokens.weight[ids], embedding_norm, eps)
            x = torch.cat((embedded, norm(hidden, hidden_norm, eps)), -1) @ mix.T
            positions = torch.arange(len(ids))[None]
            distance = positions[0, :, None] - positions[0]
            unseen = (distance < 0) | (distance >= (self.window or len(ids)))
            mask = torch.zeros(1, 1, *unseen.shape, dtype=torch.float64).masked_fill(unseen, -math.inf)
            kind = () if self.window is None else ("sliding_attention",)
            made = layer(
                x[None],
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=target.model.rotary_emb(x[None], positions, *kind),
            )
            made = (made if isinstance(made, torch.Tensor) else made[0])[0]
            normed = norm(made, last_norm, eps)
            return (normed if self.carries_normed else made), normed @ target.lm_head.weight.T

        return step


def write_module(
    oracle: Oracle,
    folder: Path,
    *,
    carries_normed: bool,
    is_qwen: bool = False,
    is_beside_images: bool = False,
    is_mimo: bool = False,
    is_ling: bool = False,
    count: int = 1,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    **config: object,
) -> Module:
    """Of a model with `count` layers more: these are behind the last then, in DeepSeek's and GLM's layout, or in `mtp`, as Qwen's
    and MiMo's, which have no head of their own. Ling's are behind the last and have none either.

    is_beside_images: as the hub has Qwen3.5, its config in `text_config`, and longer names.
    """
    tensors = load_file(oracle.folder / "model.safetensors")
    stated = json.loads((oracle.folder / "config.json").read_text())
    last = stated["num_hidden_layers"] - count
    names, beside, again = [], {}, {}
    for index in range(count):
        at = "mtp" if is_qwen else f"model.mtp.layers.{index}" if is_mimo else f"model.layers.{last + index}"
        own = [f"{at}.{name}.weight" for name in (QWEN if is_qwen else MIMO if is_mimo else LING if is_ling else DEEPSEEK)]
        beside |= drawn({**dict.fromkeys(own[:3], (SIZE,)), own[3]: (SIZE, 2 * SIZE)}, seed=3 + index)
        names.append(tuple(own))
        if is_qwen or is_mimo:
            to = f"model.mtp.layers.{index}." if is_mimo else f"mtp.layers.{index}."
            tensors = {name.replace(f"model.layers.{last + index}.", to): each for name, each in tensors.items()}
        elif not is_ling:
            again[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            again[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if is_mimo:
        mtp = {name: each for name, each in tensors.items() if ".mtp." in name}
        tensors = {name: each for name, each in tensors.items() if name not in mtp}
        tensors |= {name.replace("post_attention_layernorm", "pre_mlp_layernorm"): each for name, each in mtp.items()}
    whole = {**tensors, **beside, **again}
    change(whole)
    if is_ling:
        whole, stated = hub_tensors(whole), hub_config(oracle.model.config)
    stated |= {"num_hidden_layers": last, "num_nextn_predict_layers": count, **config}
    for key in ("mlp_layer_types", "layer_types"):
        if key in stated and key not in config:
            stated[key] = stated[key][:last]
    if is_beside_images:
        del stated["num_nextn_predict_layers"]
        stated |= {"mtp_num_hidden_layers": count}
        stated = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": stated}
        whole = {re.sub(r"^model\.", "model.language_model.", name): each for name, each in whole.items()}
        whole["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(whole, folder / "model.safetensors")
    return Module(
        oracle=oracle,
        folder=folder,
        beside=beside,
        names=tuple(names),
        carries_normed=carries_normed,
        is_qwen=is_qwen,
        is_ling=is_ling,
        window=stated["sliding_window"] if is_mimo else None,
    )
