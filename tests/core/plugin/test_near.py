"""What is offered for a name that is not there: what the user meant, or nothing."""

from __future__ import annotations

import time

import pytest

from enginery.plugin.near import did_you_mean

FAMILIES = ["LlamaForCausalLM", "EchoForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Glm4ForCausalLM"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("flsh", "flash"),
        ("fcsf", "fcfs"),
        ("workspace", "workspace_mb"),
        ("LamaForCausalLM", "LlamaForCausalLM"),
        ("MixtralForCasualLM", "MixtralForCausalLM"),
        ("FLASH", "flash"),
        ("torch", "attn-torch"),
        ("--page_size", "--page-size"),
        ("--max-model-length", "--max-model-len"),
        ("--kv-cache-dtype", "--kv-dtype"),
        ("--batch-tokens", "--max-batch-tokens"),
        ("max_new_tokens", "max_tokens"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),  # Anthropic's client, given a URL that ends in /v1
    ],
)
def test_what_is_nearly_right_is_offered(name: str, known: str) -> None:
    assert did_you_mean(name, [known, "zzzz"]) == f"; did you mean {known}?"


@pytest.mark.parametrize(
    "name",
    [
        "GemmaForCausalLM",
        "MambaForCausalLM",
        "PhiForCausalLM",
        "Phi3ForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen4ForCausalLM",
        "GPT2LMHeadModel",
    ],
)
def test_another_architecture_is_not_a_slip_of_the_pen(name: str) -> None:
    assert did_you_mean(name, FAMILIES) == ""


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("--tensor-parallel-size", "--page-size"),
        ("--tp-size", "--page-size"),
        ("x", "n"),
        ("ab", "ac"),
        ("W8", "W7"),
        ("", "a"),
        ("_", "a"),
    ],
)
def test_what_is_far_off_is_not_offered(name: str, known: str) -> None:
    assert did_you_mean(name, [known]) == ""


def test_the_nearest_three_are_offered() -> None:
    assert (
        did_you_mean("fla", ["flashinfer-mla", "flash", "flashinfer", "flashy", "torch"])
        == "; did you mean flash or flashy or flashinfer?"
    )


def test_a_name_of_megabytes_is_not_searched() -> None:
    began = time.process_time()
    assert did_you_mean("x" * 31_000_000, FAMILIES) == ""
    assert time.process_time() - began < 5
