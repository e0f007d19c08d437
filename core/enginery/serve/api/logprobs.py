"""Log-probabilities in the layouts of the two endpoints."""

from __future__ import annotations

import codecs
import functools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from enginery.contracts.request import TokenLogprob
from enginery.serve.schemas.replies import ChatLogprob, ChatLogprobs, LegacyLogprobs, TopLogprob
from enginery.text.tokenizer import Tokenizer


class LegacyLayout:
    """Log-probabilities as /v1/completions tells them: parallel lists. `text_offset` goes on from call to call.

    skips: special tokens of the answer are in no text. begins: its text begins without the blank of its first token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skips: bool, begins: bool) -> None:
        self._tokenizer, self._skips, self._begins, self._offset = tokenizer, skips, begins, 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def lay_out(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], *, num_echoed: int = 0, text: str = ""
    ) -> LegacyLogprobs:
        """The lists for some tokens. The likeliest tokens always hold the token itself. The first token of a prompt has None.

        num_echoed: so many are the prompt's, whose text is `text`. A token within a character has that character's offset.
        """
        offsets = []
        for place, token_id in enumerate(token_ids):
            self._offset = len(text) if text and place == num_echoed else self._offset
            offsets.append(self._offset)
            self._offset += self._length(token_id, text if place < num_echoed else None)
        return LegacyLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id in token_ids],
            token_logprobs=[None if found is None else found.logprob for found in logprobs],
            top_logprobs=[None if found is None else self._top(found) for found in logprobs],
            text_offset=offsets,
        )

    def _length(self, token_id: int, text: str | None) -> int:
        """How many characters of the text a token ends. text: the prompt's, which may lack special tokens, and blanks of words."""
        chars = self._characters.decode(self._tokenizer.token_bytes(token_id))
        is_special, bare = token_id in self._tokenizer.special_ids, chars.removeprefix(" ")
        if text is not None:
            found = (len(each) for each in (chars, bare) if text.startswith(each, self._offset))
            return next(found, 0 if is_special else len(chars))
        if is_special and self._skips:
            return 0
        begins, self._begins = self._begins, False
        return len(bare if begins and not self._tokenizer.decode([token_id], skip_special_tokens=False).startswith(" ") else chars)

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        likeliest = reversed([*found.top, (found.token_id, found.logprob)])  # of tokens that look alike, the likeliest stays
        return {self._tokenizer.token_text(token_id): logprob for token_id, logprob in likeliest}


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Log-probabilities as /v1/chat/completions tells them: for each token its text, its bytes and the likeliest tokens."""

    @functools.cache
    def spelling(token_id: int) -> tuple[str, list[int]]:
        return tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))

    def spelt(token_id: int, logprob: float) -> TopLogprob:
        token, raw = spelling(token_id)
        return TopLogprob(token=token, logprob=logprob, bytes=raw)

    spelled = [(spelt(found.token_id, found.logprob), [spelt(*each) for each in found.top]) for found in logprobs]
    return ChatLogprobs([ChatLogprob(**msgspec.structs.asdict(own), top_logprobs=top) for own, top in spelled])


def logprobs_of(text: str, left: list[TokenLogprob], tokenizer: Tokenizer) -> list[ChatLogprob]:
    """Those of the last tokens that the text is in; of all where it is half a character's. Taken from `left`, with all before."""
    each, wanted = [tokenizer.token_bytes(found.token_id) for found in left], text.encode(errors="replace")
    begin, ends = b"".join(each).rfind(wanted), list(accumulate(map(len, each)))
    if begin < 0:
        begin, wanted = 0, b"".join(each)
    first, behind = bisect_right(ends, begin), bisect_left(ends, begin + len(wanted)) + 1
    taken, left[:behind] = left[first:behind], []
    return chat_logprobs(tokenizer, taken).content


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
