"""How one step is chosen. Decoding requests first, then prompt chunks, under a token budget.

Rules that keep everybody moving:

- All requests stand in one order that never changes (the policy's, see `WaitingQueue`). The first of those running can always go
  on: to give it pages, those last in order are preempted, that is they wait again at their place and are recomputed. Nobody makes
  an earlier one leave; who finds no page and is last itself sits out the step and keeps its pages.
- Waiting requests are admitted in order and nobody passes the head. It is admitted when the pages for all of its known tokens are
  there, of each kind of memory what it needs at once, besides those promised to the prompts in progress and `HEADROOM_TOKENS` for
  each running request: so a preempted request does not come back only to be preempted again. When nothing runs, the head always
  fits.
- A step that decodes takes a part of the prompt tokens that wait, `ScheduleSettings.prefill_fraction`, so that few prompts do not
  hold up many streams; the more wait, the more it takes. Where that is less than makes `MIXED_ROWS` with the rows that decode,
  prompts go in the fewest steps of up to so many, and each takes an equal part. And it takes as many as make whole tiles of
  `TILE_ROWS`: products are computed by such, and steps of few tokens are padded to them, or to half of one.
- A waiting request whose next page is just being computed for another one waits for that instead of computing it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from enginery.config.schema import ScheduleSettings
from enginery.contracts.drafting import ON_DEVICE
from enginery.kv.kinds import NOTHING, Demand
from enginery.schedule.request import Request, RequestStatus
from enginery.schedule.step import StepBuilder
from enginery.schedule.table import RequestTable

HEADROOM_TOKENS = 32
MIXED_ROWS = 512  # a step of so many is compute-bound on a large GPU, twice over, and takes the least for each
MIN_PREFILL_TOKENS = 256  # beside however many that decode
TILE_ROWS = 128
NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})


class BatchPlanner:
    """One step in the making. Use it once: `BatchPlanner(...).fill()`.

    preempted: ids of those that wait again now, or will when the steps they are in have completed, this one perhaps.
    """

    def __init__(self, table: RequestTable, settings: ScheduleSettings, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> None:
        """drafts: guesses at the next tokens of requests, by their ids, while no step is in flight."""
        self._drafts = drafts
        self._table = table
        self._kv = table.kv
        self._settings = settings
        self._budget = settings.max_batch_tokens
        self._step = StepBuilder(has_states=table.kv.finite.states is not None)
        self.preempted: list[str] = []

    def fill(self) -> StepBuilder:
        """Choose, and move the chosen requests on."""
        prompts = self._schedule_verifications() if self._drafts else self._schedule_decodes()
        self._step.num_decode = len(self._step.requests)
        if num_rows := self._step.num_rows:
            waiting = self._table.waiting.num_tokens + sum(request.num_left for request in prompts)
            wanted = _beside_decoding(waiting, num_rows, fraction=self._settings.prefill_fraction)
            self._budget = min(self._budget, -(-(wanted + num_rows) // TILE_ROWS) * TILE_ROWS - num_rows)
        for request in prompts:
            self._schedule_chunk(request)
        if not self.preempted:
            self._admit(prompts)
        self._kv.finite.step_planned()
        return self._step

    def fill_ahead(self, counts: Sequence[int]) -> StepBuilder | None:
        """Verify so many guesses of each running request behind the step in flight, as if all of that one's were right.

        All of them decode, and the guesses are on the device alone. None, and nothing is changed: rows or free pages are too few.
        """
        running, size, settings = self._table.running, self._kv.page_size, self._settings
        most = min(max(counts), min(self._budget, settings.max_batch_requests) // len(running) - 1)
        stops = [min(request.num_computed + 1 + most, request.limit) for request in running]
        lacking = [-(-stop // size) - len(request.kv.pages) for request, stop in zip(running, stops, strict=True)]
        if most < 1 or sum(count for count in lacking if count > 0) > self._kv.num_available:
            return None
        self._step.decode_len, self._step.num_decode, guesses = 1 + most, len(running), (ON_DEVICE,) * most
        for request, count, stop, num_pages in zip(running, counts, stops, lacking, strict=True):
            if num_pages > 0:
                self._kv.prepare(request.kv, request.num_computed, stop, num_known=request.num_expected)
                self._step.tell_pages(request.kv)
            self._step.add_drafts(request, guesses[:count])
        return self._step

    def _schedule_decodes(self) -> list[Request]:
        """One token for each request that has only its last one to compute. Returns those amid their prompt, in order.

        Where all find budget and pages, those that begin alike stand side by side; else each in its turn, as the last may go.
        """
        prompts: list[Request] = []
        running = self._table.running
        roomy = min(self._budget, self._kv.num_available) >= len(running) and self._kv.finite.is_roomy(len(running))
        turns = list(self._table.side_by_side) if roomy else running  # `running` shrinks meanwhile, but only at its end
        for request in self._in_turn(turns):
            start = request.num_computed
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.num_expected - start > 1:
                prompts.append(request)
            elif not self._budget:
                break
            elif request.num_expected < request.limit and (start < request.kv.ready or self._make_room(request, 1)):
                self._add(request, 1)
        prompts.sort(key=attrgetter("order"))
        return prompts

    def _in_turn(self, running: list[Request]) -> list[Request]:
        """With several stages: those whose tokens are known, and of the decoding ones a stage's part, so that all get some."""
        if self._settings.stages == 1:
            return running
        known = [request for request in running if request.num_computed < len(request.token_ids)]
        decoding = [request for request in known if request.num_left == 1]
        later = set(decoding[-(-len(running) // self._settings.stages) :])
        return [request for request in known if request not in later]

    def _schedule_verifications(self) -> list[Request]:
        """The same, with the drafts that budget and free pages allow. All get as many rows as the one that has most.

        Rows that are sampled are at most `max_batch_requests`, for so many the memory plan has room.
        """
        decoding = [request for request in self._table.running if request.num_left == 1]
        most = max(0, min(self._budget, self._settings.max_batch_requests) // max(len(decoding), 1) - 1)
        size = 0 if self._kv.finite.allocators else self._kv.page_size  # 0: other kinds of memory are asked each time
        chosen: list[tuple[Request, Sequence[int]]] = []
        for request in decoding[: self._budget]:
            if request.status is not RequestStatus.RUNNING:
                continue
            drafts = self._drafts.get(request.request_id, ())
            drafts = drafts[: max(0, min(most, request.limit - len(request.token_ids) - 1))]
            if request.num_computed + 1 + len(drafts) > len(request.kv.pages) * size:
                if not self._find_room(request, 1):
                    continue
                drafts = self._drafts_with_room(request, drafts)
                self._take_pages(request, 1 + len(drafts))
            chosen.append((request, drafts))
        self._add_drafts(chosen)
        return [request for request in self._table.running if request.num_left > 1]

    def _add_drafts(self, chosen: Sequence[tuple[Request, Sequence[int]]]) -> None:
        length = self._step.decode_len = 1 + max((len(drafts) for _, drafts in chosen), default=0)
        self._budget -= length * len(chosen)
        for request, drafts in chosen:
            if length > 1:
                self._step.add_drafts(request, drafts)
            else:
                self._step.add(request, 1)

    def _drafts_with_room(self, request: Request, drafts: Sequence[int]) -> Sequence[int]:
        """Of these those whose pages are there: nobody is preempted for a guess."""
        while drafts and not self._is_room(request, 1 + len(drafts)):
            drafts = drafts[:-1]
        return drafts

    def _schedule_chunk(self, request: Request) -> None:
        if not self._budget or request.status is not RequestStatus.RUNNING:
            return
        start, known = request.num_computed, request.num_expected
        self._kv.finite.forget(request.kv, start)
        num_tokens = min(known - start, self._budget, max(1, self._kv.room(request.kv) - start))
        num_tokens = self._kv.finite.points.cut(request.kv, start, start + num_tokens, num_known=known) - start
        if self._make_room(request, num_tokens):
            self._add(request, num_tokens)

    def _admit(self, prompts: list[Request]) -> None:
        table, headroom = self._table, -(-HEADROOM_TOKENS // self._settings.page_size)
        promised = NOTHING
        for request in prompts:
            promised = promised.plus(self._kv.demand(request.kv, request.num_expected))
        while table.waiting and self._budget and len(table.running) < self._settings.max_batch_requests:
            spare = headroom * len(table.running)
            admitted = table.admit_head(reserved=promised.plus(Demand(spare, spare)))
            if admitted is None:
                break
            self._schedule_chunk(admitted)
            promised = promised.plus(self._kv.demand(admitted.kv, len(admitted.token_ids)))

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Take the pages for its next tokens, preempting later requests if nothing else helps. False: it sits out this step."""
        if not self._find_room(request, num_tokens):
            return False
        self._take_pages(request, num_tokens)
        return True

    def _find_room(self, request: Request, num_tokens: int) -> bool:
        """The same, without taking them."""
        while not self._is_room(request, num_tokens):
            # The pages of a leaving request come back with the step it is in; until then nobody else has to go.
            if self._table.running[-1] is request or self._table.leaving:
                return False
            self.preempted.append(self._table.preempt_last().request_id)
        return True

    def _is_room(self, request: Request, num_tokens: int) -> bool:
        start = request.num_computed
        return self._kv.missing(request.kv, start, start + num_tokens).fits(self._kv.available)

    def _take_pages(self, request: Request, num_tokens: int) -> None:
        """Its next item's, which are there."""
        start = request.num_computed
        self._kv.prepare(request.kv, start, start + num_tokens, num_known=request.num_expected)
        self._step.tell_pages(request.kv)

    def _add(self, request: Request, num_tokens: int) -> None:
        """Schedule its next tokens. It has the pages."""
        self._budget -= num_tokens
        self._step.add(request, num_tokens)


def _beside_decoding(waiting: int, num_rows: int, *, fraction: float) -> int:
    """How many of the prompt tokens that wait join so many rows that decode."""
    room, part = max(MIXED_ROWS - num_rows, MIN_PREFILL_TOKENS), int(waiting * fraction)
    if part > room or not waiting:
        return part
    return -(-waiting // -(-waiting // room))
