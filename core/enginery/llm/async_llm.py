"""The Python way in for asyncio: many requests at once, each awaited or streamed, on one engine."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from types import TracebackType

from enginery.config.sources import registry_for
from enginery.contracts.request import SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import EnginError, RequestError
from enginery.llm.answers import Embedding, Generation, GenerationDelta, embedding, generation
from enginery.llm.engine_thread import EngineThread
from enginery.llm.keyword_options import engine_options
from enginery.llm.open_requests import EMBEDDED, OpenRequests
from enginery.llm.prompts import Encoded, Messages, Prompt, PromptEncoder


class AsyncLLM(AbstractAsyncContextManager["AsyncLLM"]):
    """A model in memory, with a thread that runs it. Keyword arguments, and `tokenizer`, are those of `LLM`.

    Requests that are open at the same time share their steps, and join and leave the batch as they come. A task that is cancelled
    ends its request, and a request that fails ends nobody else's. Also an asynchronous context manager, which closes at its end.
    """

    def __init__(self, model: str | None = None, **options: object) -> None:
        """Load the model and wait for it. Raises `EnginError` when it cannot be served."""
        asked = engine_options(model, options, owner="AsyncLLM")
        prompts: list[PromptEncoder] = []

        def build() -> OpenRequests:
            engine = Engine.build(asked, registry_for(asked), grammars=True)
            prompts.append(PromptEncoder.load(engine.facts, asked))
            return OpenRequests(engine, prompts[0].tokenizer)

        self._thread = EngineThread(build)
        self.facts = self._thread.facts
        self._prompts, self.tokenizer = prompts[0], prompts[0].tokenizer
        self._numbers = itertools.count()
        self._names: dict[str, str] = {}  # of the requests that have an id, as the thread knows them
        self._aborted: set[str] = set()  # of these names
        thread = self._thread

        def close() -> None:
            thread.close()
            prompts[0].close()

        self._closing = weakref.finalize(self, close)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Free weights and KV memory. What is open, and what comes later, raises `EnginError`."""
        await asyncio.to_thread(self._closing)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without `params` samples by; see `LLM.get_default_sampling_params`."""
        return self._prompts.params(None)

    async def generate(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Generation:
        """Answer one prompt: text, a list of token ids, or the messages of a chat. For many, gather many calls.

        request_id: for `abort`; then what there is comes back, with that reason. Raises `RequestError` when it cannot be served.
        """
        asked = self._prompts.params(params)
        completions: list[list[GenerationDelta]] = [[] for _ in range(asked.n)]
        with self._named(request_id) as name:
            encoded = await self._encode(prompt)
            async with aclosing(self._stream(name, encoded, asked)) as deltas:
                async for delta in deltas:
                    completions[delta.index].append(delta)
        return generation(encoded.ids, completions)

    async def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Answer one prompt as `generate` does, and give its tokens as they come. Closing it ends the request."""
        asked = self._prompts.params(params)
        with self._named(request_id) as name:
            async with aclosing(self._stream(name, await self._encode(prompt), asked)) as deltas:
                async for delta in deltas:
                    yield delta

    async def embed(self, prompt: Prompt | Messages, *, normalize: bool = True) -> Embedding:
        """The hidden state of one prompt's last token; see `LLM.embed`. For many, gather many calls."""
        self._prompts.check_pooling()
        with self._named(None) as name:
            encoded = await self._encode(prompt)
            async with aclosing(self._stream(name, encoded, EMBEDDED, embed=True)) as deltas:
                found = [delta async for delta in deltas]
        return embedding(encoded.ids, found[0].embedding, normalize=normalize)

    def abort(self, request_id: str) -> None:
        """End a request of that id, from any thread; whoever waits for it gets what there is. Others are not touched."""
        if (name := self._names.get(request_id)) is not None:
            self._aborted.add(name)  # should its prompt be encoded still
            self._thread.abort(name)

    @contextmanager
    def _named(self, request_id: str | None) -> Iterator[str]:
        """What the thread calls a request. Raises `RequestError` for an id in use, `EnginError` where the engine is gone."""
        self._thread.check()
        if request_id in self._names:
            raise RequestError(f"the request_id {request_id!r} is in use; choose another", param="request_id")
        name = str(next(self._numbers))
        if request_id is not None:
            self._names[request_id] = name
        try:
            yield name
        finally:
            if request_id is not None:
                del self._names[request_id]
            self._aborted.discard(name)

    async def _encode(self, prompt: Prompt | Messages) -> Encoded:
        return await asyncio.to_thread(self._prompts.encode_any, prompt)  # a template may take seconds

    async def _stream(
        self, name: str, encoded: Encoded, params: SamplingParams, *, embed: bool = False
    ) -> AsyncGenerator[GenerationDelta, None]:
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[GenerationDelta | EnginError]()

        def tell(told: GenerationDelta | EnginError) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, told)

        self._thread.submit(name, encoded, params, tell=tell, embed=embed)
        if name in self._aborted:
            self._thread.abort(name)
        num_open = params.n
        try:
            while num_open:
                told = await inbox.get()
                if isinstance(told, EnginError):
                    num_open = 0
                    raise told
                num_open -= told.finish_reason is not None
                yield told
        finally:
            if num_open:
                self._thread.abort(name)
