"""Measures how readable the core is: sizes, types, docstrings, complexity, rooms. `python tests/meta/house.py` prints the table;
with a folder behind it, that of the modules there.

`test_house.py` holds the limits. Frames and types of a step are measured there too, for they need an engine that runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

CORE = Path(__file__).parents[2] / "core" / "enginery"
APART = ("testing", "bench", "serve", "cli")  # rooms that stand beside the engine and are counted on their own
ENTRANCES = ("__init__", "__main__")  # import anything, lazily; no room imports them
LONG_FUNCTION = 40
COMPLEX = 11
SHORT_DOCSTRING_WORDS = 3

Def = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert)


@dataclass(frozen=True)
class Function:
    """One function or method. place: `file:Class.name`. public: neither it nor what it is in has a leading underscore."""

    place: str
    lines: int
    complexity: int
    typed: bool
    public: bool


@dataclass(frozen=True)
class House:
    """What `measure` found. short_docstrings and modules: by place and by folder. cycles: rooms that import each other."""

    lines: dict[str, int]
    functions: tuple[Function, ...]
    public_definitions: int
    documented: int
    short_docstrings: tuple[str, ...]
    num_any: dict[str, int]
    globals_: tuple[str, ...]
    probes: tuple[str, ...]
    modules: dict[str, int]
    cycles: tuple[tuple[str, ...], ...]

    @property
    def complex_functions(self) -> dict[str, int]:
        """The complexity of each function that reaches `COMPLEX`, by place."""
        return {function.place: function.complexity for function in self.functions if function.complexity >= COMPLEX}

    def lines_apart(self, room: str) -> int:
        """Lines of a room that is counted on its own."""
        return sum(count for file, count in self.lines.items() if file.split("/")[0] == room)

    @property
    def engine_lines(self) -> int:
        """Lines of the core without the rooms that are counted apart."""
        return sum(self.lines.values()) - sum(map(self.lines_apart, APART))


def complexity(function: Def) -> int:
    """One, and one more for each branch that the function itself takes; functions inside of it count for themselves."""
    total, todo = 1, list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, Def | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        elif isinstance(node, ast.match_case):
            total += not (isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None)  # `case _` is an else
        todo += ast.iter_child_nodes(node)
    return total


def definitions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, Def | ast.ClassDef]]:
    """Every function and class below `node` with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Def | ast.ClassDef):
            name = f"{owner}.{child.name}".strip(".")
            yield name, child
            yield from definitions(child, name)
        else:
            yield from definitions(child, owner)


def is_typed(function: Def) -> bool:
    """Whether it says what it returns and what each of its parameters is."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return function.returns is not None and all(arg.annotation is not None for arg in every if arg.arg not in ("self", "cls"))


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def probes_in(tree: ast.AST) -> list[int]:
    """Lines with `hasattr(..)`, and `getattr(..)` with a default."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [
        call.lineno
        for call in calls
        if call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) + len(call.keywords) == 3)
    ]


def room_imports(tree: ast.AST, file: str) -> set[str]:
    """The rooms that a file of the core imports, for types too. file: `kv/pool.py`."""
    folder, found = ["enginery", *file.split("/")[:-1]], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            base = [*above, *filter(None, [node.module])]
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return {parts[1] for name in found if (parts := name.split("."))[0] == "enginery" and len(parts) > 1}


def cycles(graph: dict[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """Groups of two or more that reach each other, each sorted."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            if (name := todo.pop()) in graph and name not in seen:
                seen.add(name)
                todo += graph[name]
        return seen

    reached = {name: reach(name) for name in graph}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return tuple(sorted(group for group in groups if len(group) > 1))


def measure(core: Path = CORE) -> House:
    """Parse every module below `core`."""
    lines, functions, short, num_any, globals_, probes = {}, [], [], {}, [], []
    public = documented = 0
    modules: dict[str, int] = {}
    rooms: dict[str, set[str]] = {}
    for path in sorted(core.rglob("*.py")):
        file = path.relative_to(core).as_posix()
        source = path.read_text()
        tree = ast.parse(source)
        lines[file] = source.count("\n")
        folder = path.parent.relative_to(core).as_posix()
        modules[folder] = modules.get(folder, 0) + (path.stem not in ENTRANCES)
        room = file.split("/")[0].removesuffix(".py")
        if room not in ENTRANCES:
            rooms[room] = rooms.get(room, set()) | (room_imports(tree, file) - {room})
        nodes = list(ast.walk(tree))
        if count := sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes):
            num_any[file] = count
        globals_ += [f"{file}:{node.lineno}" for node in nodes if isinstance(node, ast.Global)]
        probes += [f"{file}:{line}" for line in probes_in(tree)]
        for name, node in definitions(tree):
            place, text = f"{file}:{name}", ast.get_docstring(node)
            if is_public(name):
                public, documented = public + 1, documented + bool(text)
            if text and len(text.split()) <= SHORT_DOCSTRING_WORDS:
                short.append(place)
            if isinstance(node, Def):
                size = node.end_lineno - node.lineno + 1
                functions.append(Function(place, size, complexity(node), is_typed(node), is_public(name)))
    return House(
        lines=lines,
        functions=tuple(functions),
        public_definitions=public,
        documented=documented,
        short_docstrings=tuple(short),
        num_any=num_any,
        globals_=tuple(globals_),
        probes=tuple(probes),
        modules=modules,
        cycles=cycles(rooms),
    )


def table(house: House, *, frames: int | None = None, types: int | None = None) -> str:
    """The rows of the table in markdown. frames and types of a step: where somebody has measured them."""
    sizes = [function.lines for function in house.functions]
    typed = sum(function.typed for function in house.functions)
    folder = max(house.modules, key=lambda name: house.modules[name])
    apart = ", ".join(f"{room} {house.lines_apart(room):,}" for room in APART)
    rows = {
        "lines (files) of the core with server, CLI, bench, testing": f"{sum(house.lines.values()):,} ({len(house.lines)})",
        "lines of the engine; beside it": f"{house.engine_lines:,}; {apart}",
        "functions: median / longest": f"{median(sizes):g} / {max(sizes)}",
        f"functions over {LONG_FUNCTION} lines": f"{sum(size > LONG_FUNCTION for size in sizes)} of {len(sizes):,}",
        "typed / public docstrings": f"{100 * typed // len(sizes)} / {100 * house.documented // house.public_definitions} %",
        "`global` / probes": f"{len(house.globals_)} / {len(house.probes)}",
        "package cycles": str(len(house.cycles)),
        "`Any`": str(sum(house.num_any.values())),
        f"functions of cyclomatic complexity >= {COMPLEX}": str(len(house.complex_functions)),
        f"docstrings of {SHORT_DOCSTRING_WORDS} words or fewer": str(len(house.short_docstrings)),
        "most modules in a folder": f"{house.modules[folder]} ({folder})",
        "frames, step to attention backend": "not measured" if frames is None else str(frames),
        "types of which a decoding step makes objects": "not measured" if types is None else str(types),
    }
    return "\n".join(["| | here |", "|---|--:|", *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    found = measure(*map(Path, sys.argv[1:]))
    print(table(found))
    for place, value in sorted(found.complex_functions.items(), key=lambda each: -each[1]):
        print(f"complexity {value}: {place}")
