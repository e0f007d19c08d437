"""The numbers that pages state are those of the code, and no page states one that is neither checked here nor measured.

A claim is a piece of a page's text, with the place of a constant in the code where the number stands: `{file:NAME}`, and the unit.
"""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FILES = {
    "background_output": "core/enginery/serve/background_output.py",
    "bodies": "core/enginery/serve/http/body_limits.py",
    "client": "core/enginery/serve/engine/client.py",
    "completions": "core/enginery/serve/schemas/completions.py",
    "connection": "core/enginery/serve/http/connection.py",
    "corpus": "plugins/enginery-weights-tiny/training/tiny/corpus.py",
    "decoding": "core/enginery/serve/schemas/body_decoding.py",
    "engine": "core/enginery/engine/engine.py",
    "memory_plan": "core/enginery/worker/memory_plan.py",
    "grammar_budget": "core/enginery/engine/grammar_budget.py",
    "grammar_lanes": "core/enginery/engine/grammar_lanes.py",
    "grammar_queue": "core/enginery/engine/grammar_queue.py",
    "grammars": "core/enginery/contracts/grammars.py",
    "publisher": "core/enginery/engine/kv_events/publisher.py",
    "listening": "core/enginery/serve/http/listening.py",
    "process": "core/enginery/serve/engine/process.py",
    "replay": "core/enginery/engine/replay.py",
    "request": "core/enginery/contracts/request.py",
    "mixed_graphs": "core/enginery/worker/paths/mixed_graphs.py",
    "resolve": "core/enginery/config/resolve.py",
    "schema": "core/enginery/config/schema.py",
    "settings": "core/enginery/serve/settings.py",
    "start_display": "core/enginery/serve/start_display.py",
    "template_process": "core/enginery/text/template_process.py",
    "templating": "core/enginery/serve/api/chat_templates.py",
    "test_budgets": "tests/meta/test_budgets.py",
    "test_house": "tests/meta/test_house.py",
}
CLAIMS: dict[str, list[str]] = {
    "README.md": [
        "is under {test_budgets:CORE_LINES} lines, the HTTP server under {test_budgets:APART.serve};",
    ],
    "CONTRIBUTING.md": [],
    "docs/design.md": ["No folder has more than {test_house:MOST_MODULES} modules."],
    "docs/how-a-request-runs.md": [
        "Other steps of up to {resolve:MAX_PIECE_TOKENS} tokens",
        "a prompt of more than {mixed_graphs:MOST_KEYS} keys",
        "({mixed_graphs:MOST_ABSORBED} where layers are MLA",
    ],
    "docs/write-a-backend.md": [],
    "docs/write-a-plugin.md": [],
    "docs/quickstart.md": ["recommends, up to {request:SamplingParams.max_tokens} tokens"],
    "docs/hooks.md": [
        "of up to {mixed_graphs:MOST_ABSORBED} keys each",
        "a source of at most {grammars:MAX_SOURCE_BYTES Ki} KiB",
        "with a stack of {grammar_lanes:_STACK_BYTES Mi} MiB",
        "or later `finish`, has taken {grammar_queue:COMPILE_S} s",
        "gets no thread within {grammar_queue:QUEUE_S} s",
        r"There are {grammar_queue:/Lane\((\d+), .grammar.\)/} threads",
        r"called on one of {grammar_queue:/Lane\((\d+), .long-grammar.\)/} other threads",
        "The {grammar_queue:MAX_CACHED} grammars used last",
        "more than {grammar_budget:TOKEN_S ms} ms of processor time for each token",
        "with {grammar_budget:SPARE_S ms} ms to spare",
    ],
    "docs/api.md": [
        "`n` up to {request:MAX_COMPLETIONS}, `stop` up to {request:MAX_STOP_STRINGS} strings",
        "log-probabilities of up to {request:MAX_TOP_LOGPROBS} tokens, up to {completions:MAX_PROMPTS} completions of one request",
        "up to {bodies:_LEAST_BYTES Mi} MiB and {bodies:_BYTES_PER_TOKEN} bytes for each token of the context",
        "{bodies:_MOST_BYTES Mi} MiB at the most (`--max-body-bytes`",
        "with up to {decoding:MAX_VALUES} texts (names too), arrays and objects and {decoding:MAX_NUMBERS} numbers of up to "
        "{decoding:MAX_DIGITS} digits",
    ],
    "docs/tiny-model.md": ["One key in {corpus:HELD_OUT}, by a hash"],
    "docs/operations.md": [
        "{memory_plan:NCCL_BYTES Mi} MiB of it are left for NCCL",
        "| {settings:ServeSettings.host}, {settings:ServeSettings.port plain} | The only port.",
        "`number, batch` for each of the last {publisher:MOST_KEPT} batches",
        "one after more than {publisher:MOST_WAITING} steps waited to be published",
        "| `--drain-s` | {settings:ServeSettings.drain_s} |",
        "| `--watchdog-s` | {settings:ServeSettings.watchdog_s} |",
        "| `--receive-s` | {connection:Limits.receive_s} |",
        "| `--send-s` | {connection:Limits.send_s} |",
        "{bodies:_LEAST_BYTES Mi} MiB + {bodies:_BYTES_PER_TOKEN} \u00d7 context, at most {bodies:_MOST_BYTES Mi} MiB |",
        "| {bodies:_TOTAL} \u00d7 that | Of all requests",
        "being answered, without the first {bodies:_FREE_BYTES Ki} KiB of each",
        "| `--max-queued-requests` | {schema:EngineOptions.max_queued_requests plain} |",
        "A body has at most {decoding:MAX_VALUES} texts, arrays and objects, and {decoding:MAX_NUMBERS} numbers",
        "in at most {connection:_MAX_PIECES} chunks",
        "A head has at most {connection:Limits.header_bytes Ki} KiB",
        "At most {connection:Limits.num_connections} connections are open",
        "The kernel keeps {listening:_SEND_BYTES Ki} KiB for a slow reader",
        "but to {listening:_ENOUGH} at most",
        "The rest is for connections, {connection:Limits.num_connections} at most",
        "Up to {background_output:_MAX_BYTES Mi} MiB may wait",
        "in a new line every {start_display:EVERY_S} seconds",
        "Another {listening:BEYOND} connections may be open",
        "the oldest of the {listening:BEYOND} is",
        "The engine reports every {process:_HEARTBEAT_S} s",
        "ends when {engine:MAX_FAILED_STEPS} steps in a row fail",
        "no thread to be compiled on for {grammar_queue:QUEUE_S} s |",
        "head over {connection:Limits.header_bytes Ki} KiB,",
        "bodies up to {bodies:_FREE_BYTES Ki} KiB are served meanwhile",
        "more than {template_process:Limits.cpu_s} s of processor time, or {template_process:Limits.memory_bytes Gi} GiB |",
        "up to {template_process:Limits.cpu_s} s of processor time for each",
        "does not answer for {template_process:Limits.wall_s} s |",
        "as soon as one waits for {templating:_LATE_S} s",
        "while a step takes over {client:_ANSWER_S} s |",
        "Up to {replay:TOLERANCES.float32} is allowed in float32, and up to {replay:ROUNDED} in bfloat16 and float16",
    ],
}
# Numbers that are no property of the code: versions of others, and what was measured. Digits alone are not looked at.
OTHERS: dict[str, set[str]] = {
    "README.md": {"3.11", "0.9"},
    "CONTRIBUTING.md": {"60"},  # seconds that a test may take on idle cores; pyproject.toml has room for busy ones
    "docs/write-a-backend.md": {"150"},  # lines, see tests/core/plugin/test_write_a_backend.py
    "docs/quickstart.md": {"3.11", "0.9", "2.11", "3.6", "3.7", "2.13"},
    "docs/tiny-model.md": {
        "4,096",
        "999",
        "12",
        "4.3",
        "5.0",
        "128",
        "32",
        "1.93",
        "2.80",
        "3.65",
        "4.35",
        "1.89",
        "2.66",
        "3.20",
        "3.57",
        *("0.6", "3.56", "3.64", "3.21", "3.25", "4.81", "4.74", "3.84", "3.82", "4.86", "4.80", "3.92", "3.96"),  # sampled drafts
        *(
            "3.85",
            "2.89",
            "3.71",
            "4.50",
            "4.88",
            "2.79",
            "3.45",
            "4.17",
            "2.91",
            "3.76",
            "4.58",
            "2.84",
            "3.49",
            "3.91",
            "4.23",
            "4.89",
        ),
    },
    # In an error message of another engine; calls a step in the deepest nest; the size of a packed step, measured.
    "docs/design.md": {"800", "8218", "14", "10", "256"},
    "docs/operations.md": {"17"},  # a step in an example
}
GENERATED = {"docs/api.md"}  # its tables are made from the schemas
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "ms": 0.001}
OPERATORS = {ast.LShift: operator.lshift, ast.Mult: operator.mul, ast.Pow: operator.pow, ast.USub: operator.neg}
STATUSES = {"200", "400", "401", "404", "408", "413", "429", "431", "499", "500", "503"}


def value_of(node: ast.expr) -> object:
    """A constant, products and powers of two of such, and the values of a dictionary by their keys."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(key): value_of(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def constant(place: str, root: Path = ROOT) -> object:
    """What `file.py:NAME`, or `file.py:Class.field`, is assigned in the source, or the number that `file.py:/pattern/` finds there.

    Nothing is imported, so that private names and heavy modules can be looked up.
    """
    file, _, dotted = place.partition(":")
    if dotted.startswith("/"):
        (number,) = re.findall(dotted.strip("/"), (root / file).read_text())
        return int(number)
    first, _, rest = dotted.partition(".")
    body = ast.parse((root / file).read_text()).body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == first:
            return assigned(node.body, rest, place)
    found = assigned(body, first, place)
    return found[rest] if rest else found


def assigned(body: list[ast.stmt], name: str, place: str) -> object:
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets) and node.value is not None:
            return value_of(node.value)
    raise AssertionError(f"{place} is gone; where is it now?")


def shown(place_and_unit: str) -> str:
    """The number as a page writes it."""
    place, unit = (place_and_unit, "") if place_and_unit.endswith("/") else place_and_unit.partition(" ")[::2]
    file, _, dotted = place.partition(":")
    value = constant(f"{FILES[file]}:{dotted}")
    if isinstance(value, str) or unit == "plain":
        return str(value)
    number = round(value / UNITS.get(unit, 1), 6)
    return f"{number:,.0f}" if number == int(number) else f"{number:,}"


def stated(claim: str) -> str:
    """The text that the page must have."""
    return re.sub(r"\{([^}]+)\}", lambda found: shown(found[1]), claim)


def plain(text: str) -> str:
    """A page in one line for each paragraph, so that line breaks do not matter."""
    return re.sub(r"\s+", " ", text)


def unexplained(text: str, claims: list[str], others: set[str]) -> list[str]:
    """Numbers of two digits and more in the prose of a page that no claim covers. Those in code are not looked at."""
    text = re.sub(r"^```.*?^```$|<!-- (sizes|results):.*?<!-- end of \1 -->|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = plain(text)
    for claim in claims:
        text = text.replace(claim, " ")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    return [number for number in re.findall(r"(?<![\w.#-])\d[\d,.]*\d\b(?![-\w])", text) if number not in STATUSES | others]


@pytest.mark.parametrize(("page", "claim"), [(page, claim) for page, claims in CLAIMS.items() for claim in claims])
def test_a_number_is_the_codes(page: str, claim: str) -> None:
    assert stated(claim) in plain((ROOT / page).read_text())


@pytest.mark.parametrize("page", [page for page in CLAIMS if page not in GENERATED])
def test_no_number_is_unchecked(page: str) -> None:
    claims = [stated(claim) for claim in CLAIMS[page]]
    assert unexplained((ROOT / page).read_text(), claims, OTHERS.get(page, set())) == []


def test_constants_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("SIZE: Final = 3 << 10\nLIMITS = {'a': 2 * 5}\nclass A:\n    wait_s: float = 0.25\nf(7, 'x')\n")
    places = ("a.py:SIZE", "a.py:LIMITS.a", "a.py:A.wait_s", r"a.py:/f\((\d+)/")
    assert [constant(place, tmp_path) for place in places] == [3072, 10, 0.25, 7]
    with pytest.raises(AssertionError, match=r"a\.py:GONE is gone"):
        constant("a.py:GONE", tmp_path)


def test_numbers_that_nobody_checks_are_reported() -> None:
    page = "## 12. A\n\n```sh\nrun 77\n```\nAt most 4,096 of `x=99`, and\n64 KiB, see [b](c.md#5-the-22). 503, 3 of 17.\n"
    assert unexplained(page, ["At most 4,096 of"], {"17"}) == ["12", "64"]
