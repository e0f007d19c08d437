"""`LLM.chat`: templates, contents and tools, with the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginery import LLM, SamplingParams
from enginery.errors import RequestError

TINY: dict[str, Any] = {"num_pages": 64, "dtype": "float32"}


def test_a_chat_is_the_template_s_text_continued() -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(**TINY) as model:
        answer = model.chat([{"role": "user", "content": "Hi"}], params)
        text = "<|begin|><|turn|>user\nHi<|done|>\n<|turn|>assistant\n"
        assert model.tokenizer is not None
        assert answer.prompt_token_ids == tuple(model.tokenizer.encode(text, add_special_tokens=False))
        assert answer.token_ids == model.generate(list(answer.prompt_token_ids), params)[0].token_ids


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}],
            r"the content of a message is \[.*must be text or parts of text",
        ),
        (5, r"the content of a message is 5, but must be text"),
        ("\ud83d", "cannot be given to a template: .*surrogates not allowed"),
    ],
)
def test_a_chat_s_content_is_text_or_parts_of_text(content: object, why: str) -> None:
    params = SamplingParams(max_tokens=1)
    with LLM(**TINY) as model:
        parts = model.chat(
            [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]}], params
        )
        assert parts.prompt_token_ids == model.chat([{"role": "user", "content": "One\ntwo"}], params).prompt_token_ids
        with pytest.raises(RequestError, match=why):
            model.chat([{"role": "system", "content": "Brief"}, {"role": "user", "content": content}], params)
        assert model.chat([{"role": "user", "content": "Hi"}], params).token_ids


def test_a_chat_may_say_how_it_is_rendered(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    asked = [{"role": "user", "content": "Hi"}]
    begun = [*asked, {"role": "assistant", "content": "I am "}]
    file = tmp_path / "thinks.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}{{ 'quick' if enable_thinking is false else 'thinks' }}")
    with LLM(**TINY, chat_template=str(file)) as model:

        def prompt(messages: list[dict[str, str]], **given: Any) -> str:
            assert model.tokenizer is not None
            return model.tokenizer.decode(model.chat(messages, params, **given).prompt_token_ids, skip_special_tokens=False)

        assert prompt(asked) == "Hi|thinks"
        assert prompt(asked, chat_template_kwargs={"enable_thinking": False}) == "Hi|quick"
        assert prompt(begun, continue_final_message=True) == "Hi|I am "
        assert prompt(begun, continue_final_message=True, add_generation_prompt=False) == "Hi|I am "
        own = "{{ messages[0].content }}{% if add_generation_prompt %}?{% endif %}"
        assert prompt(asked, chat_template=own) == "Hi?"
        assert prompt(asked, chat_template=own, add_generation_prompt=False) == "Hi"
        for given, param in (
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"enable_thinkin": 1}}, "chat_template_kwargs"),
            ({"continue_final_message": True}, "continue_final_message"),
            ({"chat_template": "{% for"}, "chat_template"),
        ):
            with pytest.raises(RequestError) as refused:
                model.chat(asked, params, **given)
            assert refused.value.param == param


def test_a_chat_may_offer_tools_to_a_template_that_writes_them(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    file = tmp_path / "tools.jinja"
    file.write_text("{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}")
    params, asked = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), [{"role": "user", "content": "Hi"}]
    with LLM(**TINY, chat_template=str(file)) as model:
        assert model.tokenizer is not None
        for tools, text in (([tool], "get_weather;Hi"), ([], "Hi")):
            assert model.tokenizer.decode(model.chat(asked, params, tools=tools).prompt_token_ids, skip_special_tokens=True) == text
        wrong: Any
        for wrong in ("get_weather", [len], tool):
            with pytest.raises(RequestError, match="must be a list of type and function") as refused:
                model.chat(asked, params, tools=wrong)
            assert refused.value.param == "tools"
    with LLM(**TINY) as model, pytest.raises(RequestError, match="does not write tools") as refused:
        model.chat(asked, params, tools=[tool])
    assert refused.value.param == "tools"
