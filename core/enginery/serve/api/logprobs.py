"""Log-probabilities in the layouts of the two endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from enginery.contracts.request import TokenLogprob
from enginery.serve.schemas.replies import ChatLogprob, ChatLogprobs, LegacyLogprobs, TopLogprob
from enginery.text.tokenizer import Tokenizer


class LegacyLayout:
    """Log-probabilities as /v1/completions tells them: parallel lists. `text_offset` goes on from call to call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def lay_out(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], *, shown: Sequence[bool]
    ) -> LegacyLogprobs:
        """The lists for some tokens. The likeliest tokens always hold the token itself. The first token of a prompt has None.

        shown: which of them the text has; offsets do not count the others. A token within a character has that character's.
        """
        offsets = []
        for token_id, is_shown in zip(token_ids, shown, strict=True):
            offsets.append(self._offset)
            if is_shown:
                self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token_id)))
        return LegacyLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id in token_ids],
            token_logprobs=[None if found is None else found.logprob for found in logprobs],
            top_logprobs=[None if found is None else self._top(found) for found in logprobs],
            text_offset=offsets,
        )

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        likeliest = reversed([*found.top, (found.token_id, found.logprob)])  # of tokens that look alike, the likeliest stays
        return {self._tokenizer.token_text(token_id): logprob for token_id, logprob in likeliest}


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Log-probabilities as /v1/chat/completions tells them: for each token its text, its bytes and the likeliest tokens."""

    def spelt(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=tokenizer.token_text(token_id), logprob=logprob, bytes=list(tokenizer.token_bytes(token_id)))

    content = []
    for found in logprobs:
        top = [spelt(token_id, logprob) for token_id, logprob in found.top]
        own = spelt(found.token_id, found.logprob)
        content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content)


def by_token_id(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None] | None, *, asked: int | None
) -> list[dict[str, object] | None] | msgspec.UnsetType:
    """`prompt_logprobs`: for each token of the prompt the likeliest ones and itself, by id. asked: the field of the body."""
    if asked is None:
        return msgspec.UNSET
    return [
        None
        if found is None
        else {
            str(token_id): {"logprob": logprob, "decoded_token": tokenizer.token_text(token_id)}
            for token_id, logprob in ((found.token_id, found.logprob), *found.top)
        }
        for found in logprobs or ()
    ]
