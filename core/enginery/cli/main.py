"""The console command `engine`. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from enginery import __version__
from enginery.cli.authors.new_plugin import new_plugin
from enginery.cli.authors.test_backend import check_backend
from enginery.cli.authors.test_model import check_model
from enginery.cli.authors.test_op import check_ops
from enginery.cli.bench import bench_app
from enginery.cli.chat import chat
from enginery.cli.compile import compile_model
from enginery.cli.doctor import doctor
from enginery.cli.flags.plugins import blocked_names
from enginery.cli.generate import generate
from enginery.cli.list_backends import list_backends
from enginery.cli.plugins import plugins
from enginery.cli.rank import rank
from enginery.cli.replay import replay
from enginery.cli.serve import serve
from enginery.cli.usage import UsageError, told
from enginery.errors import FAULTS, EnginError, PluginError
from enginery.plugin.loading import explain
from enginery.plugin.registry import Registry

_log = logging.getLogger(__name__)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"enginery {__version__}")
        raise typer.Exit


def _root(
    *, version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False
) -> None:
    """An LLM inference engine with a small core; attention backends, models and kernels are plugins."""


def build_app() -> typer.Typer:
    """An app with the core's commands and without those of plugins."""
    made = typer.Typer(name="engine", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
    made.callback()(_root)
    for command in (serve, generate, chat, plugins, list_backends, doctor, replay, rank):
        made.command(command.__name__.replace("_", "-"))(command)
    made.command("test-backend")(check_backend)
    made.command("test-op")(check_ops)
    made.command("test-model")(check_model)
    made.command("new-plugin")(new_plugin)
    made.command("compile")(compile_model)
    made.add_typer(bench_app, name="bench")
    return made


app = build_app()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command of the core or of a plugin. Errors that users cause are printed without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP's own 300,000: for long, where a thread's core is another program's just then
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = _whole_app(given)(given, prog_name="engine", standalone_mode=False)
    except UsageError as error:
        if message := told(error, given):
            print(f"engine: {message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except EnginError as error:
        print(f"engine: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"engine: {error}; make room there", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python writes once more as it ends
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """Standard input that was closed is empty, and characters that the encoding of standard output lacks are replaced."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _whole_app(given: Sequence[str]) -> typer.Typer:
    """With the plugins' commands, unless the core's own is given."""
    complete = build_app()
    own = {command.name for command in complete.registered_commands} | {group.name for group in complete.registered_groups}
    if not own.intersection(given[:1]):  # a plugin cannot take the name of one of these, and importing plugins takes time
        add_commands(_load(given), complete)
    return complete


def add_commands(registry: Registry, app: typer.Typer) -> None:
    """Add the plugins' commands to `app`, after the core's. A plugin that fails, or takes a taken name, adds none."""
    for record in registry.implementing("register_commands"):
        own = typer.Typer()
        try:
            registry.manager.only(record.name, "register_commands")(app=own)
            if taken := command_names(app) & command_names(own):
                raise PluginError(f"the name {', '.join(sorted(taken))} is taken")
        except FAULTS as error:  # a plugin's code
            _log.warning("commands of %s are left out: %s", record, explain(error))
            continue
        app.registered_commands += own.registered_commands
        app.registered_groups += own.registered_groups


def command_names(app: typer.Typer) -> set[str]:
    """Those of an app and of its groups."""
    commands = {info.name or str(info.callback and info.callback.__name__).replace("_", "-") for info in app.registered_commands}
    return commands | {str(info.name or (info.typer_instance and info.typer_instance.info.name)) for info in app.registered_groups}


def _load(arguments: Sequence[str]) -> Registry:
    """What `-p no:NAME` and `--no-plugins` block must not be imported, so they are looked up before the command is known."""
    named = [value for flag, value in itertools.pairwise(arguments) if flag == "-p" and value.startswith("no:")]
    return Registry.load(blocked=blocked_names(named), no_plugins="--no-plugins" in arguments)
