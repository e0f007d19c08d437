"""What a plugin's author is told whose part is of the wrong kind or fails in a step: the plugin, its version, the place."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from offers import offering

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import Axis, Fill, NamedTensor
from enginery.contracts.model import ModelFacts, ModelSpec
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.contracts.versions import HookGroup
from enginery.contracts.weights import Scheme, StoredWeight, WeightFormatSpec
from enginery.engine.engine import Engine
from enginery.errors import PluginError
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry, raised_in
from enginery.worker.weights.formats import FormatReader

ROWS = Scheme(values="f8e4m3", block=(1, 0))


@pytest.fixture
def asked(tmp_path: Path) -> EngineOptions:
    config = dict(architectures=["EchoForCausalLM"], vocab_size=97, max_position_embeddings=256, eos_token_id=[5, 6])
    (tmp_path / "config.json").write_text(json.dumps(config))
    return EngineOptions(model=str(tmp_path), load_format="dummy", num_pages=64, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"describe": lambda config: None}, r": describe returned None, which is no ModelFacts"),
        ({"build": lambda context: None}, r" built None, which is no Model: it has no forward, logits"),
    ],
    ids=["describe", "build"],
)
def test_a_family_that_answers_with_something_else_is_named(
    asked: EngineOptions, changed: dict[str, Callable[[Any], Any]], said: str
) -> None:
    registry = Registry.load()
    (echo,) = (offer for offer in registry.offers(ModelSpec) if offer.name == "echo")
    wrong = dataclasses.replace(echo, spec=dataclasses.replace(echo.spec, **changed))
    with pytest.raises(PluginError, match=rf"plugin echo \(enginery-echo==.*\){said}"):
        Engine.build(asked, offering(registry, ModelSpec, wrong))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([("a", "int65")], "a has dtype 'int65', which is no dtype of torch"),
        ([("a", "int64"), ("a", "float32")], "they need names of their own, and these are a, a"),
    ],
)
def test_inputs_that_no_step_can_have_name_the_family(asked: EngineOptions, given: list[tuple[str, str]], said: str) -> None:
    inputs = tuple(NamedTensor(name=name, dims=(), dtype=dtype, axis=Axis.TOKEN, fill=Fill.ZERO) for name, dtype in given)
    registry = Registry.load()
    (echo,) = (offer for offer in registry.offers(ModelSpec) if offer.name == "echo")
    spec = dataclasses.replace(echo.spec, describe=lambda config: dataclasses.replace(echo.spec.describe(config), inputs=inputs))
    with pytest.raises(PluginError, match=rf"plugin echo \(enginery-echo==.*\) could not give .* inputs .*ValueError: {said}"):
        Engine.build(asked, offering(registry, ModelSpec, dataclasses.replace(echo, spec=spec)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head_dim": 16.0}, "TypeError: head_dim of AttnLayerFacts is 16.0, and must be a whole number"),
        ({"sliding_window": "4"}, "TypeError: sliding_window of AttnLayerFacts is '4', and must be a whole number"),
        ({"decoder_layer": 7}, "ValueError: a layer is in decoder layer 7, and num_decoder_layers is 1"),
    ],
)
def test_sizes_that_are_none_name_the_family_and_the_line_that_states_them(
    asked: EngineOptions, changed: dict[str, Any], said: str
) -> None:
    """As config.json's text, or a quotient, is. They failed in the memory plan, which knows no plugin."""

    def describe(config: Any) -> ModelFacts:
        facts = echo.spec.describe(config)
        layers = tuple(dataclasses.replace(layer, **changed) for layer in facts.layers[:1])
        return dataclasses.replace(facts, layers=layers, num_decoder_layers=1)

    registry = Registry.load()
    (echo,) = (offer for offer in registry.offers(ModelSpec) if offer.name == "echo")
    wrong = dataclasses.replace(echo, spec=dataclasses.replace(echo.spec, describe=describe))
    with pytest.raises(PluginError) as error:
        Engine.build(asked, offering(registry, ModelSpec, wrong))
    assert f"plugin echo (enginery-echo==0.1.0) could not describe the model in {asked.model}: {said} (" in str(error.value)
    assert f"({__file__}, line " in str(error.value)


@pytest.mark.parametrize(("missing", "place"), [("pool", "attend"), ("page_size", "plan_forward_metadata")])
def test_what_a_plugin_raises_in_a_step_names_it_and_the_function(
    asked: EngineOptions, monkeypatch: pytest.MonkeyPatch, missing: str, place: str
) -> None:
    from enginery_echo.backend import EchoAttention

    built = EchoAttention.__init__

    def without(self: EchoAttention, context: Any) -> None:
        built(self, context)
        delattr(self, missing)

    monkeypatch.setattr(EchoAttention, "__init__", without)
    engine = Engine.build(asked, Registry.load())
    engine.submit(GenerationRequest(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=3)))
    with pytest.raises(AttributeError) as error:
        engine.step()
    first, last = error.value.__notes__[0].split("\n")
    assert first.startswith("raised in plugin echo (enginery-echo==0.1.0), ")
    assert f" {place} (" in first
    assert "backend.py, line " in first
    assert last.startswith("in step 0 with 1 requests and 2 tokens, running model ")
    (told,) = engine.recover(error.value)
    assert "the step that the request was in failed in plugin echo (enginery-echo==0.1.0), " in str(told.error)


def test_a_plugin_that_exits_in_a_step_fails_it_and_not_the_process(asked: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginery_echo.backend import EchoAttention

    def leave(self: EchoAttention, *arguments: object, **named: object) -> None:
        sys.exit(0)

    engine = Engine.build(asked, Registry.load())
    monkeypatch.setattr(type(engine._runner.parts.model), "forward", leave)
    engine.submit(GenerationRequest(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=3)))
    with pytest.raises(RuntimeError, match="SystemExit: 0") as error:
        engine.step()
    (told,) = engine.recover(error.value)
    assert "RuntimeError: SystemExit: 0" in str(told.error)


def test_a_panic_of_a_plugin_s_library_fails_a_step_and_not_the_process(
    asked: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pyo3 raises for a library in Rust is no `Exception`."""

    class PanicError(BaseException):
        pass

    engine = Engine.build(asked, Registry.load())
    monkeypatch.setattr(type(engine._runner.parts.model), "forward", Mock(side_effect=PanicError("planted")))
    engine.submit(GenerationRequest(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=3)))
    with pytest.raises(RuntimeError, match="PanicError: planted") as error:
        engine.step()
    (told,) = engine.recover(error.value)
    assert "RuntimeError: PanicError: planted" in str(told.error)


def test_ctrl_c_amid_a_plugins_code_blames_no_plugin(asked: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginery_echo.backend import EchoAttention

    def attend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, plan: Any, out: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EchoAttention, "attend", types.FunctionType(attend.__code__, vars(sys.modules[EchoAttention.__module__])))
    engine = Engine.build(asked, Registry.load())
    engine.submit(GenerationRequest(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=3)))
    with pytest.raises(KeyboardInterrupt) as error:
        engine.step()
    (told,) = engine.recover(error.value)
    assert "the step that the request was in failed with KeyboardInterrupt: ; it ran " in str(told.error)


def test_what_the_core_raises_names_no_plugin() -> None:
    with pytest.raises(KeyError) as error:
        _ = {}["ours"]
    assert raised_in(error.value, Registry.load()) == ""


class Format:
    def parts(self, scheme: Scheme) -> list[Any]:
        return []

    def unpack(self, parts: object, scheme: Scheme) -> StoredWeight:
        return StoredWeight(scheme=scheme, values=torch.ones(1), scales=torch.ones(1))


def format_offer(**changed: object) -> Offer[WeightFormatSpec]:
    fields: dict[str, Any] = dict(name="mine", api=(2, 0), priority=0, summary="", methods=("mine",), refuse=lambda needs: [])
    spec = WeightFormatSpec(**(fields | {"reads": lambda config, module: ROWS, "load": Format} | changed))
    return Offer(spec=spec, group=HookGroup.WEIGHT_FORMAT, name="mine", plugin="p", distribution="enginery-p", version="1")


def test_a_format_that_answers_with_something_else_is_named() -> None:
    with pytest.raises(PluginError, match=r"plugin p \(enginery-p==1\) built None, which is no WeightFormat: it has no parts"):
        FormatReader.load(format_offer(load=lambda: None), {}, None)
    reader = FormatReader.load(format_offer(reads=lambda config, module: "fp8"), {}, None)
    with pytest.raises(PluginError, match=r"p==1\): reads of model.norm returned 'fp8', which is no Scheme"):
        reader.scheme("model.norm")
    assert FormatReader.load(format_offer(reads=lambda config, module: None), {}, None).scheme("lm_head") is None
