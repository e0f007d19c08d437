"""A device that knows nothing but steps and what the worker lays out of them. Memory holds values that stand for a prefix.

Whoever reads what is not its own, or writes what somebody else may still read, is found.
"""

from collections import Counter

from integrity import descendants, pages_of

from enginery.config.schema import ScheduleSettings
from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW
from enginery.kv.finite import FiniteMemory
from enginery.kv.kinds import WindowKind
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import NoPrefixCache, RadixPrefixCache
from enginery.kv.resume import ResumePoints
from enginery.worker.layout import drafts_of_items, lay_out
from enginery.worker.page_tables import PageTables

from .device import EOS, FCFS, Told, WatchedScheduler


def scheduler_of_kinds(
    settings: ScheduleSettings, *, window=None, window_pages=0, state_pages=None, within_items=False, policy=FCFS, drafting=None
):
    """A scheduler over memory of these kinds. window: in tokens. within_items: states of prompts are kept amid them. drafting: who
    is asked for guesses."""
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
        settings,
        policy,
        cache=cache,
        allocator=allocator,
        finite=finite,
        eos_token_ids=frozenset({EOS}),
        clock=lambda: 0.0,
        drafting=drafting,
    )


class RandomGuesses:
    """Guesses at random for some of the requests that decode, up to `most` of each."""

    def __init__(self, random, most):
        self.random, self.most = random, most

    def propose(self, table):
        decoding = [request for request in table.running if request.num_left == 1]
        return {request.request_id: drafts for request in decoding if (drafts := self.some())}

    def some(self):
        return [self.random.choice([3, 3, 3, 4, 4, EOS]) for _ in range(self.random.randint(0, self.most))]

    def length(self, requests, num_coming, num_tokens):
        return 0  # nothing is guessed on the device

    def coming(self, requests, num_made):
        return None


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

    def launch(self, step, choose, choose_right=lambda count: count):
        """Run it. Returns what it samples. choose_right: of so many guesses, how many are what it draws."""
        self.tables.take(step.value)
        batch = lay_out(step.value, self.tables)
        full, window = batch.views[FULL], batch.views.get(WINDOW)
        row = 0
        known, shared, drafts = [], {*pages_of(self.cache)}, drafts_of_items(step.value)
        right = {index: choose_right(len(guessed)) for index, guessed in drafts.items()}
        for index, item in enumerate(step.items):
            tokens = self.tokens.setdefault(item.request, list(item.request.token_ids))
            tokens = [*tokens, *drafts.get(index, ())]
            known.append(self.values(item.request, tokens[: item.start + item.num_tokens]))
        for index, (item, count) in enumerate(zip(step.items, step.value.rows.tolist(), strict=True)):
            rows, values = slice(row, row + count), [*known[index][item.start :], *["padding"] * (count - item.num_tokens)]
            row += count
            for position, full_slot, value in zip(
                range(item.start, item.start + count), full.slots[rows].tolist(), values, strict=True
            ):
                assert full_slot // self.page_size not in shared, "a page is written that the prefix tree has"
                self.full[full_slot] = value
                self.seen["a shared page was read and not written"] += position < item.request.kv.num_shared
            if window is not None:
                self.window.update(zip(window.slots[rows].tolist(), values, strict=True))
        for index, item in enumerate(step.items):
            self.check_rows(item, full.page_table_cpu[index].tolist(), known[index])
            if window is not None:
                self.check_window(item, window.page_table_cpu[index].tolist(), int(window.starts_cpu[index]), known[index])
        if self.finite.states is not None:
            self.advance(step, batch.states, known, right)
        slots = [] if window is None else window.slots.tolist()
        self.written[step.value.number] = slots, [*batch.states.writes_cpu.tolist(), *self.checkpoints(batch.states)]
        told = [
            (*drafts.get(index, ())[: right.get(index, 0)], choose()) if item.samples else ()
            for index, item in enumerate(step.items)
        ]
        for item, tokens in zip(step.items, told, strict=True):
            self.tokens[item.request] += tokens
        self.seen["right guesses"] += sum(right.values())
        self.seen["an end amid right guesses"] += sum(EOS in tokens[:-1] for tokens in told)
        self.seen["wrong guesses"] += sum(map(len, drafts.values())) - sum(right.values())
        return Told(told)

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

    def advance(self, step, view, known, right):
        """right: by item, how many of its guesses are; its state goes no further."""
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
        stands = [item.start + 1 + right[index] if index in right else len(known[index]) for index, item in enumerate(step.items)]
        for write, values, read, stop in zip(writes, known, reads, stands, strict=True):
            self.states[write] = values[stop - 1]
            self.seen["a state moved"] += read != write and read != self.finite.zero_page
        for page, (index, rows) in checkpoints.items():
            item = step.items[index]
            assert 0 < rows < item.num_tokens, "a state is kept amid an item"
            self.states[page] = known[index][item.start + rows - 1] if item.start + rows <= stands[index] else "nothing"
            self.seen["a state was kept amid guesses" if index in right else "a state was kept amid an item"] += 1

    def check_points(self):
        """What can be resumed from holds what its prefix says."""
        if self.cache.points is None:
            return
        for node in descendants(self.cache.root):
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
