"""Makes `tokenizers_made` importable, and renders templates with one process for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tokenizers_made import byte_level, save
from transformers import AutoTokenizer

from enginery.text.template import ChatTemplate
from enginery.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[str, str]]]:
    """Renders with ours and with transformers, from one folder."""
    made = {}

    def render(template, messages, **given):
        if template not in made:
            folder = save(byte_level(), tmp_path_factory.mktemp("checkpoint"), chat_template=template)
            ours = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
            made[template] = ours, AutoTokenizer.from_pretrained(folder)
        ours, theirs = made[template]
        fields = {name: given.pop(name) for name in ("add_generation_prompt", "continue_final_message", "tools") if name in given}
        wants_answer = not fields.get("continue_final_message")
        want = theirs.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": wants_answer, **fields, **given})
        return ours.render(messages, variables=given, **fields), want

    yield render
    for ours, _ in made.values():
        ours.close()


@pytest.fixture(scope="module")
def ours() -> Iterator[Callable[..., str]]:
    made = {}

    def render(source, messages=({"role": "user", "content": "1+1?"},), *, limits=None, **given):
        if (source, limits) not in made:
            made[source, limits] = ChatTemplate(source, variables={"bos_token": "<s>"}, limits=limits)
        return made[source, limits].render(list(messages), **given)

    yield render
    for template in made.values():
        template.close()
