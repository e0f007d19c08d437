"""Heads that are made to be right: a wrong shift, a wrong hidden state or a wrong carry would show in what is accepted.

The target's tokens are directions. Its layer i turns the direction of token t into that of P_i(t), so the residual stream into each
layer points elsewhere, and the next token is a function of the last. C hidden size, also the size of the vocabulary.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.heads_made import Eagle3
from engine.model_heads import asking, options
from parity.oracle import expert_shape, latent_shape, shape
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, LlamaConfig, PretrainedConfig

from enginery.contracts.engine import DraftCounts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

SIZE = 64
COUNT = 6
FAR = 16.0  # how much longer a layer's output is than what it was given


def permutation(seed: int) -> torch.Tensor:
    return torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))


def turning(to: torch.Tensor) -> torch.Tensor:
    """[C, C]: the direction of t becomes that of to[t]."""
    return torch.eye(SIZE)[:, to]


def composed(count: int) -> torch.Tensor:
    """By token: where the residual stream into layer `count` points."""
    found = torch.arange(SIZE)
    for index in range(count):
        found = permutation(index)[found]
    return found


def mlp_that_turns(to: torch.Tensor, length: float) -> dict[str, torch.Tensor]:
    """silu(x) x is 64 at the direction that x points to, and nothing elsewhere: x is as long as a norm leaves it, 8."""
    return {"gate_proj": torch.eye(SIZE), "up_proj": torch.eye(SIZE), "down_proj": turning(to) * length / 64}


def target_tensors(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(each) for name, each in AutoModelForCausalLM.from_config(config).state_dict().items()}
    for name, each in tensors.items():
        if "norm" in name:
            each.fill_(1.0)
    for index in range(COUNT):
        for name, weight in mlp_that_turns(permutation(index), FAR ** (index + 1)).items():
            tensors[f"model.layers.{index}.mlp.{name}.weight"] = weight
    tensors["model.embed_tokens.weight"] = torch.eye(SIZE)
    tensors["lm_head.weight"] = turning(permutation(99))
    return tensors


def next_token() -> torch.Tensor:
    """By token."""
    return permutation(99)[composed(COUNT)]


def write(folder: Path, config: PretrainedConfig, tensors: dict[str, torch.Tensor], **changes: object) -> Path:
    config.save_pretrained(folder)
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    stated |= {"architectures": config.architectures, **changes}
    path.write_text(json.dumps(stated))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def small(**changes: object) -> dict[str, object]:
    return shape(vocab_size=SIZE, intermediate_size=SIZE, num_hidden_layers=COUNT, rms_norm_eps=1e-5, **changes)


def counts_of(registry: Registry, folder: Path, **drafter: object) -> DraftCounts:
    """Of four requests, whose prompts come in chunks and together. What they are told is checked too."""
    engine = Engine.build(options(folder, dtype="float32", draft_length="4", **drafter), registry)
    told: dict[str, list[int]] = {}
    for at in range(4):
        prompt = torch.randint(8, SIZE, (20 + 3 * at,), generator=torch.Generator().manual_seed(at)).tolist()
        engine.submit(asking(str(at), prompt, max_tokens=21))
        told[str(at)] = prompt[-1:]
    while engine.has_work:
        for output in engine.step():
            told[output.request_id] += output.token_ids
    following = next_token().tolist()
    for tokens in told.values():
        assert len(tokens) == 22
        assert all(following[before] == token for before, token in itertools.pairwise(tokens))
    return engine.meter.stats().drafts


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**small(), architectures=["LlamaForCausalLM"])
    return write(tmp_path_factory.mktemp("turns"), config, target_tensors(config))


def head_by_feature(head: Eagle3, place: int) -> dict[str, torch.Tensor]:
    """Its h points to token p, by one hidden state of the three; its MLP turns it to the next, and so does its output head."""
    tensors = {name: torch.zeros_like(each) for name, each in head.tensors().items()}
    for name in tensors:
        if "norm" in name:
            tensors[name].fill_(1.0)
    mix = torch.zeros(SIZE, 3 * SIZE)
    layer = head.layers_of(COUNT)[place]
    mix[:, place * SIZE : (place + 1) * SIZE] = turning(composed(layer).argsort()) / FAR**layer
    tensors["fc.weight"] = mix
    for name, weight in mlp_that_turns(next_token(), 1000.0).items():
        tensors[f"midlayer.mlp.{name}.weight"] = weight
    tensors["lm_head.weight"] = turning(next_token())
    return tensors


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_hidden_state_is_that_of_its_layer(llama: Path, registry: Registry, tmp_path: Path, place: int) -> None:
    """What a guess carries on is used as well: there are four in a row."""
    head = Eagle3(own=SIZE, vocab_size=SIZE, config={"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 3, 5]})
    folder = head.write(tmp_path, head_by_feature(head, place), intermediate_size=SIZE)
    counts = counts_of(registry, llama, drafter="eagle3", draft_model=str(folder))
    assert counts.accepted == counts.drafted > 30, counts


def module_tensors(config: PretrainedConfig, *, by_embedding: bool) -> dict[str, torch.Tensor]:
    """Of a target, and of a module whose layer does nothing: x points to where the target's last layer would."""
    tensors, at = target_tensors(config), f"model.layers.{COUNT}"
    own = {name.replace("layers.0.", f"layers.{COUNT}."): each for name, each in tensors.items() if "layers.0." in name}
    tensors |= {name: torch.zeros_like(each) if "mlp" in name else each.clone() for name, each in own.items()}
    mix = torch.zeros(SIZE, 2 * SIZE)
    if by_embedding:
        mix[:, :SIZE] = turning(composed(COUNT))
    else:  # from where the target's last layer points at p: to its token, the next one, and to where that points
        mix[:, SIZE:] = turning(composed(COUNT)[next_token()[composed(COUNT).argsort()]])
    tensors[f"{at}.eh_proj.weight"] = mix
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}.{name}.weight"] = torch.ones(SIZE)
    return tensors


def deepseek() -> PretrainedConfig:
    sizes = latent_shape(q_lora_rank=48) | small(num_key_value_heads=4) | expert_shape(first_k_dense_replace=COUNT)
    return DeepseekV3Config(**sizes, architectures=["DeepseekV3ForCausalLM"])


def glm() -> PretrainedConfig:
    sizes = small(head_dim=16) | expert_shape(first_k_dense_replace=COUNT)
    return Glm4MoeConfig(**sizes, architectures=["Glm4MoeForCausalLM"])


@pytest.mark.parametrize(("config_of", "by_embedding"), [(deepseek, True), (deepseek, False), (glm, True), (glm, False)])
def test_a_module_is_given_the_next_token_and_the_hidden_state_before_it(
    registry: Registry, tmp_path: Path, config_of: Callable[[], PretrainedConfig], *, by_embedding: bool
) -> None:
    """By either alone it is right; with another token or row, it never is."""
    config = config_of()
    folder = write(tmp_path, config, module_tensors(config, by_embedding=by_embedding), num_nextn_predict_layers=1)
    counts = counts_of(registry, folder, drafter="mtp")
    assert counts.accepted == counts.drafted > 30, counts
