"""Inputs and outputs that only one family knows: from a step's bytes to the model and back, on every path that runs a step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine.test_graphs import with_graphs
from engine.test_mixed_graphs import with_pieces
from installed import install
from parity.engine_driver import assert_greedy, generate, options
from parity.oracle import FAMILIES, Oracle

from enginery.api import (
    Axis,
    Fill,
    ForwardBatch,
    LocalLayerId,
    Model,
    ModelContext,
    ModelFacts,
    ModelSpec,
    NamedTensor,
    StageTensors,
    hookimpl,
)
from enginery.contracts.step import StepInput, Way
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import Unsupported
from enginery.nn.decoder import Decoder
from enginery.plugin.registry import Registry
from enginery.testing.kits.ranks import RankThreads
from enginery.testing.kits.weights import WholeTensors
from enginery.worker.paths.path import Launched
from enginery.worker.warm_up import warm_up
from enginery_model_llama.spec import describe, shape

SHIFT = NamedTensor(name="shift", dims=(), dtype="int64", axis=Axis.TOKEN, fill=Fill.ZERO)  # rides with the token fields
GAIN = NamedTensor(name="gain", dims=(2,), dtype="float32", axis=Axis.TOKEN, fill=Fill.ZERO)
LANE = NamedTensor(name="lane", dims=(), dtype="int32", axis=Axis.REQUEST, fill=Fill.ZERO)


def describe_shifted(config: Mapping[str, Any]) -> ModelFacts:
    facts = describe(config)
    embedded = NamedTensor(name="embedded", dims=(facts.hidden_size,), dtype="float32", axis=Axis.TOKEN, fill=Fill.ZERO)
    return dataclasses.replace(facts, inputs=(SHIFT, GAIN, LANE), outputs=(embedded,))


class Shifted(Decoder):
    """A decoder whose token ids are moved by one input, and whose embeddings another scales by 1 + its second column."""

    def _begin(self, batch: ForwardBatch, arrived: StageTensors | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        assert self.embedding is not None
        assert batch.inputs["lane"].values.shape == (batch.num_requests,)
        residual = self.embed(self.embedding, batch.input_ids + batch.inputs["shift"].values)
        residual *= 1 + batch.inputs["gain"].values[:, 1:]
        batch.outputs["embedded"].values.copy_(residual)
        return None, residual


def build(context: ModelContext) -> Model:
    return Shifted(context, shape(context.config))


@hookimpl
def register_models() -> list[ModelSpec]:
    """This module as a plugin."""
    return [ModelSpec(name="shifted", api=(2, 0), architectures=("ShiftedForCausalLM",), describe=describe_shifted, build=build)]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    site = tmp_path_factory.mktemp("site")
    install(site, "enginery-shifted", "engine.test_named_inputs", name="shifted")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield Registry.load()


@pytest.fixture(scope="module")
def shifted(write_oracle: Callable[..., Oracle], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Llama's weights under the name of the test's family."""
    oracle = write_oracle("llama", FAMILIES["llama"])
    folder = tmp_path_factory.mktemp("shifted")
    for file in oracle.folder.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ShiftedForCausalLM"]}))
    return Oracle(folder, oracle.model)


def telling(engine: Engine, tell: Callable[[StepInput], dict[str, bytes]]) -> list[StepInput]:
    """Have every step from now on carry what `tell` says to the worker. Returns the steps."""
    steps, launch = list[StepInput](), engine._runner.launch

    def told(step: StepInput) -> Launched:
        steps.append(msgspec.structs.replace(step, inputs=tell(step)))
        return launch(steps[-1])._replace(step=step)

    engine._runner.launch = told  # type: ignore[method-assign]
    return steps


def shift_of_prompts(step: StepInput) -> dict[str, bytes]:
    """1 for each row of a prompt, nothing where all decode."""
    items = step.columns()
    at_prompt = np.arange(step.num_items) >= step.num_decode
    return {"shift": at_prompt.repeat(items.num_tokens).astype("<i8").tobytes()} if at_prompt.any() else {}


@pytest.mark.parametrize("way", Way)
def test_what_a_step_tells_reaches_the_model_on_every_path(shifted: Oracle, registry: Registry, way: Way) -> None:
    """Prompts are given one too low, and the input moves them to where transformers has them."""
    if way is Way.EAGER:
        engine = Engine.build(options(shifted, max_batch_tokens=48), registry)
    elif way is Way.GRAPH:
        engine, _ = with_graphs(options(shifted, num_pages=60), registry)
    else:
        engine, _ = with_pieces(shifted, registry, max_batch_tokens=256, dtype="float32")
    steps = telling(engine, shift_of_prompts)
    prompts = shifted.prompts[:5]
    answers = generate(engine, [[token - 1 for token in prompt] for prompt in prompts])
    assert_greedy(shifted, answers, prompts)
    assert way in {step.run.way for step in steps}


def test_inputs_of_several_dims_and_outputs_have_places_of_their_own(shifted: Oracle, registry: Registry) -> None:
    asked = options(shifted, prefix_cache=False)
    parts = build_parts(asked, registry)
    engine = Engine(parts, registry, asked)
    prompt = shifted.prompts[2]
    gains = np.random.default_rng(0).normal(size=(len(prompt), 2)).astype("<f4")
    steps = telling(engine, lambda step: {"gain": gains.tobytes()} if step.num_decode < step.num_items else {})
    generate(engine, [prompt], max_tokens=1)
    assert len(steps) == 1
    embedded = shifted.model.get_input_embeddings().weight.detach()[prompt] * (1 + torch.from_numpy(gains[:, 1:]))
    torch.testing.assert_close(parts.step.feed.named.buffers["embedded"][: len(prompt)], embedded)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"shitf": b"12345678"}, "a step has the inputs shitf, which the model has not got"),
        ({"gain": b"1234"}, r"a step has 4 bytes of the input gain; torch.float32 \[\d+, 2\] has \d+"),
    ],
)
def test_what_the_model_does_not_take_is_refused(shifted: Oracle, registry: Registry, told: dict[str, bytes], said: str) -> None:
    engine = Engine.build(options(shifted), registry)
    telling(engine, lambda step: told)
    with pytest.raises(Unsupported, match=said):
        generate(engine, shifted.prompts[:1])


def test_other_models_are_told_nothing(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    engine = Engine.build(options(oracle), registry)
    telling(engine, lambda step: {"shift": b""})
    with pytest.raises(Unsupported, match="the inputs shift, which the model has not got"):
        generate(engine, oracle.prompts[:1])


def test_ranks_of_the_kit_have_them_too(shifted: Oracle) -> None:
    (family,) = register_models()
    config = {**shifted.model.config.to_dict(), "architectures": list(family.architectures)}
    tensors = WholeTensors({name: tensor.detach() for name, tensor in shifted.model.state_dict().items()}, torch.float32)
    for answer in RankThreads(family=family, config=config, tensors=tensors, tensor_size=2).run(shifted.prompts[4]):
        torch.testing.assert_close(answer.logits, shifted.logits(shifted.prompts[4]), atol=1e-4, rtol=0)


def test_steps_of_nobody_s_requests_have_them_too(shifted: Oracle, registry: Registry) -> None:
    """On a device, before the engine is ready."""
    parts = build_parts(options(shifted, attention_backend="torch"), registry)
    warm_up(parts.step, longest=32)
    assert parts.step.relay.backend.pool.layer(LocalLayerId(0)).k[-1].any()
