"""The Python way in: `LLM(model).generate(prompts, params)`, in this process."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

from enginery.config.sources import registry_for
from enginery.contracts.request import SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import EnginError, RequestError
from enginery.llm.answers import Embedding, Generation, GenerationDelta, GrowingCompletion, embedding, generation
from enginery.llm.interrupts import interrupts_later
from enginery.llm.keyword_options import engine_options
from enginery.llm.open_requests import EMBEDDED, OpenRequests
from enginery.llm.prompts import Encoded, Messages, Prompt, PromptEncoder, as_batch

PROGRESS_FROM = 8  # completions; fewer are done before a bar is worth its lines


class LLM(AbstractContextManager["LLM"]):
    """A model in memory. Keyword arguments are the fields of `EngineOptions`; without a model the embedded default is used.

    Raises `EnginError` when the model cannot be served. Also a context manager, which frees the memory at its end. Threads take
    turns, a call of `generate` or a step of a stream each; `AsyncLLM` is for asyncio and for requests that come while others run.
    tokenizer: None without a tokenizer.json. On a CPU that others use too, set GOMP_SPINCOUNT=10000 before torch is imported.
    """

    def __init__(self, model: str | None = None, **options: object) -> None:
        asked = engine_options(model, options, owner="LLM")
        if asked.prefill_fraction is None:  # nobody watches tokens come, so prompts go first
            asked = dataclasses.replace(asked, prefill_fraction=1.0)
        registry = registry_for(asked)
        self._engine: Engine | None = Engine.build(asked, registry)
        self.facts = self._engine.facts
        self._prompts = PromptEncoder.load(self.facts, asked)
        self.text, self.tokenizer = self._prompts.text, self._prompts.tokenizer
        self._requests: OpenRequests | None = OpenRequests(self._engine, self.tokenizer)
        self._names = map(str, itertools.count())
        self._turn, self._pid = threading.RLock(), os.getpid()
        self._is_amid, self._left = False, list[GrowingCompletion]()  # of streams that ended while it was

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and KV memory. Generating afterwards raises `EnginError`."""
        with self._turn:
            if self._engine is not None and os.getpid() == self._pid:
                self._engine.close()
            self._engine = self._requests = None
            self._prompts.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without `params` samples by: the checkpoint's generation_config.json, and defaults for the rest."""
        return self._prompts.params(None)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        progress: bool | None = None,
    ) -> Generation:
        """Answer one conversation, a list of {"role": ..., "content": ...}, by the checkpoint's chat template.

        tools: {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}} each, as the template writes
        them. The answer's text has calls as the model writes them, with special tokens only if `params.skip_special_tokens` is
        False; the server's API parses them. chat_template: text of another one. chat_template_kwargs: its variables, such as
        {"enable_thinking": False}. add_generation_prompt: begin the answer; None: unless an assistant's message is to be continued.
        """
        self._live()
        prompt = self._prompts.encode_chat(
            messages,
            template=chat_template,
            tools=tools,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._generate([prompt], [self._prompts.params(params)], progress=progress)[0]

    def embed(self, prompts: Prompt | Iterable[Prompt], *, normalize: bool = True, progress: bool | None = None) -> list[Embedding]:
        """The hidden state of each prompt's last token after the last norm, in their order, as /v1/embeddings has it.

        A prompt may be as long as the context. normalize: divide each vector by its length. Raises `RequestError` for a prompt
        that cannot be served, and for a checkpoint whose embeddings are pooled otherwise.
        """
        self._live()
        self._prompts.check_pooling()
        encoded = [self._prompts.encode(prompt) for prompt in as_batch(prompts)]
        growing = self._run(encoded, [EMBEDDED] * len(encoded), progress=progress, embed=True)
        return [embedding(ids, parts[0].embedding, normalize=normalize) for (ids, _), parts in zip(encoded, growing, strict=True)]

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[GenerationDelta]:
        """Answer one prompt, and give its tokens as they come. A prompt is text, a list of token ids, or the messages of a chat.

        Leaving the loop, or closing the iterator, aborts the request. Several streams, and `generate` between two deltas, share
        their steps. Raises `RequestError` here for what is no prompt, and on the way when the request cannot be served.
        """
        self._live()
        return self._stream(self._prompts.encode_any(prompt), self._prompts.params(params))

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Answer every prompt, in their order. A prompt is text or a list of token ids.

        params: for all prompts, or one for each. progress: a bar on stderr; by default for longer work on a terminal. Raises
        `RequestError` for the first prompt that cannot be served, before any is run.
        """
        self._live()
        batch = as_batch(prompts)
        each = list(map(self._prompts.params, params if isinstance(params, Sequence) else [params] * len(batch)))
        if len(each) != len(batch):
            raise RequestError(f"there are {len(batch)} prompts and {len(each)} params; give one, or one for each", param="params")
        return self._generate([self._prompts.encode(prompt) for prompt in batch], each, progress=progress)

    def _generate(self, encoded: Sequence[Encoded], params: Sequence[SamplingParams], *, progress: bool | None) -> list[Generation]:
        growing = self._run(encoded, params, progress=progress)
        deltas = [[[delta] for part in parts if (delta := part.take()) is not None] for parts in growing]  # all have ended
        return [generation(ids, each) for (ids, _), each in zip(encoded, deltas, strict=True)]

    def _live(self) -> OpenRequests:
        if self._requests is None:
            raise EnginError("this LLM was closed; build a new one")
        if os.getpid() != self._pid:
            raise EnginError("this LLM is the process's that this one was forked from; build one here, or start processes by spawn")
        return self._requests

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """What the engine is told, whole: Ctrl-C waits, and so does the end of a stream that is collected as garbage meanwhile."""
        with self._turn, interrupts_later():
            was, self._is_amid = self._is_amid, True
            try:
                yield
            finally:
                while not was and self._left:
                    ended, self._left = self._left, []
                    if self._requests is not None:
                        self._requests.abort(ended)
                self._is_amid = was

    def _run(
        self, prompts: Sequence[Encoded], params: Sequence[SamplingParams], *, progress: bool | None, embed: bool = False
    ) -> list[list[GrowingCompletion]]:
        growing: list[list[GrowingCompletion]] = []
        with self._turn:
            requests = self._live()
            try:
                for prompt, asked in zip(prompts, params, strict=True):
                    with self._undisturbed():
                        growing.append(requests.submit(next(self._names), prompt, asked, embed=embed))
                left = set(itertools.chain.from_iterable(growing))
                total = len(left)
                shown = total >= PROGRESS_FROM and sys.stderr.isatty() if progress is None else progress
                with Progress(console=Console(stderr=True), disable=not shown, transient=True) as bar:
                    task = bar.add_task("generating", total=total)
                    while left:
                        left -= {part for part in self._step(requests) if _has_ended(part, left)}
                        bar.update(task, completed=total - len(left))
            finally:
                self._end(itertools.chain.from_iterable(growing))
        return growing

    def _end(self, parts: Iterable[GrowingCompletion]) -> None:
        """Abort those of these that are open: now, or behind the step amid which garbage is collected."""
        with self._turn:
            self._left += parts
            if not self._is_amid:
                with self._undisturbed():
                    pass  # its end does

    def _step(self, requests: OpenRequests) -> list[GrowingCompletion]:
        if not requests.engine.has_work:  # a step that failed for another caller could not tell it
            requests.engine.prepare()  # raises what ended the engine, if other ranks are gone
            raise EnginError("the request was given up when a step failed; ask again")
        with self._undisturbed():
            try:
                return requests.step()
            except BaseException as error:
                requests.take_in(requests.engine.recover(error))  # other callers' streams end too, or it is raised here already
                raise

    def _stream(self, prompt: Encoded, params: SamplingParams) -> Iterator[GenerationDelta]:
        parts: list[GrowingCompletion] = []
        try:
            with self._undisturbed():
                parts = self._live().submit(next(self._names), prompt, params)
            while parts:
                with self._turn:
                    if not any(part.is_over for part in parts):  # as another caller's step may have left them
                        self._step(self._live())
                for part in list(parts):
                    if part.error is not None:
                        raise part.error
                    if (delta := part.take()) is not None:
                        if delta.finish_reason is not None:
                            parts.remove(part)
                        yield delta
        finally:
            self._end(parts)


def _has_ended(part: GrowingCompletion, group: set[GrowingCompletion]) -> bool:
    """Whether nothing more comes of `part`. Raises the error of a part of this group that failed."""
    if part in group and part.error is not None:
        raise part.error
    return part.is_over
