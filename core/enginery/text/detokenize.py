"""Text of a growing output: characters that span tokens, and stop strings. The pieces put together are the text of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from enginery.contracts.request import SamplingParams
from enginery.text.tokenizer import Tokenizer

_HELD_TOKENS: Final = 32
_INCOMPLETE: Final = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What some tokens added. num_tokens: of those given, how many count; the ones after a stop string do not."""

    text: str
    num_tokens: int
    stopped_by: str | None = None


class CompletionText:
    """The text of one completion, fed with its tokens as they come.

    Splitting the tokens differently over the calls gives the same text and stops at the same token. A token costs a decode of a few
    tokens, whatever the length of the output; where the tokenizer `cleans_up`, there is no text before the end.
    after: the prompt's last token, where a blank behind it is to stay.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, after: Sequence[int] = ()) -> None:
        self._pieces = _Pieces(tokenizer, skip_special_tokens=params.skip_special_tokens, after=after)
        self._stops = StopStrings(params.stop, include_stop=params.include_stop)
        self._min_tokens, self._include_stop = params.min_tokens, params.include_stop
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int], *, finished: bool, stop_token_id: int | None = None) -> TextDelta:
        """Text that is final now. finished: nothing follows, so nothing is held back.

        stop_token_id: the token that ended the output; as the last of `token_ids` it counts but adds no text, unless the request
        includes its stops. After a delta with `stopped_by` nothing may be fed.
        """
        hides_last = not self._include_stop and tuple(token_ids[-1:]) == (stop_token_id,)
        texts = []
        for place, token_id in enumerate(token_ids):
            is_last = place == len(token_ids) - 1
            raw = "" if is_last and hides_last else self._pieces.add(token_id)
            raw += self._pieces.rest() if is_last and finished else ""
            self._num_tokens += 1
            text, stopped_by = self._stops.add(raw, may_stop=self._num_tokens >= self._min_tokens)
            texts.append(text)
            if stopped_by is not None:
                return TextDelta(text="".join(texts), num_tokens=place + 1, stopped_by=stopped_by)
        stopped_by = None
        if finished:
            text, stopped_by = self._stops.add(self._pieces.rest(), may_stop=self._num_tokens >= self._min_tokens)
            texts += [text, "" if stopped_by else self._stops.rest()]
        return TextDelta(text="".join(texts), num_tokens=len(token_ids), stopped_by=stopped_by)


class StopStrings:
    """Finds the stop string that is complete first, and holds back what may still become one."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def add(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text that is final, the stop string that ended it). may_stop False: a stop string that ends in `text` is plain text."""
        if not self._stops or not text:
            return text, None
        old = len(self._held)
        self._held += text
        places = {stop: self._held.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops}  # those that end in `text`
        found = [(place + len(stop), -len(stop), stop) for stop, place in places.items() if place >= 0]
        if found and may_stop:
            end, minus_length, stop = min(found)
            return self._held[: end if self._include_stop else end + minus_length], stop
        start = self._first_that_may_stop()
        final, self._held = self._held[:start], self._held[start:]
        return final, None

    def rest(self) -> str:
        """What was held back and did not become a stop string."""
        final, self._held = self._held, ""
        return final

    def _first_that_may_stop(self) -> int:
        """Where in the held text a stop string may have begun; its length if nowhere."""
        first = max(0, len(self._held) - self._longest + 1)
        endings = ((place, self._held[place:]) for place in range(first, len(self._held)))
        may_begin = (place for place, text in endings for stop in self._stops if stop.startswith(text) and stop != text)
        return next(may_begin, len(self._held))


class _Pieces:
    """Decodes a window of tokens instead of all of them.

        ids    a b c d e f g        emitted: the text up to `read`
                   ^     ^          new text: decode(ids[window:]) less decode(ids[window:read])
                 window read

    The window begins a few tokens early, since decoders treat the first token of a text differently. What may change with the next
    token stays pending: half a character, and a run of bytes, which is good or bad as a whole. After `_HELD_TOKENS` it is let go.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [token for token in after if tokenizer.is_token(token) and token not in tokenizer.special_ids]
        self._read, self._base = len(self._ids), self._decode(self._ids)

    def add(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if (self._skip_special_tokens and token_id in tokenizer.special_ids) or not tokenizer.is_token(token_id):
            return ""
        self._ids.append(token_id)
        if tokenizer.cleans_up:
            return ""
        num_pending = len(self._ids) - self._read
        if tokenizer.is_byte(token_id) and num_pending < _HELD_TOKENS:
            return ""
        text = self._text()
        if not text.endswith(_INCOMPLETE):
            return self._advance(text, len(self._ids))
        return self._advance_in_part(text) if num_pending >= _HELD_TOKENS else ""

    def rest(self) -> str:
        return self._advance(self._text(), len(self._ids))

    def _text(self) -> str:
        """Of the window. If a run of bytes became bad after its beginning was let go of, the window begins where that ended."""
        text = self._decode(self._ids)
        if not text.startswith(self._base):
            self._ids, self._read, self._base = self._ids[self._read :], 0, ""
            text = self._decode(self._ids)
        return text

    def _advance_in_part(self, text: str) -> str:
        """Let go of what is before half a character (at most four bytes), or of a boundary that what follows does not change."""
        for end in range(len(self._ids) - 1, self._read, -1):
            part, is_near = self._decode(self._ids[:end]), end > len(self._ids) - 4
            is_final = not part.endswith(_INCOMPLETE) if is_near else text.startswith(part)
            if is_final and part.startswith(self._base):
                return self._advance(part, end)
        return ""

    def _advance(self, text: str, end: int) -> str:
        new = text[len(self._base) :]
        self._ids = self._ids[self._read :]
        self._read = end - self._read
        self._base = self._decode(self._ids[: self._read])
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
