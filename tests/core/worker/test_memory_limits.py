"""The free memory of the host is what the control groups of the process leave of it, as a container's limit does."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginery.config.host_memory import available_host_bytes

KIB = 1024


def group(folder: Path, limit: str, *, used: int, cached: int = 0, v1: bool = False) -> None:
    """Write the files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    own = f"inactive_file {0 if v1 else cached}\n"  # of v1, without the groups in it
    (folder / "memory.stat").write_text(f"anon 5\n{own}active_file 7\n" + f"total_inactive_file {cached}\n" * v1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with 1,000 KiB, and a process in the group /pod/box of both versions."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("12:cpu,cpuacct:/pod/box\n4:memory:/pod/box\n1:name=systemd:/init\n0::/pod/box\n")
    return tmp_path


@pytest.mark.parametrize(("v1", "mount"), [(False, "sys/fs/cgroup"), (True, "sys/fs/cgroup/memory")])
def test_the_tightest_group_limits_the_memory_and_its_file_cache_can_be_had(root: Path, v1: bool, mount: str) -> None:
    none = str((1 << 63) - 4096) if v1 else "max"
    assert available_host_bytes(root) == 1000 * KIB  # no group's files are there
    group(root / mount / "pod/box", none, used=300 * KIB, v1=v1)
    assert available_host_bytes(root) == 1000 * KIB
    group(root / mount / "pod/box", str(900 * KIB), used=300 * KIB, cached=100 * KIB, v1=v1)
    assert available_host_bytes(root) == 700 * KIB
    group(root / mount / "pod", str(800 * KIB), used=600 * KIB, v1=v1)
    assert available_host_bytes(root) == 200 * KIB
    group(root / mount, str(500 * KIB), used=600 * KIB, v1=v1)
    assert available_host_bytes(root) == 1  # what is divided by it stays a number


def test_a_container_that_sees_only_its_own_folder_is_limited_by_it(root: Path) -> None:
    group(root / "sys/fs/cgroup/memory", str(64 * KIB), used=24 * KIB, v1=True)
    assert available_host_bytes(root) == 40 * KIB


def test_groups_that_cannot_be_read_limit_nothing(root: Path) -> None:
    group(root / "sys/fs/cgroup/pod/box", str(64 * KIB), used=24 * KIB)
    (root / "sys/fs/cgroup/pod/box/memory.current").write_text("many")
    assert available_host_bytes(root) == 1000 * KIB
    (root / "proc/self/cgroup").unlink()
    assert available_host_bytes(root) == 1000 * KIB
    assert available_host_bytes() > 1
