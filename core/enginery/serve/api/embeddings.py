"""POST /v1/embeddings: the hidden state of a text's last token, after the final norm."""

from __future__ import annotations

import base64
import dataclasses
from array import array
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.contracts.request import of_length_one
from enginery.errors import RequestError
from enginery.serve.api.conversation import naming_fields
from enginery.serve.api.served_model import Job
from enginery.serve.api.service import Heading, Service, large_answer, read_request
from enginery.serve.engine.replicas import Replicas
from enginery.serve.http.event_stream import unless_disconnected
from enginery.serve.http.faults import GenerationFailed
from enginery.serve.schemas.completions import CompletionRequest, Id, Int, NoEffect

_NAMES: Final = {"prompt": "input", "max_tokens": "input"}


class EmbeddingsRequest(NoEffect, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/embeddings. normalize: whether vectors get the length 1; true if left out. dimensions: the model's own number."""

    input: str | list[str | Int | list[Int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    dimensions: Int | None = None
    add_special_tokens: bool | None = None
    cache_salt: Id | None = None


async def embed(service: Service, http: Request) -> Response:
    """The handler of /v1/embeddings. Raises `EnginError`, and `ClientGone` when the client hung up."""
    model = service.model()
    asked = await read_request(http, EmbeddingsRequest)
    name = model.check_name(asked.model)
    model.text.check_pooling()
    prompts = await model.prompts(asked.input, add_special_tokens=asked.add_special_tokens is not False, field="input")
    with naming_fields(_NAMES):
        one = CompletionRequest(prompt="", max_tokens=1, temperature=0.0, cache_salt=asked.cache_salt)
        params = model.params(one, default_max_tokens=1, logprobs=None, prompt_logprobs=None)
        jobs = model.jobs(one, prompts, params, Heading.new("embd", name).id, prompt_only=True)
    found = await unless_disconnected(http.receive, _embeddings(service.engine, jobs))
    if asked.dimensions not in (None, len(found[0])):
        why = f"dimensions is {asked.dimensions}, but embeddings of this model have {len(found[0])}, which are not cut"
        raise RequestError(why, param="dimensions")
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)

    def reply() -> dict[str, object]:
        vectors = found if asked.normalize is False else map(of_length_one, found)
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, asked.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "model": name, "data": data, "usage": usage}

    return await large_answer(model, sum(map(len, found)), reply)


async def _embeddings(engine: Replicas, jobs: Sequence[Job]) -> list[Sequence[float]]:
    found: dict[str, Sequence[float]] = {}
    async with engine.generate([dataclasses.replace(job.request, embed=True) for job in jobs]) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise GenerationFailed(output.error)
            if output.embedding is not None:
                found[output.request_id] = output.embedding
    return [found[job.request.request_id] for job in jobs]


def _written(vector: Sequence[float], encoding: str | None) -> object:
    """A vector as the request wants it: numbers, or the base64 of little-endian float32, which the official client asks for.

    Numbers are JSON already: one vector after the other, so that other threads run in between.
    """
    if encoding == "base64":
        return base64.b64encode(array("f", vector).tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(vector))
