"""Prints docs/reference.md, what plugins may import: `python docs/make_reference_page.py > docs/reference.md`. Runs no module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).parents[1] / "core" / "enginery"
HEAD = """\
# Reference

What a plugin may import: `enginery.api` anywhere, `enginery.nn` where it computes, `enginery.attention.wrapper` where it wraps a
backend, `enginery.testing` in its tests. `docs/make_reference_page.py` makes this page from the sources; a test fails when it is
out of date. Letters for the dims of tensors are explained at the head of each module. A class `# by keyword` takes its fields by
name alone: `Tool(name="add")`. How long a name stays is in [versions](versions.md).
"""
NN = (
    "decoder",
    "next_token",
    "attention",
    "latent_attention",
    "moe",
    "recurrent",
    "channel_delta",
    "norm",
    "activation",
    "rotary",
    "parallel",
    "stored",
    "reference_ops",
    "op_cases",
)
TESTING = ("suite", "fixtures", "kits.ops", "kits.models", "kits.parsers", "kits.checks", "report", "kits.ranks", "kits.weights")

CALLED = ("__init__", "__call__")  # of a class, what its name and its objects are called with

Def = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(module: str) -> ast.Module | None:
    """The tree of `enginery.MODULE`; None if there is no such file."""
    path = CORE.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text()) if path.exists() else None


def exported() -> dict[str, list[str]]:
    """The names of `enginery.api`, by the module that defines them, in the order of the imports."""
    tree = parsed("api")
    assert tree is not None
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("enginery."):
            found.setdefault(node.module.removeprefix("enginery."), []).extend(alias.name for alias in node.names)
    return found


def public(tree: ast.Module) -> list[str]:
    """The names of classes and functions of a module without an underscore."""
    return [node.name for node in tree.body if isinstance(node, Def | ast.ClassDef) and not node.name.startswith("_")]


def text_of(node: Def | ast.ClassDef | ast.Module, indent: str = "") -> str:
    """The docstring, with its drawings as they are."""
    lines = (ast.get_docstring(node) or "").splitlines()
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def signature(function: Def, *, is_method: bool = False) -> str:
    """`name(arguments) -> result`, without self."""
    arguments = function.args
    if is_method and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    prefix = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    return f"{prefix}{function.name}({ast.unparse(arguments)}){returns}"


def members(node: ast.ClassDef) -> Iterator[str]:
    """Fields, then methods, as lines of code with their docstrings."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            yield f"{ast.unparse(item)}\n"
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name) and item.targets[0].id.isupper():
            yield f"{ast.unparse(item)}\n"
    for item in node.body:
        if isinstance(item, Def) and (item.name in CALLED or not item.name.startswith("_")):
            marks = {ast.unparse(each).split("(")[0] for each in item.decorator_list}
            kind = "property " if "property" in marks else "classmethod " if "classmethod" in marks else ""
            text = text_of(item, "    ")
            yield f"{kind}{signature(item, is_method='staticmethod' not in marks)}\n" + (f"{text}\n" if text else "")


def by_keyword(node: ast.ClassDef) -> bool:
    """Whether a dataclass takes its fields by name alone."""
    calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
    return any((each.arg, ast.unparse(each.value)) == ("kw_only", "True") for call in calls for each in call.keywords)


def entry(name: str, tree: ast.Module) -> str:
    """The section of one name."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
            code, mark = "".join(members(node)), "  # by keyword" if by_keyword(node) else ""
            return f"### {name}\n\n{text_of(node)}\n\n```text\nclass {name}{bases}{mark}\n{code}```\n"
        if isinstance(node, Def) and node.name == name:
            return f"### {name}\n\n{text_of(node)}\n\n```text\n{signature(node)}\n```\n"
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return f"### {name}\n\n```text\n{ast.unparse(node)}\n```\n"
    raise LookupError(f"{name} is exported and defined nowhere")


def page() -> Iterator[str]:
    """The parts of the page."""
    yield HEAD
    for module, names in exported().items():
        tree = parsed(module)
        assert tree is not None, module
        yield f"## enginery.api, from {module}\n\n{text_of(tree)}\n"
        yield from (entry(name, tree) for name in names)
    for module in (*(f"nn.{name}" for name in NN), "attention.wrapper", *(f"testing.{name}" for name in TESTING)):
        tree = parsed(module)
        if tree is not None and (names := public(tree)):
            yield f"## enginery.{module}\n\n{text_of(tree)}\n"
            yield from (entry(name, tree) for name in names)


if __name__ == "__main__":
    print("\n".join(page()), end="")
