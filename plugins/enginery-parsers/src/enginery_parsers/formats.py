"""The class that parses each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from enginery.api import OutputParser, ParserSetup
from enginery_parsers import calls, framed, tagged
from enginery_parsers.calls import LlamaParser, ObjectParser
from enginery_parsers.deepseek import DEEPSEEK, DeepSeekV3Parser
from enginery_parsers.framed import FramedParser
from enginery_parsers.harmony import HarmonyParser, HarmonyReasoning
from enginery_parsers.mistral import MistralParser
from enginery_parsers.pythonic import PythonicParser
from enginery_parsers.reasoning import ThinkParser
from enginery_parsers.tagged import TaggedParser

MADE_BY: Final[Mapping[str, Callable[[ParserSetup], OutputParser]]] = {
    "hermes": partial(ObjectParser, written=calls.HERMES),
    "longcat": partial(ObjectParser, written=calls.LONGCAT),
    "granite3": partial(ObjectParser, written=calls.GRANITE),
    "phi4-mini": partial(ObjectParser, written=calls.PHI),
    "nemotron": partial(ObjectParser, written=calls.NEMOTRON),
    "jamba": partial(ObjectParser, written=calls.TOOL_CALLS),
    "minimax-m1": partial(ObjectParser, written=calls.TOOL_CALLS),
    "llama3-json": LlamaParser,
    "mistral": MistralParser,
    "mistral-args": MistralParser,
    "deepseek-v3": partial(DeepSeekV3Parser, written=DEEPSEEK),
    "deepseek-v3.1": partial(FramedParser, written=DEEPSEEK),
    "kimi-k2": partial(FramedParser, written=framed.KIMI),
    "minimax-text": partial(FramedParser, written=framed.MINIMAX_TEXT),
    "glm4": partial(TaggedParser, written=tagged.GLM),
    "longcat-tags": partial(TaggedParser, written=tagged.LONGCAT),
    "qwen3-xml": partial(TaggedParser, written=tagged.QWEN),
    "mimo": partial(TaggedParser, written=tagged.MIMO),
    "minimax-m2": partial(TaggedParser, written=tagged.MINIMAX),
    "lfm2": PythonicParser,
    "harmony": HarmonyParser,
    "qwen3": ThinkParser,
    "deepseek-r1": ThinkParser,
    "glm": ThinkParser,
    "think": ThinkParser,
    "longcat-think": partial(ThinkParser, begin="<longcat_think>", end="</longcat_think>"),
    "magistral": partial(ThinkParser, begin="[THINK]", end="[/THINK]"),
    "harmony-analysis": HarmonyReasoning,
}
