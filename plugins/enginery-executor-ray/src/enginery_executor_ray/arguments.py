"""Arguments of the application for Ray Serve, which may come from YAML, as options of `engine serve`. Imports no Ray."""

from __future__ import annotations

import errno
import hashlib
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

OWN: Final = {  # arguments of the application: what each is unless given, and what it is at least
    "min_replicas": (1, 1),
    "max_replicas": (1, 1),
    "target_requests": (64, 1),
    "upscale_delay_s": (10, 0),
    "downscale_delay_s": (600, 0),
    "gpus": (0, 0),
}
REFUSED: Final = frozenset(  # Ray's proxy and its replicas are in their place
    {"host", "port", "uds", "dp", "api_key", "api_key_file", "ssl_certfile", "ssl_keyfile"}
)
ON_ALONE: Final = frozenset(  # switches of `engine serve` that have no --no- form
    {"check_attention", "ep", "micro_batches", "no_plugins", "trust_request_chat_template", "wait_for_kernels"}
)
SWITCHES: Final = frozenset({"graphs", "overlap", "prefix_cache"})  # the others
OR_OFF: Final = frozenset({"drafter", "sparse_coordinator"})  # a name, or off, which YAML reads as false
_WRITTEN: Final = {"blocked_plugins": "-pno:", "plugin_options": "--option="}  # by the names that a file of --config has
_QUOTE: Final = "YAML reads on, off, yes and no as true and false, and some words as numbers; put quotes around a word"


def own_and_flags(args: Mapping[str, object]) -> tuple[dict[str, int], dict[str, object]]:
    """Arguments of the application itself, and those that are options of `engine serve`, by names with `_`. null: not given.

    Raises `ValueError` that names the argument: for one whose place Ray takes, and for a value that cannot be.
    """
    given = {str(name).replace("-", "_"): value for name, value in args.items() if value is not None}
    if refused := REFUSED & given.keys():
        raise ValueError(f"{', '.join(sorted(refused))}: Ray Serve listens, and has the replicas; set this there, or leave it out")
    given.setdefault("max_replicas", given.get("min_replicas", 1))
    own = {name: _whole(name, given.pop(name, default), at_least) for name, (default, at_least) in OWN.items()}
    if own["max_replicas"] < own["min_replicas"]:
        raise ValueError(f"max_replicas is {own['max_replicas']}, but min_replicas {own['min_replicas']}; give no fewer")
    _check_names(options_of(given))
    _check_ports(given, own["max_replicas"])
    return own, given


def environ_of(environ: Mapping[str, str]) -> dict[str, str]:
    """For an engine: without the variables of what is refused. Keys would hide the metrics."""
    refused = {f"ENGINERY_{name.upper()}" for name in REFUSED}
    return {name: value for name, value in environ.items() if name not in refused}


def _check_names(options: list[str]) -> None:
    """Else a redeploy would end engines that serve, for others that cannot start."""
    asked = [sys.executable, "-P", "-m", "enginery", "serve", *options, "--help"]  # with it values are not looked at
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())


def options_of(flags: Mapping[str, object]) -> list[str]:
    """As a command line has them: of a switch the value is true or false. A list repeats its option, and null is nothing."""
    return [option for name, value in flags.items() if value is not None for option in _options(name, value)]


def _options(name: str, value: object) -> list[str]:
    dashed, name = name.replace("_", "-"), name.replace("-", "_")
    several = value if isinstance(value, list | tuple) else (value,)
    if name in ON_ALONE | SWITCHES:
        word = str(value).lower()
        if word not in ("true", "false"):
            raise ValueError(f"{name} is {value!r}, but must be true or false")
        return [f"--{dashed}"] if word == "true" else [f"--no-{dashed}"] if name in SWITCHES else []
    words = [_word(name, each) for each in several]
    return ["--record-steps", *words] if name == "record_steps" else [_WRITTEN.get(name, f"--{dashed}=") + word for word in words]


def _word(name: str, value: object) -> str:
    if value is False and name in OR_OFF:
        return "off"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name} is {value!r}, but must be a word or a number. {_QUOTE}")
    return str(value)


def _whole(name: str, given: object, at_least: int) -> int:
    number = int(str(given)) if re.fullmatch(r"\d+", str(given)) else -1
    if number < at_least:
        raise ValueError(f"{name} is {given!r}, but must be a whole number from {at_least} on")
    return number


def _check_ports(flags: Mapping[str, object], replicas: int) -> None:
    """A redeploy may have twice as many of them on a node for a while, each with a number, which its ports are higher by."""
    lanes = str(flags.get("dp_attention", 1))
    needed = 2 * replicas * (int(lanes) if lanes.isdecimal() else 1)
    addresses = {name: str(flags.get(name, "")) for name in ("kv_events", "kv_events_replay")}
    ports = [int(port) for _, _, port in (each.rpartition(":") for each in addresses.values()) if port.isdecimal()]
    if len(ports) == 2 and abs(ports[0] - ports[1]) < needed:
        told = " and ".join(f"{name} {address}" for name, address in addresses.items())
        raise ValueError(f"{told}: {needed} ports from each on are for replicas on one node; name ports {needed} apart")


def number_on_node(events: str) -> tuple[int, socket.socket]:
    """The lowest number that no other process here has for these KV events, and what keeps it as long as it is open."""
    name, number = hashlib.sha256(events.encode()).hexdigest(), 0
    while True:
        kept = socket.socket(socket.AF_UNIX)
        try:
            kept.bind(f"\0enginery-kv-events-{number}-{name}")  # as ports are, it is of a network namespace
            return number, kept
        except OSError as error:
            kept.close()
            if error.errno != errno.EADDRINUSE:
                raise
            number += 1
