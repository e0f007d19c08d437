"""A device that knows nothing but steps and what the worker lays out of them. Memory holds values that stand for a prefix.

Whoever reads what is not its own, or writes what somebody else may still read, is found.
"""

from collections import Counter

from enginery.config.schema import ScheduleSettings
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW
from enginery.kv.finite import FiniteMemory
from enginery.kv.kinds import WindowKind
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import NoPrefixCache, RadixPrefixCache
from enginery.kv.resume import ResumePoints
from enginery.worker.layout import lay_out
from enginery.worker.page_tables import PageTables

from .device import EOS, FCFS, WatchedScheduler


def scheduler_of_kinds(
    settings: ScheduleSettings, *, window=None, window_pages=0, state_pages=None, within_items=False, policy=FCFS
):
    """A scheduler over memory of these kinds. window: in tokens. within_items: states of prompts are kept amid them."""
    allocator, allocators = PageAllocator(settings.num_pages), {}
    kind = None
    if window is not None:
        kind = WindowKind.of(window_pages, window=window, page_size=settings.page_size)
        allocators[WINDOW] = kind.allocator
    states = None
    if state_pages is not None:
        states = allocators[STATE] = PageAllocator(state_pages)
    points = ResumePoints(allocators) if allocators else None
    cache = RadixPrefixCache(settings.page_size, allocator, points) if settings.prefix_cache else NoPrefixCache()
    finite = FiniteMemory(
        settings.page_size,
        cache,
        window=kind,
        states=states,
        largest_chunk=settings.max_batch_tokens,
        within_items=within_items,
    )
    return WatchedScheduler(
        settings, policy, cache=cache, allocator=allocator, finite=finite, eos_token_ids=frozenset({EOS}), clock=lambda: 0.0
    )


class KindsDevice:
    """full, window: by slot; states: by page; the values of a prefix, salt and tokens up to here."""

    def __init__(self, scheduler, settings, *, window=None):
        self.finite, self.cache = scheduler._kv.finite, scheduler._kv.cache
        self.page_size, self.reach = settings.page_size, window
        pages = {FULL: settings.num_pages}
        if window is not None:
            pages[WINDOW] = self.finite.window.allocator.num_pages
        seats = settings.max_batch_requests
        self.tables = PageTables(KVGeometry(pages=pages, page_size=settings.page_size, layers=(), dtype="float32", num_seats=seats))
        self.full, self.window, self.states = {}, {}, {}
        self.written = {}
        self.tokens, self.seen, self.held = {}, Counter(), Counter()

    def values(self, request, tokens):
        value, values = hash(request.asked.cache_salt), []
        for token in tokens:
            value = hash((value, token))
            values.append(value)
        return values

    def launch(self, step, choose):
        """Run it. Returns what it samples."""
        self.tables.take(step.value)
        batch = lay_out(step.value, self.tables)
        full, window = batch.views[FULL], batch.views.get(WINDOW)
        row = 0
        known, shared = [], {*self.cache.pages()}
        for item in step.items:
            tokens = self.tokens.setdefault(item.request, list(item.request.token_ids))
            known.append(self.values(item.request, tokens[: item.start + item.num_tokens]))
        for index, item in enumerate(step.items):
            rows = slice(row, row + item.num_tokens)
            row += item.num_tokens
            for position, full_slot in zip(
                range(item.start, rows.stop - rows.start + item.start), full.slots[rows].tolist(), strict=True
            ):
                assert full_slot // self.page_size not in shared, "a page is written that the prefix tree has"
                self.full[full_slot] = known[index][position]
                self.seen["a shared page was read and not written"] += position < item.request.kv.num_shared
            if window is not None:
                self.window.update(zip(window.slots[rows].tolist(), known[index][item.start :], strict=True))
        for index, item in enumerate(step.items):
            self.check_rows(item, full.page_table_cpu[index].tolist(), known[index])
            if window is not None:
                self.check_window(item, window.page_table_cpu[index].tolist(), int(window.starts_cpu[index]), known[index])
        if self.finite.states is not None:
            self.advance(step, batch.states, known)
        slots = [] if window is None else window.slots.tolist()
        self.written[step.value.number] = slots, [*batch.states.writes_cpu.tolist(), *self.checkpoints(batch.states)]
        sampled = [choose() if item.samples else None for item in step.items]
        for item, token in zip(step.items, sampled, strict=True):
            if token is not None:
                self.tokens[item.request].append(token)
        return sampled

    def spoil(self, step):
        """What a step wrote of windows and states was wrong."""
        slots, states = self.written[step.value.number]
        self.window.update(dict.fromkeys(slots, "spoilt"))
        self.states.update(dict.fromkeys(states, "spoilt"))

    def check_rows(self, item, pages, values):
        for position, value in enumerate(values):
            found = self.full.get(pages[position // self.page_size] * self.page_size + position % self.page_size)
            assert found == value, f"{item.request.request_id} reads keys at {position} that are not its own"

    def check_window(self, item, pages, start, values):
        end = item.start + item.num_tokens
        self.held["window"] = max(self.held["window"], -(-(end - start) // self.page_size))
        for position in range(max(0, item.start - self.reach + 1), end):
            assert position >= start, "a page in reach was given up"
            at = position - start
            found = self.window.get(pages[at // self.page_size] * self.page_size + at % self.page_size)
            assert found == values[position], f"{item.request.request_id} reads a window at {position} that is not its own"

    def checkpoints(self, view):
        """By page, the item whose state it gets, and after how many rows."""
        if view.checkpoints_cpu is None:
            return {}
        rows = view.checkpoint_rows_cpu.tolist()
        return {page: (index, rows[index]) for index, page in enumerate(view.checkpoints_cpu.tolist()) if rows[index]}

    def advance(self, step, view, known):
        reads, writes, checkpoints = view.reads_cpu.tolist(), view.writes_cpu.tolist(), self.checkpoints(view)
        every = [*writes, *checkpoints]
        assert len(set(every)) == len(every), "two rows write one state page"
        assert not {*reads} & {*checkpoints}, "a state is kept where another is read"
        for index, write in enumerate(writes):
            assert all(read != write for other, read in enumerate(reads) if other != index), "a row writes what another reads"
        for item, read, values in zip(step.items, reads, known, strict=True):
            if item.start == 0:
                assert read == self.finite.zero_page
            else:
                assert self.states.get(read) == values[item.start - 1], f"{item.request.request_id} reads another's state"
        for write, values, read in zip(writes, known, reads, strict=True):
            self.states[write] = values[-1]
            self.seen["a state moved"] += read != write and read != self.finite.zero_page
        for page, (index, rows) in checkpoints.items():
            item = step.items[index]
            assert 0 < rows < item.num_tokens, "a state is kept amid an item"
            self.states[page] = known[index][item.start + rows - 1]
            self.seen["a state was kept amid an item"] += 1

    def check_points(self):
        """What can be resumed from holds what its prefix says."""
        if self.cache.points is None:
            return
        for node in self.cache.root.descendants():
            point = node.point
            if point is None or point.is_dropped:
                continue
            self.seen["points"] += 1
            path, at = b"", node
            while at.parent is not None:
                path, top, at = at.tokens + path, at, at.parent
            salt = top.branch[: len(top.branch) - 4 * self.page_size].decode()
            value, values = hash(salt), []
            for token in memoryview(path).cast("i").tolist():
                value = hash((value, token))
                values.append(value)
            if self.finite.states is not None:
                assert self.states.get(point.pages[STATE][0]) == values[-1], "a resume point has another's state"
            if self.finite.window is not None:
                pages = point.pages[WINDOW]
                first = point.position - len(pages) * self.page_size
                found = [self.window.get(page * self.page_size + at) for page in pages for at in range(self.page_size)]
                assert found == values[first:], "a resume point has another's window"
