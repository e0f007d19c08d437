"""EAGLE-3 heads and modules for multi-token prediction, loaded as they are published, guess what they would without a cache."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from engine.heads_made import (
    VOCABULARY,
    Eagle3,
    Module,
    Step,
    double,
    eagle3_step,
    guessed,
    guessed_by_chain,
    states_of,
    write_module,
)
from engine.test_float8_weights import CONFIG, plain, quantised
from engine.test_kinds_at_random import WINDOWS
from engine.test_speculation import answers_of
from offers import offering
from parity.oracle import EXPERT_FAMILIES, FAMILIES, Oracle, expert_shape, shape
from parity.test_hybrids import DELTA, SOME_EXPERTS
from transformers import LlamaConfig, MiMoV2FlashConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3NextConfig

from enginery.checkpoint import files
from enginery.config.schema import EngineOptions
from enginery.contracts.model import Model, ModelSpec
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError, ConfigError, EnginError
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.drafts.draft_model import Choose, DraftModel

CHUNK = 24
PROMPT = 40  # in two chunks


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


def asking(about: str, prompt: Iterable[int], **changes: object) -> GenerationRequest:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **changes}
    return GenerationRequest(request_id=about, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))  # type: ignore[arg-type]


def options(folder: Path, **changes: object) -> EngineOptions:
    given = {"model": str(folder), "num_pages": 300, "device": "cpu", "num_threads": 1, "max_batch_tokens": CHUNK, **changes}
    return EngineOptions(**given)  # type: ignore[arg-type]


Guesses = list[tuple[list[int], list[int], list[torch.Tensor]]]


def guesses_of(engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Guesses:
    """After each step that told: all tokens so far, what is guessed to follow, and the logits that were looked at for it."""
    looked_at: list[torch.Tensor] = []
    guess = DraftModel.guess

    def noted(
        self: DraftModel, state: torch.Tensor, positions: torch.Tensor, choose: Choose, module: Model | None = None
    ) -> torch.Tensor:
        looked_at.extend((module or self._modules[0]).logits(state)[:1].double())
        return guess(self, state, positions, choose, module)

    monkeypatch.setattr(DraftModel, "guess", noted)
    engine.submit(asking("a", prompt))
    tokens, found = list(prompt), []
    while engine.has_work:
        looked_at.clear()
        told = [token for output in engine.step() for token in output.token_ids]
        tokens += told
        if told and engine.has_work:
            guesses = dict(engine._made.of([(engine._scheduler.table.by_id["a"], 99)]))
            found.append((list(tokens), list(guesses.get("a", ())), list(looked_at)))
    return found


def assert_guesses(
    found: Guesses,
    steps: Sequence[Step],
    features: Callable[[list[int]], torch.Tensor],
    *,
    mixed: Callable[[torch.Tensor], torch.Tensor] = lambda features: features,
    own: torch.Tensor | None = None,
    by_features: bool = False,
) -> None:
    """steps: of a chain's modules, or one, again and again. own: the target's tokens that the head knows; None for all."""
    assert len(found) > 3
    for tokens, guesses, looked_at in found[:5]:
        hidden, following, count = features(tokens)[:-1], tokens[1:], len(guesses)
        if len(steps) > 1:
            expected, logits = guessed_by_chain(steps, hidden, following, count, by_features=by_features)
        else:
            expected, logits = guessed(steps[0], hidden, following, count, mixed=mixed)
        assert guesses == expected
        for one, other in zip(looked_at, logits, strict=True):
            assert torch.allclose(one, other if own is None else other[own], atol=2e-3, rtol=1e-3)


# EAGLE-3.

LAYOUTS: dict[str, Eagle3] = {
    "its authors'": Eagle3(),
    "layers.0, the whole vocabulary, the target's head": Eagle3(layer="layers.0", own=256, has_head=False),
    "the whole vocabulary, its own head": Eagle3(own=256),
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
    "two layers": Eagle3(num_features=2, config={"eagle_aux_hidden_state_layer_ids": [6, 0]}),
}


@pytest.fixture
def llama(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("llama of six", LlamaConfig(**shape(num_hidden_layers=6, rms_norm_eps=1e-5)))


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


# Modules for multi-token prediction.

KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]  # the last: the module's
HYBRID = shape(**DELTA, num_hidden_layers=5, layer_types=KINDS)
QWEN3_NEXT = Qwen3NextConfig(**HYBRID, **SOME_EXPERTS, experts_implementation="eager")
MIMO = MiMoV2FlashConfig(
    **shape(
        num_hidden_layers=4,
        head_dim=24,
        v_head_dim=16,
        n_routed_experts=8,
        sliding_window=17,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    )
    | expert_shape()
)
MODULES: dict[str, tuple[PretrainedConfig, dict[str, bool]]] = {
    "deepseek-v3": (EXPERT_FAMILIES["deepseek-v3"], {"carries_normed": False}),
    "glm4-moe": (EXPERT_FAMILIES["glm4-moe"], {"carries_normed": True}),
    "glm4-moe-lite": (EXPERT_FAMILIES["glm4-moe-lite"], {"carries_normed": True}),
    "qwen3-next": (QWEN3_NEXT, {"carries_normed": True, "is_qwen": True}),
    "qwen3.5": (Qwen3_5TextConfig(**HYBRID), {"carries_normed": True, "is_qwen": True, "is_beside_images": True}),
    "mimo-v2-flash": (MIMO, {"carries_normed": True, "is_mimo": True}),
}


@pytest.fixture
def module_of(write_oracle: Callable[..., Oracle], tmp_path: Path) -> Callable[..., Module]:
    def made(name: str, **changes: object) -> Module:
        config, kind = MODULES[name]
        return write_module(write_oracle(f"mtp {name}", config), tmp_path / "mtp", **kind, **changes)

    return made


@pytest.mark.parametrize("name", MODULES)
def test_a_module_guesses_as_transformers_layer_does(
    module_of: Callable[..., Module], registry: Registry, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = module_of(name)
    engine = Engine.build(options(module.folder, drafter="mtp", draft_length="3"), registry)
    found = guesses_of(engine, module.oracle.prompts[4][:PROMPT], monkeypatch)
    target, steps = module.steps()
    with torch.no_grad():
        assert_guesses(found, steps, lambda tokens: module.features(target, tokens))


@pytest.fixture
def chain_of(write_oracle: Callable[..., Oracle], tmp_path: Path) -> Callable[..., Module]:
    """Three modules behind three layers; of Qwen three layers in `mtp`."""

    def made(name: str) -> Module:
        return write_module(write_oracle(f"chain {name}", longer(name)), tmp_path / "chain", count=3, **MODULES[name][1])

    return made


def longer(name: str) -> PretrainedConfig:
    """Of a family in `MODULES`, with six layers."""
    config = MODULES[name][0]
    changes: dict[str, object] = {"num_hidden_layers": 6, "experts_implementation": "eager"}
    if name == "qwen3.5":
        changes["layer_types"] = [*KINDS[:3], *["full_attention"] * 3]
    elif name == "mimo-v2-flash":
        changes["layer_types"] = ["full_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 3]
        changes["mlp_layer_types"] = ["dense", "sparse", "sparse", *["dense"] * 3]
    elif config.to_dict().get("mlp_layer_types"):
        changes["mlp_layer_types"] = ["dense", *["sparse"] * 5]
    return type(config)(**{**config.to_dict(), **changes})


@pytest.mark.parametrize(
    ("name", "count"), [("deepseek-v3", 3), ("glm4-moe", 2), ("glm4-moe", 3), ("qwen3.5", 3), ("mimo-v2-flash", 3)]
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
    several = module_of("deepseek-v3", num_nextn_predict_layers=2).folder
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.4.\S+' .* is missing"):
        Engine.build(options(several, drafter="mtp"), registry)
    one = module_of("deepseek-v3").folder
    with pytest.raises(ConfigError, match=r"--drafter is mtp, a part of the model's own checkpoint; leave --draft-model out"):
        Engine.build(options(one, drafter="mtp", draft_model=str(llama.folder)), registry)


# Tokens.


def assert_same_answers(
    registry: Registry,
    folder: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    most: int = 4,
    **drafter: object,
) -> None:
    """Greedy and seeded, prompts in chunks and together, while the number of guesses changes; that these are wrong is said."""
    asked = [
        asking(f"{at} {heat}", prompt[: 30 + at], temperature=heat, seed=at, max_tokens=20 + at)
        for at, prompt in enumerate(prompts)
        for heat in (0.0, 0.8)
    ]
    expected = answers_of(Engine.build(options(folder), registry), asked)
    chance = random.Random(2)
    monkeypatch.setattr("enginery.speculate.length.DraftLength.of", lambda self, count: chance.choice((0, 1, 2, most)))
    monkeypatch.setattr("enginery.engine.meter._ENOUGH_VERIFICATIONS", 20)
    engine = Engine.build(options(folder, draft_length=str(most), page_size=4, num_pages=1200, **drafter), registry)
    for about, one in answers_of(engine, asked).items():
        assert (one.tokens, one.reason) == (expected[about].tokens, expected[about].reason), about
    assert engine.meter.stats().drafts.drafted > 100
    assert re.search(r"a verification told 1\.0\d tokens on average", caplog.text)
    assert caplog.text.count("guesses are seldom right") == 1


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


@pytest.mark.parametrize("name", MODULES)
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
