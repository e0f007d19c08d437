"""The parsed output of one answer as blocks, one after the other: texts, reasoning and calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from enginery.contracts.parsers import ArgumentsText, ContentText, ParserEvent, ReasoningText, ToolCallBegun
from enginery.serve.schemas.replies import ChatLogprob


class BlockKind(StrEnum):
    """The kinds of content in an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Change(StrEnum):
    """What can happen to a block of an answer."""

    OPEN = "open"
    ADD = "add"
    CLOSE = "close"


@dataclass(kw_only=True)
class Block:
    """One block as it grows. texts, status, logprobs: so far; a call's texts are its arguments. call_id, name: only of a call."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    status: str = "in_progress"
    logprobs: list[ChatLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All texts so far, put together."""
        return "".join(self.texts)


class Blocks:
    """Makes blocks of events. At most one block is open; a text of another kind, or a call, closes it."""

    def __init__(self) -> None:
        self.done: list[Block] = []
        self._open: Block | None = None

    def feed(self, events: Sequence[ParserEvent]) -> Iterator[tuple[Change, Block, str]]:
        """What the events change: the change, its block and, for ADD, the text that was added."""
        for event in events:
            match event:
                case ContentText(text):
                    yield from self._opened(BlockKind.TEXT)
                case ReasoningText(text):
                    yield from self._opened(BlockKind.REASONING)
                case ToolCallBegun(_, call_id, name):
                    yield from self.finish()
                    yield from self._opened(BlockKind.CALL, call_id=call_id, name=name)
                    continue
                case ArgumentsText(_, text):
                    pass
                case _:
                    continue
            assert self._open is not None
            self._open.texts.append(text)
            yield Change.ADD, self._open, text

    def finish(self, status: str = "completed") -> Iterator[tuple[Change, Block, str]]:
        """Close the block that is open, if any, with this status."""
        if self._open is not None:
            block, self._open = self._open, None
            block.status = status
            self.done.append(block)
            yield Change.CLOSE, block, ""

    def _opened(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> Iterator[tuple[Change, Block, str]]:
        if self._open is None or self._open.kind is not kind:
            yield from self.finish()
            self._open = Block(index=len(self.done), kind=kind, call_id=call_id, name=name)
            yield Change.OPEN, self._open, ""
