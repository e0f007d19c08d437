"""What a completed step adds to a request: its tokens until the one that ends it, and what is reported beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from enginery.contracts.request import FinishReason, RequestOutput, TokenLogprob
from enginery.contracts.step import StepOutput
from enginery.schedule.request import Request


def note_prompt(request: Request, start: int, logprobs: Sequence[TokenLogprob]) -> None:
    """Keep what a chunk from `start` on says of its prompt, until the first token goes out."""
    if request.wants_prompt_logits:
        if start == 0:
            request.prompt_logprobs = [None]
        request.prompt_logprobs += logprobs


def take_in(
    request: Request, index: int, output: StepOutput, refused: Mapping[int, str], *, end: int, num_drafts: int
) -> RequestOutput | None:
    """Append what item `index` of a step sampled, and let the grammar take it. None: it sampled nothing.

    refused: items whose grammars could not go on, and why. end: the position behind the item's tokens. num_drafts: how many of
    these, the last ones, were guessed. With a `finish_reason` or an `error` the request is to be ended; tokens behind its end are
    dropped.
    """
    if index in output.failed:
        return RequestOutput(request_id=request.request_id, error=output.failed[index])
    told, most, kv = output.token_ids[index], num_drafts, request.kv
    kv.num_written = end
    if num_drafts:
        num_wrong = num_drafts + 1 - len(told)  # of its last drafts: what was computed of them is computed again
        request.num_computed -= num_wrong
        request.num_expected -= num_wrong
        kv.num_written -= num_wrong
        kv.ready = min(kv.ready, request.num_computed)
        room = request.limit - len(request.token_ids)
        told, most = told[:room], min(num_drafts, room - 1)  # guesses behind its limit are neither right nor wrong
    if index in refused:
        return RequestOutput(request_id=request.request_id, error=refused[index], param="grammar")
    added = _append(request, index, told, output, num_drafts=most) if told else None
    if num_drafts:
        kv.num_written = min(kv.num_written, len(request.token_ids))  # it may have ended amid its drafts
    return added


def _append(request: Request, index: int, told: tuple[int, ...], output: StepOutput, *, num_drafts: int) -> RequestOutput:
    count, reason, token_id = _taken_at_once(request, told), None, told[0]
    for token_id in told[count:]:
        if request.grammar is not None and not request.grammar.accept(token_id):
            error = f"the grammar does not take the token {token_id} that was sampled under its mask; it may be too wide there"
            return RequestOutput(request_id=request.request_id, token_ids=told[:count], error=error, param="grammar")
        request.token_ids.append(token_id)
        count += 1
        if (reason := _finish_reason(request, token_id)) is not None:
            break
    is_whole = count == len(told)  # else guesses behind its end are neither right nor wrong
    stop_token_id = token_id if reason is FinishReason.STOP and token_id in request.stop_ids else None
    prompt, request.prompt_logprobs = request.prompt_logprobs, []
    logprobs = output.logprobs.get(index)
    return RequestOutput(
        request_id=request.request_id,
        token_ids=told[:count],
        logprobs=None if logprobs is None else logprobs[:count],
        prompt_logprobs=tuple(prompt) or None,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_cached_tokens=request.num_cached_tokens,
        num_drafted=(count, num_drafts)[is_whole],
        num_accepted=count - is_whole,  # all but the last one, which nobody guessed
        embedding=output.embeddings.get(index),
        queued_s=request.queued_s or 0.0,
    )


def _taken_at_once(request: Request, told: tuple[int, ...]) -> int:
    """How many of these are appended without a look at each: all, where none can end it, as in nearly all steps; else none."""
    if request.grammar is not None or len(request.token_ids) + len(told) >= request.limit or not request.stop_ids.isdisjoint(told):
        return 0
    request.token_ids.extend(told)
    return len(told)


def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Why the request ends with the token that was just appended. None: it goes on."""
    if request.grammar is not None and request.grammar.is_finished:
        return FinishReason.STOP
    if token_id in request.stop_ids and request.num_output_tokens >= request.asked.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) >= request.limit else None
