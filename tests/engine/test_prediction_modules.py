"""Modules for multi-token prediction, alone and in chains, loaded as they are published, guess what they would without a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from engine import model_heads, prediction_modules
from engine.heads_made import Module
from engine.model_heads import PROMPT, assert_guesses, assert_same_answers, guesses_of, options
from engine.test_float8_weights import CONFIG, plain, quantised
from parity.oracle import Oracle

from enginery.checkpoint import files
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError, ConfigError
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose

llama, module_of, chain_of = model_heads.llama, prediction_modules.module_of, prediction_modules.chain_of  # fixtures


@pytest.mark.parametrize("name", prediction_modules.MODULES)
def test_a_module_guesses_as_transformers_layer_does(
    module_of: Callable[..., Module], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = module_of(name)
    engine = Engine.build(options(module.folder, drafter="mtp", draft_length="3"), registry)
    found = guesses_of(engine, module.oracle.prompts[4][:PROMPT], monkeypatch)
    target, steps = module.steps()
    with torch.no_grad():
        assert_guesses(found, steps, lambda tokens: module.features(target, tokens))


@pytest.mark.parametrize(
    ("name", "count"),
    [("deepseek-v3", 3), ("glm4-moe", 2), ("glm4-moe", 3), ("ling-2", 3), ("qwen3.5", 3), ("mimo-v2-flash", 3)],
)
def test_a_chain_of_modules_guesses_as_transformers_layers_do(
    chain_of: Callable[..., Module], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """Each module is given the tokens that came since, in place of the guesses it was given; of a prompt in chunks too."""
    module = chain_of(name)
    engine = Engine.build(options(module.folder, drafter="mtp", draft_length=str(count)), registry)
    found = guesses_of(engine, module.oracle.prompts[4][:PROMPT], monkeypatch)
    assert {len(guesses) for _, guesses, _ in found[:5]} == {count}
    target, steps = module.steps()
    with torch.no_grad():
        assert_guesses(found, steps, lambda tokens: module.features(target, tokens), by_features=name == "mimo-v2-flash")


def test_a_chain_guesses_no_more_tokens_than_it_has_modules(chain_of: Callable[..., Module], registry: Registry) -> None:
    module = chain_of("glm4-moe")
    assert choose(options(module.folder, drafter="auto"), registry).draft_length == 3
    with pytest.raises(ConfigError, match=r"--draft-length is 4, but mtp, from .*, is good for 3 at most"):
        choose(options(module.folder, drafter="mtp", draft_length="4"), registry)


def test_a_module_is_stored_as_its_target_is(
    module_of: Callable[..., Module], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float8, as DeepSeek's own; it guesses what one of plain weights guesses that are the same numbers."""

    def change(tensors: dict[str, torch.Tensor], *, plainly: bool) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight") and "eh_proj" not in name]:
            stored = quantised(tensors.pop(name))
            module = name.removesuffix(".weight")
            tensors |= {name: plain(stored)} if plainly else {module + suffix: each for suffix, each in stored.items()}

    found = []
    for plainly, config in ((True, {}), (False, {"quantization_config": CONFIG})):
        folder = module_of("deepseek-v3", change=partial(change, plainly=plainly), **config).folder
        engine = Engine.build(options(folder, drafter="mtp", draft_length="3"), registry)
        found.append([guess[:2] for guess in guesses_of(engine, list(range(20, 60)), monkeypatch)])
    assert found[0] == found[1]
    assert len(found[0]) > 3


@pytest.mark.parametrize("missing", ["eh_proj.weight", "self_attn.kv_b_proj.weight", "shared_head.norm.weight"])
def test_a_module_without_one_of_its_tensors_is_refused(module_of: Callable[..., Module], registry: Registry, missing: str) -> None:
    name = f"model.layers.3.{missing}"
    module = module_of("deepseek-v3", change=lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' \[[\d, ]+\] is missing"):
        Engine.build(options(module.folder, drafter="mtp"), registry)
    assert Engine.build(options(module.folder), registry).has_work is False, "without a drafter nobody needs it"


@pytest.mark.parametrize(("missing", "drafter"), [(None, "mtp"), ("model.layers.3.hnorm.weight", None)])
def test_auto_takes_the_module_that_a_checkpoint_has(
    module_of: Callable[..., Module], registry: Registry, missing: str | None, drafter: str | None
) -> None:
    folder = module_of("deepseek-v3", change=lambda tensors: missing and tensors.pop(missing)).folder
    chosen = choose(options(folder, drafter="auto"), registry)
    assert (None if chosen.drafter is None else chosen.drafter.name) == drafter
    (why,) = (made.reason for made in chosen.decisions if made.setting == "drafter")
    assert why.startswith("auto: no draft model comes" if drafter is None else "auto: its draft model comes with this model")


def test_a_checkpoint_s_headers_are_read_once(
    module_of: Callable[..., Module], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has the module, what the target takes, what the module takes. Whoever writes it is read again."""
    read: list[Path] = []
    scan = files._scan_file
    monkeypatch.setattr(files, "_scan_file", lambda file: (read.append(file), scan(file))[1])
    for count in (1, 2):
        folder = module_of("glm4-moe").folder
        Engine.build(options(folder, drafter="auto"), registry)
        assert read == [folder / "model.safetensors"] * count


def test_a_checkpoint_that_states_no_module_has_none(module_of: Callable[..., Module], llama: Oracle, registry: Registry) -> None:
    without = module_of("deepseek-v3", num_nextn_predict_layers=0).folder
    for folder in (without, llama.folder):
        with pytest.raises(ConfigError, match=r"--drafter is mtp, a part of some models' own checkpoints"):
            Engine.build(options(folder, drafter="mtp"), registry)
    with pytest.raises(ConfigError, match=r"no plugin runs that of LlamaForCausalLM yet, only those of .*DeepseekV3ForCausalLM"):
        Engine.build(options(llama.folder, drafter="mtp"), registry)
    with pytest.raises(ConfigError, match=r"config\.json of this one does not say that it has one; take another"):
        Engine.build(options(without, drafter="mtp"), registry)
    several = module_of("deepseek-v3", num_nextn_predict_layers=2).folder
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.4.\S+' .* is missing"):
        Engine.build(options(several, drafter="mtp"), registry)
    one = module_of("deepseek-v3").folder
    with pytest.raises(ConfigError, match=r"--drafter is mtp, a part of the model's own checkpoint; leave --draft-model out"):
        Engine.build(options(one, drafter="mtp", draft_model=str(llama.folder)), registry)


@pytest.mark.parametrize("name", prediction_modules.MODULES)
def test_tokens_with_a_module_are_those_of_plain_decoding(
    module_of: Callable[..., Module],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    module = module_of(name)
    assert_same_answers(registry, module.folder, module.oracle.prompts[1:5], monkeypatch, caplog, drafter="mtp")


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5", "mimo-v2-flash"])
def test_tokens_with_a_chain_are_those_of_plain_decoding(
    chain_of: Callable[..., Module],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    module = chain_of(name)
    assert_same_answers(registry, module.folder, module.oracle.prompts[1:5], monkeypatch, caplog, most=3, drafter="mtp")
