"""`engine new-plugin`: a distribution of a kind of plugin, with tests that pass. The templates are in the folder beside."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from enginery import __version__
from enginery.contracts.versions import CONTRACT_VERSIONS, HookGroup
from enginery.errors import ConfigError
from enginery.plugin import own_parts
from enginery.plugin.groups import GROUPS
from enginery.plugin.near import did_you_mean

_TEMPLATES: Final = Path(__file__).parent / "templates"
_NAME: Final = re.compile(r"(?!.{65})[a-z][a-z0-9]*(-[a-z0-9]+)*")
_OWN_PATHS: Final = ("detokenize", "health", "metrics", "tokenize")  # of the server's routes, those that may be such a name
_LLAMA, _BACKEND = "a plugin that serves `LlamaForCausalLM`", "a plugin with an attention backend for the CPU"
_BESIDE: Final = {"model": (_BACKEND,), "backend": (_LLAMA,), "format": (_LLAMA, _BACKEND), "checkpoint": (_LLAMA, _BACKEND)}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of plugin. prefix: of its distributions. group: of its descriptors, or what stands for one. use: how to use it."""

    prefix: str
    group: HookGroup | str
    summary: str
    use: str


KINDS: Final[Mapping[str, Kind]] = {
    "policy": Kind(
        prefix="policy",
        group=HookGroup.SCHEDULE_POLICY,
        summary="an order among waiting requests",
        use="`engine serve --schedule-policy @name@` uses it.",
    ),
    "observer": Kind(
        prefix="observer",
        group="observer",
        summary="sees what each step did",
        use="It sees every step of every engine from now on.",
    ),
    "route": Kind(
        prefix="route",
        group="routes",
        summary="HTTP routes",
        use="`engine serve` has it at `/@name@`; `-p no:@plugin@` leaves it out.",
    ),
    "command": Kind(prefix="command", group="commands", summary="commands of engine", use="`engine @name@` runs it."),
    "parser": Kind(
        prefix="parser",
        group=HookGroup.PARSER,
        summary="reads tool calls or reasoning from answers",
        use="`engine serve --reasoning-parser @name@` uses it; `auto` does for templates that have its tag.",
    ),
    "op": Kind(
        prefix="ops",
        group=HookGroup.OP,
        summary="faster operations",
        use="`engine test-op @name@` tries it; every model uses what it provides.",
    ),
    "model": Kind(
        prefix="model",
        group=HookGroup.MODEL,
        summary="a model family",
        use="Checkpoints whose config.json names its architecture use it; `engine test-model FOLDER` tries it on one.",
    ),
    "backend": Kind(
        prefix="attn",
        group=HookGroup.ATTN_BACKEND,
        summary="an attention backend",
        use="`engine test-backend @name@` tries it; `engine serve --attention-backend @name@` uses it.",
    ),
    "format": Kind(
        prefix="format",
        group=HookGroup.WEIGHT_FORMAT,
        summary="a format of stored weights",
        use="Checkpoints whose `quantization_config` has the `quant_method` @name@ use it.",
    ),
    "grammar": Kind(
        prefix="grammar",
        group=HookGroup.GRAMMAR,
        summary="compiles grammars of structured output",
        use="Requests with a choice use it where no other compiler has a higher priority.",
    ),
    "drafter": Kind(
        prefix="draft",
        group=HookGroup.DRAFTER,
        summary="guesses next tokens, which the model verifies",
        use="`engine serve --drafter @name@` uses it.",
    ),
    "checkpoint": Kind(
        prefix="weights",
        group=HookGroup.CHECKPOINT,
        summary="a checkpoint that ships in a plugin",
        use="Put the weights into its folder `checkpoint`; `engine serve @name@` serves it.",
    ),
    "executor": Kind(
        prefix="executor",
        group=HookGroup.EXECUTOR,
        summary="places the processes of an engine's ranks",
        use="`engine serve --tp 2 --executor @name@` uses it.",
    ),
    "coordinator": Kind(
        prefix="coordinator",
        group=HookGroup.SPARSE_COORDINATOR,
        summary="coordinates sparse KV",
        use="`engine serve --sparse-coordinator @name@` uses it beside a sparse attention backend.",
    ),
}


def new_plugin(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of what it offers: small letters, digits and single hyphens.")],
    *,
    folder: Annotated[Path, typer.Option("--into", help="The folder in which the distribution's own folder is made.")] = Path(),
) -> None:
    """Write a plugin's distribution of one kind, with tests that pass, for you to change."""
    try:
        made = write_plugin(kind, name, folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    path, beside = shlex.quote(str(made)), _beside(kind, "\n")
    print(f"{made} is written. Try it:\n  cd {path}\n  pip install -e '.[test]'\n  pytest\n  engine plugins{beside}")


def write_plugin(kind: str, name: str, folder: Path) -> Path:
    """Write the distribution into a new folder below `folder`, and return that. Raises `ConfigError` for what cannot be."""
    if kind not in KINDS:
        raise ConfigError(f"there is no kind of plugin {kind!r}{did_you_mean(kind, KINDS) or '.'} Kinds are {', '.join(KINDS)}.")
    _refuse_name(kind, name)
    words = _words(kind, name)
    root = folder / words["distribution"]
    if root.exists():
        raise ConfigError(f"{root} is there already; take another name, or remove it")
    _refuse_installed(words["distribution"], name)
    package = root / "src" / words["package"]
    targets = {_TEMPLATES / "pyproject.toml.txt": root / "pyproject.toml", _TEMPLATES / "README.md.txt": root / "README.md"}
    for template in sorted((_TEMPLATES / kind).rglob("*.txt")):
        file = template.relative_to(_TEMPLATES / kind).with_suffix("")
        targets[template] = root / "tests" / f"test_{words['package']}.py" if file.name == "test.py" else package / file
    for template, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_filled(template.read_text(), words))
    (package / "py.typed").touch()
    return root


def _refuse_name(kind: str, name: str) -> None:
    """Raise `ConfigError` for a name that no package can have, or that the core has."""
    if keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot be the name of a plugin, as it is a word of Python; take another, as my-{name}")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.80} cannot be the name of a plugin; take up to 64 small letters, digits and single hyphens, as my-{kind}"
        )
    if name in _own_names(kind):
        raise ConfigError(f"no plugin's {kind} can have the name {name!r}, as Enginery itself uses it; take another, as my-{name}")


def _own_names(kind: str) -> Collection[str]:
    """The names that the core has of the kind, or takes for something else: a plugin's would never be used."""
    group = KINDS[kind].group
    if isinstance(group, HookGroup):
        register = vars(own_parts).get(GROUPS[group].register, list)
        return {"auto", "none", "off", *(spec.name for spec in register())}
    if group == "commands":
        from enginery.cli.main import app, command_names

        return command_names(app)
    return _OWN_PATHS if group == "routes" else ()


def _refuse_installed(distribution: str, name: str) -> None:
    """Raise `ConfigError` for a distribution that is installed: pip would put the new one in its place."""
    for installed in importlib.metadata.distributions(name=distribution):
        advice = f"take another name, as my-{name}, or uninstall it"
        raise ConfigError(f"{distribution} {installed.version} is installed, and yours would be put in its place; {advice}")


def _words(kind: str, name: str) -> dict[str, str]:
    """What stands for each word between two @."""
    chosen = KINDS[kind]
    plugin = f"{chosen.prefix}-{name}"
    words = {"name": name, "plugin": plugin, "distribution": f"enginery-{plugin}"}
    words["class"] = "".join(word.capitalize() for word in name.split("-"))
    words["package"] = words["distribution"].replace("-", "_")
    words["summary"] = f"{chosen.summary[0].upper()}{chosen.summary[1:]}, for Enginery."
    words["use"] = _filled(chosen.use, words) + _beside(kind, "\n\n")
    if isinstance(chosen.group, HookGroup):
        words["api"] = str((CONTRACT_VERSIONS[chosen.group][0], 0))  # no template uses what later minors added
    major, minor, *_ = __version__.split(".")
    words["bounds"] = f">={major}.{minor},<{major}.{int(minor) + 1}"
    return words


def _beside(kind: str, lead: str) -> str:
    """What its tests need beside the core, behind `lead`; empty if nothing."""
    return f"{lead}Its tests run an engine, which needs {' and '.join(_BESIDE[kind])}." if kind in _BESIDE else ""


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text
