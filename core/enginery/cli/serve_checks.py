"""What `engine serve` refuses before it starts a process: wrong options, ports that overlap, what does not fit here."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from enginery.config.host_memory import available_host_bytes
from enginery.config.resolve import check
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError

_EVERYWHERE: Final = ("*", "0.0.0.0", "::", "[::]")
_PROCESS_BYTES: Final = 256 << 20  # of an engine's process without a model: torch is most of it


def check_before_start(options: EngineOptions, *, host: str, port: int, dp: int) -> None:
    """host, port: of HTTP. dp: engines with these options. Raises `ConfigError`."""
    check(options)
    if dp > 1 and options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device is {options.device}, one GPU, but --dp {dp} needs some for each replica; write --device cuda")
    _check_size(options, dp)
    own = [*_listened(options, dp), *_published(options, dp)]
    taken = [_Ports(flag="--port", given=str(port), host=host, first=port, ports=range(port, port + 1)), *own]
    for one, other in itertools.combinations(taken, 2):
        if both := one.overlap(other):
            raise ConfigError(f"{one} and {other} both take {_span(both)}; {other.moved(one, taken)}")
    for each in own:  # HTTP's was looked at before
        each.check_free()


@dataclass(frozen=True, kw_only=True)
class _Ports:
    """What a flag takes for all engines. given: its address, with the port `first` of the engine, or lane, that is numbered 0."""

    flag: str
    given: str
    host: str
    first: int
    ports: range

    @classmethod
    def of(cls, flag: str, address: str, numbers: range) -> Iterator[_Ports]:
        """Of an address that numbers are added to. None where it takes a free port, or is no TCP."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if port.isdecimal() and int(port):
            ports = range(int(port) + numbers.start, int(port) + numbers.stop)
            yield cls(flag=flag, given=address, host=host, first=int(port), ports=ports)

    def __str__(self) -> str:
        return f"{self.flag} {self.given}" + (f" ({_span(self.ports)})" if len(self.ports) > 1 else "")

    def overlap(self, other: _Ports) -> range:
        meet = self.host == other.host or {self.host, other.host}.intersection(_EVERYWHERE)
        return _both(self.ports, other.ports) if meet else range(0)

    def moved(self, behind: _Ports, taken: Sequence[_Ports]) -> str:
        """What to write, so that nobody else has its ports."""
        others, count = [each.ports for each in taken if each is not self], len(self.ports)
        for start in sorted(ports.stop for ports in others if ports.stop >= behind.ports.stop):
            if start + count <= 65_536 and not any(_both(range(start, start + count), ports) for ports in others):
                return f"write {self.flag} tcp://{self.host}:{start - self.ports.start + self.first}"
        return "name ports that lie further apart"

    def check_free(self) -> None:
        if self.ports[-1] > 65_535:
            raise ConfigError(f"{self} takes port {self.ports[-1]}, but 65535 is the last; name a lower one")
        for port in self.ports:
            error = bind_error("" if self.host in _EVERYWHERE else self.host, port)
            if error is not None and error.errno in (errno.EADDRINUSE, errno.EACCES):  # else ZeroMQ's name, or not IPv4
                raise ConfigError(f"port {port} of {self} cannot be used: {error.strerror}; name another")


def bind_error(host: str, port: int) -> OSError | None:
    """Why nobody could listen there now; None: somebody could."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _listened(options: EngineOptions, dp: int) -> Iterator[_Ports]:
    if options.listen is not None:
        yield from _Ports.of("--listen", options.listen, range(options.dp_rank, options.dp_rank + dp))


def _published(options: EngineOptions, dp: int) -> Iterator[_Ports]:
    if options.kv_events is None:
        return
    from enginery.engine.kv_events.publisher import address_of, binds

    numbers = range(options.dp_rank * options.dp_attention, (options.dp_rank + dp) * options.dp_attention)
    for flag, address in (("--kv-events", options.kv_events), ("--kv-events-replay", options.kv_events_replay)):
        if address is not None:
            address_of(address, numbers[-1])  # refuses what cannot be counted from
            if binds(address) or flag == "--kv-events-replay":
                yield from _Ports.of(flag, address, numbers)
    if options.kv_events == options.kv_events_replay:
        raise ConfigError(f"--kv-events and --kv-events-replay are both {options.kv_events}; name another for one of them")


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _span(ports: range) -> str:
    return f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"


def _check_size(options: EngineOptions, dp: int) -> None:
    count = dp * (options.num_ranks if options.executor == "local" else 1)  # others may place them on other hosts
    free = available_host_bytes()
    if count > max(1, free // _PROCESS_BYTES):
        raise ConfigError(
            f"{count:,} processes of engines would take {count * _PROCESS_BYTES / 2**30:.1f} GiB before they load a model, and "
            f"{free / 2**30:.1f} GiB are free; lower --dp, --tp, --pp or --dp-attention"
        )
