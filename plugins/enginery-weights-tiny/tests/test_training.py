"""Tokenizer, models and loops, at sizes for a CPU."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import corpus, curve, evaluate, loop, model, tokenizer
from tokenizers import Tokenizer

SMALL = model.Shape(vocabulary=600, hidden=64, inner=96, layers=2, heads=1, kv_heads=1, positions=256)


@cache
def small_tokenizer() -> Tokenizer:
    return tokenizer.train(num_documents=300, vocabulary=600)


def test_the_tokenizer_gives_any_text_back_and_keeps_digits_apart() -> None:
    known = small_tokenizer()
    for text in ("Grüße, 你好 🙂\n\t x", "12345", "  two  blanks ", '{"a": [1.5, true]}'):
        assert known.decode(known.encode(text).ids) == text
    assert known.encode("12345").tokens == ["<|begin|>", *"12345"]
    ids = [known.token_to_id(token) for token in tokenizer.SPECIAL]
    assert known.encode("".join(tokenizer.SPECIAL), add_special_tokens=False).ids == ids


def test_training_the_tokenizer_again_gives_the_same() -> None:
    assert small_tokenizer().to_str() == tokenizer.train(num_documents=300, vocabulary=600).to_str()


def test_the_quick_encoder_gives_the_tokenizers_ids() -> None:
    known = small_tokenizer()
    encoder = corpus.Encoder(known)
    odd = ["a  1", "x \n\n 2.<|done|>\n", "it's 'so'  <|turn|>  b", '{\n  "a": 1\n}', "<|be <|begin|>--12--"]
    for text in [*islice(corpus.documents("encoder"), 200), *odd]:
        assert encoder.encode(text) == known.encode(text, add_special_tokens=False).ids, text


def test_shards_are_reproducible_and_differ(tmp_path: Path) -> None:
    known = small_tokenizer()
    known.save(str(tmp_path / "tokenizer.json"))
    first, again, other = (corpus.shard(0, number, corpus.Encoder(known), size=2000).tolist() for number in (0, 0, 1))
    assert first == again != other
    held = corpus.shard(0, 0, corpus.Encoder(known), held=True, size=2000).tolist()
    assert held != first


@pytest.mark.parametrize(("shape", "at_most"), [(model.TARGET, 8_000_000), (model.DRAFT, 1_000_000)], ids=["target", "draft"])
def test_models_are_as_small_as_promised(shape: model.Shape, at_most: int) -> None:
    made = model.Llama(shape)
    assert 0.9 * at_most < model.num_parameters(made) <= at_most
    assert 2 * model.num_parameters(made) < 16_000_000
    assert shape.head_dim == 64
    assert shape.heads % shape.kv_heads == 0


def test_a_saved_model_is_the_one_that_transformers_computes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = model.Llama(SMALL)
    model.save(made.tensors(), SMALL.config(architecture="LlamaForCausalLM", begin=0, ends=[1, 3]), tmp_path)
    tokens = torch.randint(0, 600, (2, 50))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            model.load_llama(tmp_path, "cpu", torch.float32)(tokens), reference(tokens).logits, atol=1e-5, rtol=1e-5
        )


def test_the_eagle_head_is_saved_in_the_layout_of_other_engines(tmp_path: Path) -> None:
    head = model.Eagle(SMALL)
    tensors = head.tensors(torch.zeros(600, 64))
    assert {name.rpartition(".")[0] for name in tensors} == {
        "embed_tokens",
        "fc",
        "layers.0.mlp.down_proj",
        "layers.0.mlp.gate_proj",
        "layers.0.mlp.up_proj",
        "layers.0.post_attention_layernorm",
        "layers.0.self_attn.k_proj",
        "layers.0.self_attn.o_proj",
        "layers.0.self_attn.q_proj",
        "layers.0.self_attn.v_proj",
    }
    model.save(tensors, SMALL.config(architecture="LlamaForCausalLMEagle", begin=0, ends=[1, 3]), tmp_path)
    again = model.load_eagle(tmp_path, "cpu", torch.float32)
    torch.testing.assert_close(again.fc.weight, head.fc.weight.bfloat16().float())


def write_shards(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        np.save(corpus.shard_path(folder, number), corpus.shard(0, number, corpus.Encoder(small_tokenizer()), size=8192))


def test_the_loops_lower_their_losses_and_repeat_themselves(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", 2)
    settings = loop.Settings(steps=40, rows=8, length=64, rate=1e-2, warm_up=5, compiled=False)

    def trained() -> tuple[model.Llama, loop.Curve]:
        torch.manual_seed(0)
        target = model.Llama(SMALL)
        return target, loop.train(
            [target],
            loop.next_token_loss(target),
            loop.batches(tmp_path / "shards", 2, settings),
            settings,
            device="cpu",
            name="target",
        )

    target, losses = trained()
    entries = losses.losses["loss"]
    assert entries[0][1] > 4.5
    assert entries[-1][1] < 0.9 * entries[0][1]
    assert losses.tokens == 40 * 8 * 64
    assert trained()[1].losses == losses.losses

    draft, eagle = model.Llama(SMALL), model.Eagle(SMALL)
    source = loop.batches(tmp_path / "shards", 2, settings, first=1)
    both = loop.train([draft, eagle], loop.draft_losses(target, draft, eagle), source, settings, device="cpu", name="drafts")
    assert all(entries[-1][1] < entries[0][1] for entries in both.losses.values())
    assert all(weight.grad is None for weight in target.parameters())


def test_a_missing_shard_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="00000"):
        next(loop.batches(tmp_path, 1, loop.Settings(), patience_s=0.1))


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    settings = loop.Settings(rate=1.0, warm_up=10)
    assert loop.rate_at(4, None, settings) == pytest.approx(0.5)
    assert loop.rate_at(10, 100, settings) == pytest.approx(1.0)
    assert loop.rate_at(100, 100, settings) == pytest.approx(0.1)


def speaker_of(made: model.Llama, folder: Path) -> evaluate.Speaker:
    config = made.shape.config(architecture="LlamaForCausalLM", begin=0, ends=[1, 3])
    model.save(made.tensors(), config, folder)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return evaluate.Speaker(folder, "cpu", torch.float32, num_pages=64, num_threads=1)


def test_a_drafter_that_is_the_target_has_everything_accepted(tmp_path: Path) -> None:
    torch.manual_seed(2)
    speaker = speaker_of(model.Llama(SMALL), tmp_path)
    never = model.Llama(SMALL).eval()
    torch.nn.init.constant_(never.model.norm.weight, -1.0)
    with speaker.engine:
        found = evaluate.acceptance(speaker, speaker.model, model.Eagle(SMALL).eval(), count=4, max_tokens=24)
        assert found["draft"] == {f"chain of {length}": length + 1 for length in (1, 2, 3, 4)}
        assert evaluate.acceptance(speaker, never, model.Eagle(SMALL).eval(), count=4, max_tokens=24)["draft"]["chain of 4"] < 2


def test_answers_end_before_their_end_token(tmp_path: Path) -> None:
    torch.manual_seed(1)
    speaker = speaker_of(model.Llama(SMALL), tmp_path)
    with speaker.engine:
        prompts = [[5, 6, 7, 8], [9], [10, 11]]
        together = speaker.continue_ids(prompts, 12, temperature=0.8)
        assert together == speaker.continue_ids(prompts, 12, temperature=0.8)
        speaker.ends = {together[0][-1]}
        assert speaker.continue_ids(prompts, 12, temperature=0.8)[0] == together[0][:-1]


def test_a_curve_is_drawn_with_every_loss(tmp_path: Path) -> None:
    curve.draw({"one": [(1, 4.0), (10, 1.0)], "two": [(5, 2.0)]}, tmp_path / "loss.svg")
    drawn = (tmp_path / "loss.svg").read_text()
    assert drawn.count("<polyline") == 2
    assert ">one</text>" in drawn
