"""EAGLE-3 heads, loaded as they are published, guess what they would without a cache."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine import model_heads
from engine.heads_made import VOCABULARY, Eagle3, double, eagle3_step, states_of, write_eagle
from engine.model_heads import PROMPT, asking, assert_guesses, assert_same_answers, guesses_of, options
from engine.test_kinds_at_random import WINDOWS
from engine.test_speculation import answers_of
from offers import offering
from parity.oracle import EXPERT_FAMILIES, FAMILIES, Oracle

from enginery.contracts.model import Model, ModelSpec
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError, ConfigError, EnginError
from enginery.plugin.registry import Registry

llama = model_heads.llama  # a fixture


LAYOUTS: dict[str, Eagle3] = {
    "its authors'": Eagle3(),
    "layers.0, the whole vocabulary, the target's head": Eagle3(layer="layers.0", own=256, has_head=False),
    "the whole vocabulary, its own head": Eagle3(own=256),
    "the whole vocabulary, and which token is which": Eagle3(own=256, maps_all=True),
    "speculators": Eagle3(
        layer="layers.0",
        is_speculators=True,
        config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "speculators_config": {"algorithm": "eagle3"}},
    ),
    "speculators, other norms": Eagle3(
        layer="layers.0",
        is_speculators=True,
        config={"norm_before_residual": False, "norm_before_fc": True, "norm_output": True},
    ),
    "layers whose output is named": Eagle3(
        config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5], "use_aux_hidden_state": True}}
    ),
    "speculators, an embedding that was trained with it": Eagle3(
        layer="layers.0", is_speculators=True, config={"embed_requires_grad": True}
    ),
    "biases of Qwen2": Eagle3(config={"qkv_bias": True}),
    "two layers": Eagle3(num_features=2, config={"eagle_aux_hidden_state_layer_ids": [6, 0]}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eagle3_head_guesses_as_in_plain_torch(
    llama: Oracle, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Of a prompt in two chunks, and after each step; guesses that were wrong are overwritten."""
    head = LAYOUTS[layout]
    folder = head.write(tmp_path)
    engine = Engine.build(options(llama.folder, drafter="eagle3", draft_model=str(folder), draft_length="3"), registry)
    found = guesses_of(engine, llama.prompts[4][:PROMPT], monkeypatch)
    target = double(llama)
    step, mixed = eagle3_step(head, target)
    layers = head.layers_of(6)

    def features(tokens: list[int]) -> torch.Tensor:
        states = (*states_of(target, tokens)[:6], before_norm(target, tokens))
        return torch.cat([states[each] for each in layers], -1)

    own = torch.arange(head.own) + head.tensors().get("d2t", torch.zeros(head.own, dtype=torch.int64))
    assert_guesses(found, [step], features, mixed=mixed, own=own)


@pytest.mark.parametrize("stated", [{"qkv_bias": True}, {"architectures": ["Qwen2ForCausalLMEagle"]}, {}])
def test_an_eagle_head_for_qwen2_guesses_with_its_biases(
    llama: Oracle, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: dict[str, object]
) -> None:
    """Of queries, keys and values. Its authors' config.json says so by a key of theirs, SGLang's by the architecture."""
    target = double(llama)
    step = write_eagle(tmp_path, target, has_biases=True, **stated)
    engine = Engine.build(options(llama.folder, drafter="eagle", draft_model=str(tmp_path), draft_length="3"), registry)
    found = guesses_of(engine, llama.prompts[4][:PROMPT], monkeypatch)
    assert_guesses(found, [step], lambda tokens: states_of(target, tokens)[-1])


def before_norm(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """What the last norm is given, [T, C]."""
    kept: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0][0]))
    states_of(model, tokens)
    hook.remove()
    return kept[0]


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight", "midlayer.hidden_norm.weight", "norm.weight"])
def test_an_eagle3_head_without_one_of_its_tensors_is_refused(
    llama: Oracle, registry: Registry, tmp_path: Path, missing: str
) -> None:
    head = Eagle3()
    folder = head.write(tmp_path, {name: each for name, each in head.tensors().items() if name != missing})
    with pytest.raises(CheckpointError, match=rf"tensor '{missing}' \[[\d, ]+\] is missing") as refused:
        Engine.build(options(llama.folder, drafter="eagle3", draft_model=str(folder)), registry)
    assert str(folder) in str(refused.value)


MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "another width": (
        {"target_hidden_size": 96},
        "is for a model whose hidden states have 96 values, and those of this",
    ),
    "no such layer": ({"eagle_aux_hidden_state_layer_ids": [2, 9, 4]}, "takes hidden states of layer 9, and "),
    "no layers": ({"eagle_aux_hidden_state_layer_ids": "2"}, "has eagle_aux_hidden_state_layer_ids '2', which must be a list"),
    "norms of each": ({"fc_norm": True}, "has fc_norm True; heads are served with False only"),
    "one hidden state": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "has use_aux_hidden_state False; heads are served",
    ),
    "two layers": ({"num_hidden_layers": 2}, "has 2 layers (num_hidden_layers); a head has 1"),
    "other tokens": ({"vocab_size": 300}, "has a vocabulary of 300 tokens and "),
}


@pytest.mark.parametrize("which", MISFITS)
def test_an_eagle3_head_that_does_not_fit_is_refused(llama: Oracle, registry: Registry, tmp_path: Path, which: str) -> None:
    config, message = MISFITS[which]
    head = Eagle3(target_size=96) if "target_hidden_size" in config else Eagle3()
    folder = head.write(tmp_path, **config)
    with pytest.raises(EnginError, match=re.escape(message)):
        Engine.build(options(llama.folder, drafter="eagle3", draft_model=str(folder)), registry)


def test_tokens_that_the_target_has_not_got_are_refused(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    """As where d2t has the tokens themselves, and not what is to be added."""
    head = Eagle3()
    tensors = head.tensors()
    tensors["d2t"] = tensors["d2t"] + 2 * torch.arange(head.own)
    folder = head.write(tmp_path, tensors)
    with pytest.raises(
        CheckpointError, match=r"d2t of the EAGLE-3 head gives its token \d+ the number \d+, and the vocabulary has"
    ):
        Engine.build(options(llama.folder, drafter="eagle3", draft_model=str(folder)), registry)


class Untapped:
    """A model that keeps its layers' hidden states to itself."""

    def __init__(self, model: Model) -> None:
        self.forward, self.logits, self.embedded = model.forward, model.logits, model.embedded  # type: ignore[attr-defined]


def test_a_target_whose_layers_cannot_be_tapped_is_refused(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    (offer,) = (each for each in registry.offers(ModelSpec) if each.name == "llama")
    spec = dataclasses.replace(offer.spec, build=lambda context: Untapped(offer.spec.build(context)))  # type: ignore[arg-type]
    closed = offering(registry, ModelSpec, dataclasses.replace(offer, spec=spec))
    asked = options(llama.folder, drafter="eagle3", draft_model=str(Eagle3().write(tmp_path)))
    with pytest.raises(ConfigError, match=r"layers 2, 3, 3, which the model of .*model-llama.* does not give: it has no `taps`"):
        Engine.build(asked, closed)


def test_an_eagle3_heads_weights_may_be_drawn(llama: Oracle, registry: Registry, tmp_path: Path) -> None:
    """For benchmarks. Its tokens are the first of the target's then."""
    asked = [asking(f"{at}", prompt, temperature=0.8, seed=at) for at, prompt in enumerate(llama.prompts[:3])]
    expected = answers_of(Engine.build(options(llama.folder, load_format="dummy"), registry), asked)
    head = {"drafter": "eagle3", "draft_model": str(Eagle3().write(tmp_path))}
    engine = Engine.build(options(llama.folder, load_format="dummy", **head), registry)
    assert {key: one.tokens for key, one in answers_of(engine, asked).items()} == {key: one.tokens for key, one in expected.items()}
    assert engine.meter.stats().drafts.drafted > 0


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "longcat-flash"])
def test_tokens_with_an_eagle3_head_are_those_of_plain_decoding(
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    oracle = write_oracle(f"tapped {name}", {**FAMILIES, **EXPERT_FAMILIES, "gemma2": WINDOWS}[name])
    count = 2 if name == "longcat-flash" else 4
    head = Eagle3(own=VOCABULARY, config={"eagle_aux_hidden_state_layer_ids": [0, 1, count]})
    drafter = {"drafter": "eagle3", "draft_model": str(head.write(tmp_path))}
    assert_same_answers(registry, oracle.folder, oracle.prompts[1:5], monkeypatch, caplog, **drafter)
