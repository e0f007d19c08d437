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
QWEN35 = QWEN3_CODER + "\\n<parameter=example_1>\\nvalue\\n</parameter>{{- '<think>\\n\\n</think>\\n\\n' }}"
MIMO = QWEN3_CODER + "\\n<parameter=example_1>value</parameter>{{- '<think></think>' }}"
GLM47 = GLM45.replace("\\n", "")
KIMI = "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}"
KIMI_THINKING = KIMI + "<think>{{ rc }}</think>"
MINIMAX_TEXT = "{{ '<beginning_of_sentence>ai name=' }}<function_call>```typescript"
MINIMAX_TEXT_TOLD = "{{ '<beginning_of_sentence>system function_setting=functions\\n' + function | tojson }}"
MINIMAX_M1 = "{{ '<beginning_of_sentence>ai name=MiniMax AI\\n<tool_calls>\\n' }}"
MINIMAX_M2 = "{{- ']~b]ai\\n<think>\\n' }}{%- if '</think>' in c %}{{ '<minimax:tool_call>' }}<invoke name="
NEMOTRON = "{{- '<SPECIAL_11>Assistant\\n<think>' }}{% if '</think>' in c %}{{- '<TOOLCALL>[' -}}"
NEMOTRON3 = QWEN35
GRANITE4 = '<|start_of_role|>assistant<|end_of_role|>{{- \'<tool_call>\\n{"name": "\' + call.name }}'
LING = "{{- '<role>ASSISTANT</role>' }}{{- '<tool_call>\\n{\"name\": \"' + call.name }}"
RING = LING + "{{ content.split('</think>')[-1] }}"
JAMBA = "<|bom|><|assistant|>{{ '<tool_calls>[\\n    ' }}"
FALCON = QWEN25
LFM2 = "{{- '<|im_start|>system\\nList of tools: <|tool_list_start|>' }}"
LFM25 = "{{- '<|im_start|>' }}{{- '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' }}{%- if '</think>' in content %}"
LONGCAT = "{{ 'ASSISTANT:' }}{{ '<longcat_tool_call>\\n' + call | tojson + '\\n</longcat_tool_call>' }}"
LONGCAT_THINKING = "<longcat_think>{{ r }}</longcat_think><longcat_tool_call>{{ name }}<longcat_arg_key>{{ k }}</longcat_arg_key>"
GPT_OSS = '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}'
GEMMA = "{{ bos_token }}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
GRANITE = "{{ 'Respond only with <|tool_call|> followed by a JSON list. Write your thoughts between <think></think>' }}"
MISTRAL = "[AVAILABLE_TOOLS]{{- '[TOOL_CALLS][' }}{{- tool_call.function | tojson }}{{- ']' + eos_token }}"
DEVSTRAL = "[AVAILABLE_TOOLS]{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}"
MAGISTRAL = DEVSTRAL + "{%- set d = 'Draft your thinking: [THINK]Your thoughts.[/THINK]Here, a self-contained response.' %}"
PHI4 = "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
PHI4_WITH_CALLS = PHI4 + "{{ '<|tool_call|>' + calls | tojson + '<|/tool_call|>' }}"
PHI4_TOKENS = ("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
CHATML = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (QWEN25, (), {"hermes"}),
        (QWEN3, (), {"hermes", "qwen3"}),
        (QWEN3_CODER, (), {"qwen3-xml"}),
        (QWEN35, (), {"qwen3-xml", "qwen3"}),
        (NEMOTRON3, (), {"qwen3-xml", "qwen3"}),
        (MIMO, (), {"mimo", "qwen3"}),
        (GLM47, (), {"glm4", "glm"}),
        (KIMI, (), {"kimi-k2"}),
        (KIMI_THINKING, (), {"kimi-k2", "think"}),
        (MINIMAX_TEXT, (), {"minimax-text"}),
        (MINIMAX_TEXT_TOLD, (), {"minimax-text"}),
        (MINIMAX_M1, (), {"minimax-m1"}),
        (MINIMAX_M2, (), {"minimax-m2", "think"}),
        (NEMOTRON, (), {"nemotron", "think"}),
        (GRANITE4, (), {"hermes"}),
        (LING, (), {"hermes"}),
        (RING, (), {"hermes", "think"}),
        (JAMBA, (), {"jamba"}),
        (FALCON, (), {"hermes"}),
        (LFM2, ("<|tool_call_start|>",), {"lfm2"}),
        (LFM25, (), {"lfm2", "qwen3"}),
        (LONGCAT, (), {"longcat"}),
        (LONGCAT_THINKING, (), {"longcat-tags", "longcat-think"}),
        (GPT_OSS, (), {"harmony", "harmony-analysis"}),
        (GEMMA, (), set()),
        (LLAMA31, ("<|python_tag|>",), {"llama3-json"}),
        (LLAMA31, (), set()),
        (GRANITE, (), {"granite3", "think"}),
        (MISTRAL, (), {"mistral"}),
        (DEVSTRAL, (), {"mistral-args"}),
        (MAGISTRAL, (), {"mistral-args", "magistral"}),
        (PHI4, PHI4_TOKENS, {"phi4-mini"}),
        (PHI4, (), set()),
        (PHI4_WITH_CALLS, (), {"phi4-mini"}),
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


def test_minimax_m1_reasons_though_its_template_says_nothing_of_it() -> None:
    facts = ParserFacts(architecture="MiniMaxM1ForCausalLM", chat_template=MINIMAX_M1, added_tokens=frozenset())
    assert {spec.name for spec in register_parsers() if spec.suits(facts)} == {"minimax-m1", "think"}


@pytest.mark.parametrize("spec", [spec for spec in register_parsers() if spec.kind == "reasoning"], ids=lambda spec: spec.name)
def test_a_prompt_ends_within_reasoning_only_where_its_template_opens_it(spec) -> None:
    opening = {"harmony-analysis": "<|start|>assistant"}.get(spec.name, spec.tags[0])
    assert spec.is_inside(f"<|im_start|>assistant\n{opening}\n")
    assert not spec.is_inside(f"<|im_start|>user\nWhat is {opening}?<|im_end|>\n<|im_start|>assistant\n")
    assert not spec.is_inside(f"<|im_start|>assistant\n{opening}{spec.close}")
    assert not spec.is_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
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
