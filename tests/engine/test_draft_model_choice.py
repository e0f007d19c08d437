"""Which draft model and which attention backends are chosen, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.draft_models import changed_head, embedded
from offers import offering
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle
from parity.test_mamba import FAMILIES as MAMBA
from safetensors.torch import load_file

from enginery.config.resolve import DeviceFacts
from enginery.config.schema import EngineOptions
from enginery.contracts.attention import AttnBackendSpec
from enginery.contracts.batch import Phase
from enginery.contracts.model import CheckpointSpec
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError, ConfigError, PluginError, Unsupported
from enginery.plugin.registry import Registry
from enginery.worker.attention_choice import verifying_drafts
from enginery.worker.choice import Choice, choose
from enginery.worker.drafts.choice import ChosenDrafter, choose_drafter
from enginery.worker.drafts.parts import choose_draft_model, find_draft_needs
from enginery.worker.needs import LayerNeeds, by_phase
from enginery_weights_tiny import DRAFTERS


def test_a_model_with_recurrent_layers_drafts_for_nobody(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    recurrent = write_oracle("mamba2", MAMBA["mamba2"])
    target = write_oracle("llama", FAMILIES["llama"])
    asked = options(target, drafter="standalone", draft_model=str(recurrent.folder))
    with pytest.raises(ConfigError, match=r"recurrent layers, whose states cannot go back behind a wrong guess yet; give another"):
        Engine.build(asked, registry)


@pytest.mark.parametrize(("name", "meant"), [("mpt", "mtp"), ("aut", "auto")])
def test_a_slip_in_a_drafters_name_is_told_whatever_the_model_has(registry: Registry, name: str, meant: str) -> None:
    with pytest.raises(PluginError, match=rf"there is no drafter '{name}'; did you mean {meant}\?"):
        choose_drafter(EngineOptions(drafter=name), registry, shipped={}, config={"architectures": ["Any"]}, folder=Path("any"))


@pytest.mark.parametrize("drafter", ["eagle", "standalone"])
def test_where_no_draft_model_ships_one_has_to_be_named(
    write_oracle: Callable[..., Oracle], registry: Registry, drafter: str
) -> None:
    target = write_oracle("llama", FAMILIES["llama"])
    with pytest.raises(ConfigError, match=rf"--drafter is {drafter}, a model; give its checkpoint with --draft-model"):
        Engine.build(options(target, drafter=drafter), registry)


def test_a_draft_model_without_a_drafter_is_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"draft_model is .*, but nothing drafts; name a drafter with --drafter"):
        Engine.build(embedded(draft_model=str(DRAFTERS["eagle"])), registry)


def test_a_draft_model_for_what_runs_none_is_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"--drafter is lookup, which runs no model; leave --draft-model out"):
        choose(embedded(drafter="lookup", draft_model=str(DRAFTERS["eagle"])), registry)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"architectures": ["Strange"]}, "no plugin serves the architecture Strange"),
        ({"rope_scaling": {"type": "strange"}}, "config.json asks for rope type 'strange'"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_draft_model_s_config_is_said_of_the_draft_model(
    stated: dict[str, object], why: str, tmp_path: Path, registry: Registry
) -> None:
    config = json.loads((DRAFTERS["standalone"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    asked = embedded(drafter="standalone", draft_model=str(tmp_path), load_format="dummy")
    with pytest.raises(CheckpointError, match=f"^the draft model of --drafter standalone cannot be served: {why}"):
        find_draft_needs(asked, registry, choose(asked, registry))


def test_auto_sees_what_a_draft_model_is_that_is_given_by_its_name(registry: Registry) -> None:
    """Not a folder: an installed checkpoint here, as it is one of the hub."""
    tiny = registry.offers(CheckpointSpec)[0]
    head = dataclasses.replace(tiny, name="head", spec=dataclasses.replace(tiny.spec, name="head", folder=DRAFTERS["eagle"]))
    chosen = choose(embedded(drafter="auto", draft_model="head"), offering(registry, CheckpointSpec, tiny, head))
    assert chosen.drafter is not None
    assert chosen.drafter.name == "eagle"


def test_a_head_is_known_by_its_tensors_where_config_json_names_the_architecture_of_the_target(
    registry: Registry, tmp_path: Path
) -> None:
    """As the heads of the authors of EAGLE do, whose weights are pickles."""
    folder = changed_head(tmp_path, architectures=["LlamaForCausalLM"])
    Engine.build(embedded(drafter="eagle", draft_model=str(folder)), registry)
    pickled = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), pickled)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"architecture LlamaForCausalLM, and is no such head: .* is a pickle of PyTorch"):
        Engine.build(embedded(drafter="eagle", draft_model=str(folder)), registry)
    whole = str(DRAFTERS["standalone"])
    with pytest.raises(ConfigError, match=r"is no such head: .* has 3 layers .*; give another, or take --drafter standalone"):
        Engine.build(embedded(drafter="eagle", draft_model=whole), registry)


def test_what_is_wrong_with_a_head_that_names_the_architecture_of_the_target_is_said(registry: Registry, tmp_path: Path) -> None:
    """Not that it lacks tensors, which it has."""
    folder = changed_head(tmp_path, architectures=["LlamaForCausalLM"], hidden_act="gelu")
    with pytest.raises(ConfigError, match=r"is no such head: config\.json has hidden_act 'gelu'"):
        Engine.build(embedded(drafter="eagle", draft_model=str(folder)), registry)
    without = {"change": lambda tensors: {name: each for name, each in tensors.items() if name != "fc.weight"}}
    changed_head(tmp_path, architectures=["LlamaForCausalLM"], **without)
    with pytest.raises(ConfigError, match=r"is no such head: it has no tensor 'fc\.weight'"):
        Engine.build(embedded(drafter="eagle", draft_model=str(folder)), registry)


def test_auto_knows_a_head_by_its_tensors_too(registry: Registry, tmp_path: Path) -> None:
    """Published EAGLE heads name the architecture of the target. A whole model of one layer is none."""
    folder = changed_head(tmp_path, architectures=["LlamaForCausalLM"])
    for draft_model, name in ((folder, "eagle"), (DRAFTERS["standalone"], "standalone")):
        chosen = choose(embedded(drafter="auto", draft_model=str(draft_model)), registry)
        assert chosen.drafter is not None
        assert chosen.drafter.name == name


def on_a_gpu(asked: EngineOptions, registry: Registry) -> Choice:
    facts = DeviceFacts(kind="cuda", name="card", available_bytes=1 << 36, num_threads=1, compute_capability=(9, 0))
    return dataclasses.replace(choose(asked, registry), device_facts=facts)


def test_on_a_gpu_a_draft_model_has_a_backend_that_knows_lengths_of_the_device(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """If the one that is asked for does not, another: what is asked for is the target's."""
    asked = embedded(drafter="eagle")
    chosen = choose_draft_model(asked, registry, on_a_gpu(asked, registry))
    assert chosen is not None
    assert all(offer.spec.capabilities.device_lengths for offer in chosen.attention.by_role.values())
    ignorant = dataclasses.replace(asked, attention_backend="flashinfer")
    with caplog.at_level("INFO"):
        another = choose_draft_model(ignorant, registry, on_a_gpu(asked, registry))
    assert another is not None
    assert another.attention.by_role == chosen.attention.by_role
    assert re.search(r"(?s)draft model's attention is .*: .*flashinfer.*lengths that the device alone knows is needed", caplog.text)


def test_on_a_gpu_a_model_that_reads_has_the_target_attend_by_lengths_of_the_device(registry: Registry) -> None:
    """With backends for prefills and for decoding, those that decode."""
    asked = embedded(drafter="eagle")
    target = choose(asked, registry)
    assert target.drafter is not None
    spec = dataclasses.replace(target.drafter.spec, reads=lambda config, facts: (0,))
    drafters = [ChosenDrafter(dataclasses.replace(target.drafter, spec=each), 3, "") for each in (spec, target.drafter.spec)]
    needs = LayerNeeds.of(target.facts.layers, target.settings, on_a_gpu(asked, registry).device_facts).softmax
    reader, writer = (verifying_drafts(LayerNeeds(needs, needs), drafter)[0] for drafter in drafters)
    assert (reader.device_lengths, writer.device_lengths) == (True, False)
    asked_of = {role: each.device_lengths for role, each in by_phase(reader).items()}
    assert asked_of == {"prefill": False, "decode": True, "single": True}
    on_a_cpu = LayerNeeds.of(target.facts.layers, target.settings, target.device_facts).softmax
    assert not verifying_drafts(LayerNeeds(on_a_cpu, on_a_cpu), drafters[0])[0].device_lengths


def test_auto_guesses_nothing_where_attention_would_have_to_change(registry: Registry) -> None:
    """Of the best backend for plain decoding, and of one that is asked for, which a drafter that is named does without."""
    chosen = choose(embedded(drafter="auto"), registry)
    assert (chosen.drafter is not None, chosen.attention.name) == (True, "cpu")
    spec = next(offer.spec for offer in registry.offers(AttnBackendSpec) if offer.name == "cpu")
    blind = dataclasses.replace(
        spec, capabilities=dataclasses.replace(spec.capabilities, phases=spec.capabilities.phases - {Phase.VERIFY})
    )
    offers = tuple(
        dataclasses.replace(offer, spec=blind) if offer.name == "cpu" else offer for offer in registry.offers(AttnBackendSpec)
    )
    registry = offering(registry, AttnBackendSpec, *offers)
    for backend in ("auto", "cpu"):
        chosen = choose(embedded(drafter="auto", attention_backend=backend), registry)
        assert (chosen.drafter, chosen.attention.name) == (None, "cpu")
        (why,) = (made.reason for made in chosen.decisions if made.setting == "drafter")
        assert why == "auto: cpu, the attention backend, verifies no guesses"
    assert choose(embedded(drafter="eagle"), registry).attention.name == "cpu+torch"
    with pytest.raises(Unsupported, match="phase verify"):
        choose(embedded(drafter="eagle", attention_backend="cpu"), registry)


def test_more_guesses_than_a_drafter_is_good_for_are_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"--draft-length is 9, but eagle, .* is good for 8 at most"):
        choose(embedded(drafter="eagle", draft_length="9"), registry)


def test_a_drafter_is_refused_where_a_step_has_no_row_for_a_guess(registry: Registry) -> None:
    """What it is to cost alone may be seen; and nothing is refused that nobody asked for."""
    with pytest.raises(ConfigError, match=r"--drafter is eagle, and a step has --max-batch-requests 1, .* take one more than"):
        choose(embedded(drafter="eagle", max_batch_requests=1), registry)
    assert choose(embedded(drafter="eagle", draft_length="0", max_batch_requests=1), registry).draft_length == 0
    chosen = choose(embedded(drafter="auto", max_batch_requests=1), registry)
    assert chosen.drafter is None
    assert any("--max-batch-requests 1" in made.reason for made in chosen.decisions if made.setting == "drafter")
    assert choose(embedded(drafter="lookup", max_batch_requests=2), registry).drafter is not None
