"""What is on offer: which checkpoint gets which parser, and where a prompt ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from enginery.api import ParserFacts, ParserSetup
from enginery_parsers import register_parsers

# The lines of each family's template that write a call or the reasoning.
QWEN25 = (
    """{{- '<|im_start|>' + message.role }}{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
)
QWEN3 = QWEN25 + "{%- set reasoning = content.split('</think>')[0] %}{{- '<think>\\n\\n</think>\\n\\n' }}"
QWEN3_CODER = "{{- '<|im_start|>' }}{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
LLAMA31 = """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}"""
R1 = """{{'<｜Assistant｜><｜tool▁calls▁begin｜>' + tool['type'] + '```json' + '\\n'}}{% if '</think>' in content %}"""  # noqa: RUF001
V31 = """{{'<｜Assistant｜></think>'}}{{'<｜tool▁calls▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'}}"""  # noqa: RUF001
GLM45 = "[gMASK]<sop>{{- '<|assistant|>\\n<think></think>' }}{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>"
CHATML = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (QWEN25, (), {"hermes"}),
        (QWEN3, (), {"hermes", "qwen3"}),
        (QWEN3_CODER, (), set()),
        (LLAMA31, ("<|python_tag|>",), {"llama3-json"}),
        (LLAMA31, (), set()),
        (R1, (), {"deepseek-v3", "deepseek-r1"}),
        (V31, (), {"deepseek-v3.1", "deepseek-r1"}),
        (GLM45, (), {"glm4", "glm"}),
        (CHATML, (), set()),
        ("", (), set()),
    ],
)
def test_a_template_shows_its_parsers(template: str, tokens: tuple[str, ...], expected: set[str]) -> None:
    facts = ParserFacts(architecture="A", chat_template=template, added_tokens=frozenset(tokens))
    assert {spec.name for spec in register_parsers() if spec.suits(facts)} == expected


@pytest.mark.parametrize("spec", [spec for spec in register_parsers() if spec.kind == "reasoning"], ids=lambda spec: spec.name)
def test_a_prompt_ends_within_reasoning_only_where_its_template_opens_it(spec) -> None:
    assert spec.is_inside("<|im_start|>assistant\n<think>\n")
    assert not spec.is_inside("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert not spec.is_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not spec.is_inside("<think>" + spec.close)
    assert not spec.is_inside("")


def test_every_spec_makes_a_parser_with_a_state_of_its_own() -> None:
    for spec in register_parsers():
        one, other = spec.make(ParserSetup()), spec.make(ParserSetup())
        assert one.feed("<tool_") == other.feed("<tool_")
        one.finish()
        assert other.feed("x")


def test_registering_reads_no_parser() -> None:
    loaded = "print(*(name for name in sys.modules if name.startswith('enginery_parsers')))"
    code = f"import sys, enginery_parsers; enginery_parsers.register_parsers(); {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert set(done.stdout.split()) == {"enginery_parsers", "enginery_parsers.spec"}
