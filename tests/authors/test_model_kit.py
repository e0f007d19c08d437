"""engine test-model passes a sound family, and each fault of a family is caught by the check that is about it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from typer.testing import CliRunner

from enginery.cli.main import build_app
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import LinearShape
from enginery.errors import CheckpointError
from enginery.nn import attention
from enginery.nn.decoder import Decoder
from enginery.plugin.registry import Registry
from enginery.testing.fixtures import TINY_CONFIG, write_tiny_checkpoint
from enginery.testing.kits.checks import KitReport, run_checks
from enginery.testing.kits.models import ModelSubject, model_checks
from enginery.testing.kits.ranks import ThreadCollectives
from enginery.worker.weights.experts import ExpertStacks
from enginery.worker.weights.rank import RankWeights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama that transformers wrote."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=512)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def tried(folder: Path, only: str = "", **options: object) -> KitReport:
    return run_checks("it", model_checks(ModelSubject(folder=folder, options=options)), only=only)


def outcomes(report: KitReport) -> dict[str, str]:
    return {row.rule: row.outcome for row in report.rows}


def test_a_sound_family_passes_all_but_what_needs_a_gpu(folder: Path) -> None:
    report = tried(folder)
    assert [row.message for row in report.rows if row.outcome == "failed"] == []
    assert [row.rule for row in report.rows if row.outcome == "skipped"] == ["graphs"]


def test_a_model_beside_one_for_images_is_checked_like_any_other(tmp_path: Path) -> None:
    """config.json has the vocabulary and the window in its text_config alone."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16, sliding_window=64)
    text = sizes | dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2)
    images = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    tokens = dict(image_token_index=250, boi_token_index=251, eoi_token_index=252)
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4, **tokens)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert max(map(len, ModelSubject(folder=tmp_path).prompts)) == sizes["sliding_window"] + 20
    report = tried(tmp_path)
    assert [row.message for row in report.rows if row.outcome == "failed"] == []
    assert [row.rule for row in report.rows if row.outcome == "skipped"] == ["graphs"]


def test_a_family_that_reads_a_number_wrongly_is_not_at_parity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginery_model_llama import spec

    read = spec.read_decoder_shape

    def misread(*given, **named):
        return dataclasses.replace(read(*given, **named), rms_eps=0.5)

    monkeypatch.setattr(spec, "read_decoder_shape", misread)
    report = tried(folder, only="transformers float32")
    assert outcomes(report) == {"parity": "failed"}
    assert "is wrong from token 1 on" in report.rows[0].message


@pytest.mark.parametrize(("first", "last"), [(0, 32), (128, 256)])
def test_a_family_that_embeds_a_part_of_the_vocabulary_wrongly_is_not_at_parity(
    folder: Path, first: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward

    def one_off(self, batch, *rest):
        batch.input_ids.sub_(((batch.input_ids > first) & (batch.input_ids < last)).int())
        return forward(self, batch, *rest)

    monkeypatch.setattr(Decoder, "forward", one_off)
    assert outcomes(tried(folder, only="transformers float32")) == {"parity": "failed"}


def test_prompts_have_no_token_that_config_json_has_a_use_for(tmp_path: Path) -> None:
    named = {"eos_token_id": [5, 6], "bos_token_id": None, "vision_config": {"image_token_index": 7}, "image_token_id": 8}
    subject = ModelSubject(folder=write_tiny_checkpoint(tmp_path, {**TINY_CONFIG, "vocab_size": 12, **named}))
    assert {token for prompt in subject.prompts for token in prompt} == {0, 1, 2, 3, 4, 9, 10, 11}


def test_a_model_whose_numbers_depend_on_the_batch_is_caught_by_chunks_and_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward

    def leaning(self, batch, *rest):
        return forward(self, batch, *rest) * (1 + batch.num_tokens / 100)

    monkeypatch.setattr(Decoder, "forward", leaning)
    found = outcomes(tried(folder, only="pr"))
    assert found["chunked"] == found["batches"] == "failed"


def test_nan_has_its_own_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: hidden.new_full((len(hidden), 256), float("nan")))
    assert {row.fault for row in tried(folder, only="chunked").rows} <= {"NaN", "crash"}


def test_a_sum_that_is_taken_twice_is_caught_by_tensor_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(weights, name, *, hidden, heads, dim, bias):
        columns, rows = heads * dim, (hidden,)
        return weights.linear(LinearShape(names=(name,), rows=rows, columns=columns, cut=Cut.COLUMNS, unit=dim, bias=bias))

    monkeypatch.setattr(attention, "take_out", complete)
    report = tried(folder, only="ranks")
    assert outcomes(report) == {"tensor-ranks": "failed"}


@pytest.mark.parametrize("counts_copies", [True, False])
def test_a_norm_over_all_key_heads_that_counts_those_of_several_ranks_twice_is_caught(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, counts_copies: bool
) -> None:
    """Two ranks have a KV head each; four have each of them twice."""
    init = attention.SelfAttention.__init__

    def normed_widely(self, context, *given, spec, **named):
        init(self, context, *given, spec=spec, **named)
        of, mine, product = context.facts.layers[spec.global_id], spec.facts, self.qkv
        copies = of.num_heads * mine.num_kv_heads // (mine.num_heads * of.num_kv_heads)
        size = of.num_kv_heads * of.head_dim * (1 if counts_copies else copies)

        def normed(x):
            made = product(x)
            keys = made[:, mine.num_heads * mine.head_dim :][:, : mine.num_kv_heads * mine.head_dim]
            keys.mul_((context.comm.sum(keys.square().sum(-1, keepdim=True)) / size).rsqrt())
            return made

        self.qkv = normed

    monkeypatch.setattr(attention.SelfAttention, "__init__", normed_widely)
    (row,) = tried(folder, only="ranks").rows
    assert row.outcome == ("failed" if counts_copies else "passed"), row.message
    assert not counts_copies or "4 ranks are " in row.message


def test_feed_forwards_that_keep_to_their_lane_are_caught_by_lanes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one that says `lanes=True` and does not ask for the rows of all lanes."""
    monkeypatch.setattr(ThreadCollectives, "all_rows", lambda comm, x: x.repeat(comm.place.num_lanes, 1))
    (row,) = tried(folder, only="lanes").rows
    assert (row.rule, row.outcome, "2 lanes are " in row.message) == ("lanes", "failed", True)


def test_a_family_that_runs_in_no_lanes_is_not_tried_in_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Registry.find_model

    def without(registry, config):
        offer, why = find(registry, config)
        return dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, lanes=False)), why

    monkeypatch.setattr(Registry, "find_model", without)
    (row,) = tried(folder, only="lanes").rows
    assert (row.outcome, row.message) == ("skipped", "the family does not say that it runs in lanes")


def test_experts_that_are_counted_on_every_rank_are_caught_by_tensor_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=512)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2)
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    assert outcomes(tried(tmp_path, only="tensor ranks")) == {"tensor-ranks": "passed"}
    monkeypatch.setattr(RankWeights, "own_experts", lambda weights, count: range(count))
    monkeypatch.setattr(ExpertStacks, "_has_some", property(lambda stacks: stacks.matrices.setting.parallel.cuts_experts))
    (row,) = tried(tmp_path, only="tensor ranks").rows
    assert (row.outcome, "2 ranks with whole experts are " in row.message) == ("failed", True), row.message


def test_what_does_not_cross_is_caught_by_pipeline_stages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Decoder._begin

    def forgetting(self, batch, arrived):
        delta, residual = begin(self, batch, arrived)
        return (delta if arrived is None else None), residual

    monkeypatch.setattr(Decoder, "_begin", forgetting)
    assert outcomes(tried(folder, only="stages")) == {"pipeline-stages": "failed"}


@pytest.mark.parametrize(("window", "longest"), [(None, 70), (24, 70), (100, 120), (4096, 70)])
def test_a_prompt_is_longer_than_a_short_window(window: int | None, longest: int, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, {**TINY_CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": window})
    assert max(map(len, ModelSubject(folder=folder).prompts)) == longest


def test_without_weights_there_is_nothing_to_compare(tmp_path: Path) -> None:
    report = tried(write_tiny_checkpoint(tmp_path), only="transformers", load_format="dummy")
    assert outcomes(report) == {"parity": "skipped", "bfloat16": "skipped"}
    assert {row.message for row in report.rows} == {"the folder has no weights, so there is nothing to compare"}


def test_a_model_type_of_another_family_is_no_reference(folder: Path, tmp_path: Path) -> None:
    """transformers draws the tensors that a checkpoint lacks; what it computes with them is no fault of the family."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    report = tried(tmp_path, only="transformers")
    assert outcomes(report) == {"parity": "skipped", "bfloat16": "skipped"}
    missing = "4 tensors that the checkpoint lacks, as model.layers.0.self_attn.k_norm.weight"
    assert {row.message for row in report.rows} == {f"transformers cannot read it: its Qwen3ForCausalLM has {missing}"}


def test_what_keeps_a_model_from_being_built_is_said_once(tmp_path: Path) -> None:
    report = tried(write_tiny_checkpoint(tmp_path))
    assert outcomes(report) == {"builds": "failed"}
    assert report.rows[0].message.endswith("The other checks need this one; the command does not run them.")


def test_the_command(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(build_app(), ["test-model", str(folder), "-k", "chunked", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["rule"] for row in json.loads(done.stdout)["rows"]] == ["chunked"]
    assert done.stderr.startswith("llama of plugin model-llama (enginery-model-llama==0.1.0) serves LlamaForCausalLM\n")
    refused = CliRunner().invoke(build_app(), ["test-model", str(tmp_path)])
    assert isinstance(refused.exception, CheckpointError)
