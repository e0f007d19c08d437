"""What is on offer, and how a checkpoint's format is recognised."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from enginery.api import Grammar, GrammarKind, OutputParser, ParserFacts, ParserSetup, ParserSpec, Tool

_DEEPSEEK_CALLS: Final = "<\uff5ctool▁calls▁begin\uff5c>"
_DEEPSEEK_ANSWER: Final = "<\uff5cAssistant\uff5c>"
_ANSWERS: Final = ("<|im_start|>", _DEEPSEEK_ANSWER, "<|assistant|>")  # what the families with a parser of their own begin one with
_SILENT: Final = ("MiniMaxM1ForCausalLM",)
_HARMONY: Final = ("<|start|>", "<|channel|>", "<|message|>")
_VALUE_AS_IT_IS: Final = re.compile(r"<parameter=\w+>(?!\n|\\n)")  # in the example that the template shows to the model


def _make(parser: str, setup: ParserSetup) -> OutputParser:
    from enginery_parsers.formats import MADE_BY

    return MADE_BY[parser](setup)


@dataclass(frozen=True)
class _Force:
    """A `ForceFn`. answer: what one without calls follows; None: it is any text."""

    parser: str
    answer: Grammar | None = None

    def __call__(
        self, tools: Sequence[Tool], name: str | None, *, parallel: bool, required: bool, reasoning: tuple[str, str] = ("", "")
    ) -> Grammar | None:
        from enginery_parsers.forcing import FORCED_BY, Asked

        asked = Asked(tools=tools, name=name, parallel=parallel, required=required, reasoning=reasoning)
        if self.answer is not None:
            if self.answer.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
                return None
            asked = replace(asked, schema=self.answer.source or '{"type": "object"}', lenient=self.answer.lenient)
        return FORCED_BY[self.parser](asked)


def _tell(
    parser: str, source: str, tools: list[dict[str, object]], messages: list[dict[str, object]]
) -> tuple[list[dict[str, object]], list[dict[str, object]]] | None:
    from enginery_parsers.telling import TOLD_BY

    return TOLD_BY[parser](source, tools, messages)


def _ends_in(prompt: str, *, opening: str) -> bool:
    """Whether the template has opened the reasoning. What stands earlier in the prompt may be the user's own words."""
    return prompt[-100:].rstrip().endswith(opening)


def _shows(*markers: str, but: Sequence[str] = (), token: str = "") -> Callable[[ParserFacts], bool]:
    """Whether the template has these markers and none of the others, and the tokenizer that token."""

    def suits(facts: ParserFacts) -> bool:
        template = facts.chat_template
        shown = all(marker in template for marker in markers) and not any(marker in template for marker in but)
        return shown and (not token or token in facts.added_tokens)

    return suits


def _is_qwen_xml(facts: ParserFacts) -> bool:
    return _shows("<tool_call>", "<function=")(facts) and not _VALUE_AS_IT_IS.search(facts.chat_template)


def _is_mimo(facts: ParserFacts) -> bool:
    return _shows("<tool_call>", "<function=")(facts) and bool(_VALUE_AS_IT_IS.search(facts.chat_template))


def _is_lfm2(facts: ParserFacts) -> bool:
    return "<|tool_call_start|>" in facts.added_tokens or _shows("<|tool_call_start|>")(facts)


def _is_phi(facts: ParserFacts) -> bool:
    """Of Microsoft's templates some write no calls, only the tools that there are."""
    return _shows("<|/tool_call|>")(facts) or _shows("<|tool|>", "<|/tool|>", token="<|/tool_call|>")(facts)


def _is_minimax_text(facts: ParserFacts) -> bool:
    """Its template writes tools and their results, but not how they are called."""
    return _shows("<function_call>")(facts) or _shows("<beginning_of_sentence>", "function_setting", but=("<tool_calls>",))(facts)


def _is_think(facts: ParserFacts) -> bool:
    """MiniMax-M1 opens and closes its reasoning itself, and its template says nothing of it."""
    return facts.architecture in _SILENT or _shows("</think>", but=_ANSWERS)(facts)


# Whether a family's markers are special tokens differs from one tokenizer to the next, so each parser asks for them.
def _tools(name: str, summary: str, suits: Callable[[ParserFacts], bool], *, tells: bool = False) -> ParserSpec:
    return ParserSpec(
        name=name,
        api=(2, 2),
        kind="tools",
        summary=summary,
        suits=suits,
        make=partial(_make, name),
        needs_special_tokens=True,
        force=_Force(name),
        force_or_json=partial(_Force, name),
        tell=partial(_tell, name) if tells else None,
    )


def _reasoning(
    name: str,
    summary: str,
    suits: Callable[[ParserFacts], bool],
    *,
    close: str,
    tags: tuple[str, str] = ("<think>", "</think>"),
    opening: str = "",
) -> ParserSpec:
    """opening: the end of a prompt within reasoning, if it is not the first tag."""
    return ParserSpec(
        name=name,
        api=(2, 0),
        kind="reasoning",
        summary=summary,
        suits=suits,
        make=partial(_make, name),
        needs_special_tokens=True,
        is_inside=partial(_ends_in, opening=opening or tags[0]),
        close=close,
        tags=tags,
    )


_BREAKS: Final = "\n</think>\n\n"

PARSERS: Final = (
    _tools(
        "hermes",
        "Hermes 2 Pro and 3, Qwen 2.5, 3 and 3-Next, Granite 4, Falcon-H1, Ling: JSON in <tool_call>",
        _shows("<tool_call>", but=("<arg_key>", "<function=")),
    ),
    _tools("llama3-json", "Llama 3.1 to 3.3: JSON objects", _shows('"parameters": ', token="<|python_tag|>")),
    _tools("mistral", "Mistral to Small 3.1: a JSON list behind [TOOL_CALLS]", _shows("[TOOL_CALLS]", but=("[ARGS]",))),
    _tools(
        "mistral-args", "Mistral Small 3.2, Devstral: a name, [ARGS] and JSON behind [TOOL_CALLS]", _shows("[TOOL_CALLS]", "[ARGS]")
    ),
    _tools("deepseek-v3", "DeepSeek V3, R1 and distilled models: fenced JSON between markers", _shows(_DEEPSEEK_CALLS, "```json")),
    _tools("deepseek-v3.1", "DeepSeek V3.1: JSON between markers", _shows(_DEEPSEEK_CALLS, but=("```json",))),
    _tools("glm4", "GLM 4.5 and later: tagged arguments in <tool_call>", _shows("<tool_call>", "<arg_key>")),
    _tools("qwen3-xml", "Qwen 3.5, Qwen 3 Coder, Nemotron 3: <function=...> and <parameter=...>", _is_qwen_xml),
    _tools("mimo", "MiMo V2: <function=...> and <parameter=...>, values without line breaks around", _is_mimo),
    _tools("kimi-k2", "Kimi K2 and Kimi-Linear: JSON between markers, calls with numbers", _shows("<|tool_calls_section_begin|>")),
    _tools("minimax-text", "MiniMax-Text-01: functions.name(JSON) in a fenced block", _is_minimax_text, tells=True),
    _tools("minimax-m1", "MiniMax-M1: JSON objects on lines in <tool_calls>", _shows("<tool_calls>", "<beginning_of_sentence>")),
    _tools("minimax-m2", "MiniMax-M2: <invoke> and <parameter> in <minimax:tool_call>", _shows("<minimax:tool_call>")),
    _tools("granite3", "Granite 3: a JSON list behind <|tool_call|>", _shows("<|tool_call|>", but=("<|/tool_call|>",))),
    _tools("phi4-mini", "Phi 4-mini: a JSON list between <|tool_call|> and <|/tool_call|>", _is_phi, tells=True),
    _tools("nemotron", "Nemotron Nano v2: a JSON list in <TOOLCALL>", _shows("<TOOLCALL>")),
    _tools("jamba", "Jamba 1.5 and later: a JSON list in <tool_calls>", _shows("<tool_calls>", but=("<beginning_of_sentence>",))),
    _tools("longcat", "LongCat-Flash: JSON in <longcat_tool_call>", _shows("<longcat_tool_call>", but=("<longcat_arg_key>",))),
    _tools(
        "longcat-tags",
        "LongCat-Flash-Thinking and Lite: tagged arguments in <longcat_tool_call>",
        _shows("<longcat_tool_call>", "<longcat_arg_key>"),
    ),
    _tools("lfm2", "LFM2: a list of calls as Python writes them, or of JSON objects", _is_lfm2),
    _tools("harmony", "gpt-oss: messages to functions", _shows(*_HARMONY)),
    _reasoning("qwen3", "Qwen 3, MiMo, LFM2.5: <think> and </think>", _shows("</think>", "<|im_start|>"), close=_BREAKS),
    _reasoning(
        "deepseek-r1",
        "DeepSeek R1, V3.1 and distilled models: <think> and </think>",
        _shows("</think>", _DEEPSEEK_ANSWER),
        close=_BREAKS,
    ),
    _reasoning("glm", "GLM 4.5 and later: <think> and </think>", _shows("</think>", "<|assistant|>"), close="</think>"),
    _reasoning(
        "think",
        "others, such as Kimi, Nemotron, MiniMax, Ring: <think> and </think>",
        _is_think,
        close=_BREAKS,
    ),
    _reasoning(
        "longcat-think",
        "LongCat-Flash: <longcat_think> and </longcat_think>",
        _shows("</longcat_think>"),
        close="\n</longcat_think>\n",
        tags=("<longcat_think>", "</longcat_think>"),
    ),
    _reasoning(
        "magistral",
        "Magistral: [THINK] and [/THINK]",
        _shows("[/THINK]"),
        close="[/THINK]",
        tags=("[THINK]", "[/THINK]"),
    ),
    _reasoning(
        "harmony-analysis",
        "gpt-oss: the channel analysis",
        _shows(*_HARMONY),
        close="<|channel|>final<|message|>",
        tags=("<|channel|>analysis<|message|>", "<|end|>"),
        opening="<|start|>assistant",
    ),
)
