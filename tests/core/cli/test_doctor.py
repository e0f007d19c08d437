"""engine doctor on machines with seeded faults: each is found, told with what to do, and makes the exit status 1."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import quick_processes
from core.cli.doctor_machine import ALL_FINE, PLUGIN, examine, plugins, sound
from typer.testing import CliRunner

from enginery.cli import doctor as doctor_module
from enginery.cli import doctor_checks
from enginery.cli.main import build_app

__all__ = ["plugins", "sound"]


def test_nothing_is_found_where_nothing_is_wrong(sound) -> None:
    assert {row["status"] for row in examine(code=0).values()} == {"ok"}


LIVE = {"distribution": "d", "version": "1", "reason": "", "offers": [], "status": "loaded"}
ELSEWHERE = LIVE | {"status": "no-device", "reason": "the backends run on cuda, this machine has cpu"}


@pytest.fixture
def reading(sound, monkeypatch) -> Callable[..., tuple[list[str], int]]:
    """The lines of the doctor on a machine with these plugins, and its exit status."""

    def run(*records: dict[str, object], columns: int = 80) -> tuple[list[str], int]:
        found = {"records": list(records), "default": {"name": "m", "folder": "/nowhere"}}
        asked = doctor_module._ask
        monkeypatch.setattr(
            doctor_module,
            "_ask",
            lambda code, *rest, **more: (found, "") if code == doctor_module._ASK_PLUGINS else asked(code, *rest, **more),
        )
        done = CliRunner(env={"COLUMNS": str(columns)}).invoke(build_app(), ["doctor", "--port", "0"])
        return done.stdout.splitlines(), done.exit_code

    return run


def test_a_sound_machine_without_a_gpu_has_no_warning_and_is_told_so(reading) -> None:
    lines, code = reading(LIVE | {"name": "a"}, ELSEWHERE | {"name": "b"}, ELSEWHERE | {"name": "c"})
    assert code == 0
    assert not [line for line in lines if line.startswith(("warn", "fail"))]
    (row,) = (number for number, line in enumerate(lines) if line.split()[:2] == ["ok", "plugins"])
    assert " ".join(" ".join(lines[row : row + 2]).split()[2:]).startswith(
        "1 are loaded, as engine plugins shows; for other devices than this machine's: b, c"
    )
    assert lines[-1] == "All is well: 15 checks, nothing to mend."


def test_operations_that_were_not_built_and_slow_bfloat16_are_told(sound, monkeypatch) -> None:
    answers = {
        doctor_module._ASK_TORCH: ALL_FINE | {"devices": [], "bfloat16": False},
        doctor_module._ASK_PLUGINS: {
            "records": [],
            "default": {"name": "m", "folder": "/nowhere"},
            "lacking": [["some", "were not built; install a compiler"]],
        },
    }
    asked = doctor_module._ask
    monkeypatch.setattr(
        doctor_module, "_ask", lambda code, *rest, **more: (answers[code], "") if code in answers else asked(code, *rest, **more)
    )
    monkeypatch.setattr(doctor_module, "present_devices", lambda: {"cpu"})
    rows = examine(code=0)
    assert rows["operations some"]["status"] == "warn"
    assert "install a compiler" in rows["operations some"]["detail"]
    assert "slower than in float32" in rows["devices"]["detail"]


def test_the_last_line_counts_what_is_wrong(reading, monkeypatch) -> None:
    blocked = LIVE | {"name": "a", "status": "blocked", "reason": "-p no:a names it"}
    lines, code = reading(blocked)
    assert (lines[-1], code) == ("Ready: 15 checks, no failures, 1 warning. What says warn can stay as it is.", 0)
    broken = LIVE | {"name": "b", "status": "broken", "reason": "ZeroDivisionError"}
    lines, code = reading(blocked, broken, broken | {"name": "c"})
    assert code == 1
    told = " ".join(" ".join(lines).split())
    assert told.endswith("Not ready: 17 checks, 2 failures, 1 warning. Mend what says fail, then run engine doctor again.")


@pytest.mark.parametrize("columns", [60, 80])
def test_words_stay_whole_on_a_narrow_terminal(reading, monkeypatch, columns: int) -> None:
    path = "/opt/" + "checkpoint-" * 9
    row = doctor_checks.Check(name="model", status="ok", detail=f"default model m in {path}")
    monkeypatch.setattr(doctor_module, "_default_model", lambda found: row)
    lines, _ = reading(LIVE | {"name": "a"}, columns=columns)
    assert sum(path in line for line in lines) == 1
    assert all(len(line) <= columns for line in lines if path not in line)


def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, cuda: str = "None") -> None:
    """In the place of torch for the process that the doctor asks."""
    package = tmp_path / "fake" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"""
from types import SimpleNamespace
from typing import Any
__version__ = "9.9"
version = SimpleNamespace(cuda={cuda})
def init():
    {init}
cuda = SimpleNamespace(init=init, device_count=lambda: 1, get_device_name=lambda index: "a GPU")
distributed = SimpleNamespace(is_available=lambda: False)
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"), prepend=os.pathsep)
    monkeypatch.setattr(doctor_module, "_plugins", lambda **wanted: [])
    monkeypatch.setattr(doctor_module, "machine", lambda port: [])


def test_a_driver_too_old_for_torch_is_told_in_its_own_words(tmp_path, monkeypatch) -> None:
    why = "The NVIDIA driver on your system is too old (found version 11040)."
    fake_torch(tmp_path, monkeypatch, f"raise RuntimeError({why + chr(10) + 'More.'!r})", cuda="'13.0'")
    monkeypatch.setattr(doctor_module, "present_devices", lambda: {"cpu", "cuda"})
    row = examine(code=1)["devices"]
    assert row["detail"] == f"there is a GPU, and torch, which is built for CUDA 13.0, cannot use it: {why}"
    assert "nvidia-smi" in row["advice"]


def test_a_torch_without_cuda_beside_a_gpu_is_told(tmp_path, monkeypatch) -> None:
    fake_torch(tmp_path, monkeypatch, "raise AssertionError('Torch not compiled with CUDA enabled')")
    monkeypatch.setattr(doctor_module, "present_devices", lambda: {"cpu", "cuda"})
    assert "is built without CUDA" in examine(code=1)["devices"]["detail"]
    monkeypatch.setattr(doctor_module, "present_devices", lambda: {"cpu"})
    assert examine(code=0)["devices"]["detail"] == "CPU only"


def test_a_torch_that_cannot_be_imported_is_told(tmp_path, monkeypatch) -> None:
    fake_torch(tmp_path, monkeypatch, "pass")
    (tmp_path / "fake" / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    row = examine(code=1)["torch"]
    assert "libcudart.so.13" in row["detail"]
    assert "pip install torch" in row["advice"]


def test_a_plugin_that_every_command_waits_for_is_named(plugins, monkeypatch) -> None:
    monkeypatch.setattr(doctor_module, "present_devices", lambda: frozenset({"cpu"}))
    plugins("quick", PLUGIN.replace("NAME", "quick").replace("ARCHITECTURE", "Quick"))
    waits = "import time\ntime.sleep(1.2)\n"
    plugins("lazy-one", waits + PLUGIN.replace("NAME", "lazy").replace("ARCHITECTURE", "Lazy"), name="lazy")
    plugins("heavy", "import torch\n" + PLUGIN.replace("NAME", "heavy").replace("ARCHITECTURE", "Heavy"))
    with quick_processes.own_processes():
        checks = doctor_module._plugins(is_model_named=True)
    told = {check.name: check for check in checks if check.name.startswith("import of ")}
    assert told.keys() == {"import of lazy", "import of heavy"}
    assert {check.status for check in told.values()} == {"warn"}
    assert float(re.match(r"importing it takes (\S+) s,", told["import of lazy"].detail)[1]) >= 1.2
    assert " s and brings torch, and every command of engine imports it" in told["import of heavy"].detail


def test_broken_plugins_are_told_with_their_distribution(plugins, monkeypatch) -> None:
    monkeypatch.setattr(doctor_module, "_torch", list)
    plugins("good", PLUGIN.replace("NAME", "good").replace("ARCHITECTURE", "Good"))
    plugins("bad-one", "import a_module_that_is_not_there", name="bad")
    for maker in ("maker-a", "maker-b"):
        plugins(maker, PLUGIN.replace("NAME", maker).replace("ARCHITECTURE", maker), name="twin")
    rows = examine(code=1)
    assert rows["plugin good"]["status"] == "ok"
    assert "bad-one 1.0 is broken" in rows["plugin bad"]["detail"]
    assert "a_module_that_is_not_there" in rows["plugin bad"]["detail"]
    assert "uninstall bad-one" in rows["plugin bad"]["advice"]
    assert rows["plugin twin"]["status"] == "fail"
    assert "conflict" in rows["plugin twin"]["detail"]
    assert "maker-" in rows["plugin twin"]["detail"]


def test_a_package_that_is_missing_or_too_old_is_told(sound, monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["pluggy>=99", "no_such_thing", "extra-thing; extra == 'test'"])
    row = examine(code=1)["packages"]
    assert "and >=99 is needed" in row["detail"]
    assert "no_such_thing is missing" in row["detail"]
    assert "extra-thing" not in row["detail"]


def test_a_misspelt_setting_is_told(sound, monkeypatch) -> None:
    monkeypatch.setenv("ENGINERY_PAGESIZE", "16")
    assert "ENGINERY_PAGE_SIZE" in examine(code=1)["settings"]["detail"]


CACHES = [
    ("HF_HUB_CACHE", "model cache", "", "HF_HOME"),
    ("TRITON_CACHE_DIR", "kernel cache", "", "TRITON_CACHE_DIR"),
    ("TRITON_HOME", "kernel cache", ".triton/cache", "TRITON_CACHE_DIR"),
    ("FLASHINFER_WORKSPACE_BASE", "FlashInfer's cache", ".cache/flashinfer", "FLASHINFER_WORKSPACE_BASE"),
]


@pytest.mark.parametrize(("variable", "name", "below", "told"), CACHES)
def test_a_cache_that_cannot_be_written_is_told(
    sound, monkeypatch, tmp_path, variable: str, name: str, below: str, told: str
) -> None:
    def use(folder: Path, *, code: int = 1) -> dict[str, str]:
        if variable == "HF_HUB_CACHE":  # imported before the variable is set, which it reads
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
        monkeypatch.setenv(variable, str(folder))
        return examine(code=code).get(name, {"status": "none"})

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(doctor_checks, "present_devices", lambda: {"cpu", "cuda"})
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    (tmp_path / "file").touch()
    assert "is a file" in use(tmp_path / "file" / "cache")["detail"]
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    can = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != read_only and can(path, mode))  # root may write everywhere
    row = use(read_only / "cache")
    assert row["detail"] == f"{read_only / 'cache' / below} cannot be written: {read_only} is not writable"
    assert told in row["advice"]
    if variable != "HF_HUB_CACHE":
        monkeypatch.setattr(doctor_checks, "present_devices", lambda: {"cpu"})
        assert use(read_only / "cache", code=0)["status"] in ("ok", "none"), "nothing is compiled on a CPU"


def test_a_cache_of_a_flashinfer_that_is_not_installed_is_not_looked_at(sound, monkeypatch) -> None:
    monkeypatch.setattr(doctor_checks, "present_devices", lambda: {"cpu", "cuda"})
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    assert "FlashInfer's cache" not in examine(code=0)


@pytest.mark.parametrize(("free_bytes", "code"), [(3 << 30, 0), (1000, 1)])
def test_a_disk_that_is_nearly_full_is_told(sound, monkeypatch, free_bytes: int, code: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))
    row = examine(code=code)["model cache"]
    assert row["status"] == ("fail" if code else "warn")
    assert f"has {free_bytes / 1e9:.1f} GB left" in row["detail"]
    assert "HF_HOME" in row["advice"]


def test_a_temporary_folder_with_too_long_a_path_is_told(sound, monkeypatch, tmp_path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    row = examine(code=1)["temporary folder"]
    assert "107 are allowed" in row["detail"]
    assert "TMPDIR" in row["advice"]


def test_the_longest_folder_that_is_allowed_holds_the_server_s_socket(monkeypatch, tmp_path) -> None:
    room = doctor_checks._SOCKET_PATH - doctor_checks._SOCKET_NAME
    for length, status in ((room, "ok"), (room + 1, "fail")):
        monkeypatch.setattr("tempfile.tempdir", "/" + "x" * (length - 1))
        assert doctor_checks.temporary_folder().status == status
    with socket.socket(socket.AF_UNIX) as end:
        path = str(tmp_path)
        end.bind(path + "/" + "y" * (doctor_checks._SOCKET_PATH - len(path) - 1))


@pytest.mark.parametrize("answer", [b"", b"nonsense", b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'])
def test_a_port_that_another_program_holds_is_told(sound, monkeypatch, answer: bytes) -> None:
    def give() -> None:
        with listening.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        port = listening.getsockname()[1]
        thread = threading.Thread(target=give)
        thread.start()
        row = examine("--port", str(port), code=1)["port"]
        thread.join()
    assert row["detail"].startswith(f"port {port} cannot be used: ")
    assert "another --port" in row["advice"]


def test_no_temporary_folder_at_all_is_told(sound, monkeypatch) -> None:
    def none_usable() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none_usable)
    assert "No usable temporary directory" in examine(code=1)["temporary folder"]["detail"]


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({"LC_ALL": "C.UTF-8"}, "ok"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "fail"),
        ({"PYTHONIOENCODING": "latin-1"}, "fail"),
    ],
)
def test_a_locale_without_utf_8_is_told(environ: dict[str, str], status: str) -> None:
    code = "from enginery.cli.doctor_checks import text_encoding as look; found = look(); print(found.status, found.advice)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHONUTF8", "PYTHONIO"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept | environ)
    assert done.stdout.split()[0] == status
    assert ("LC_ALL=C.UTF-8" in done.stdout) == (status == "fail")


@pytest.mark.parametrize(("soft", "status"), [(64, "fail"), (1024, "warn"), (4096, "ok")])
def test_too_few_descriptors_are_told(soft: int, status: str) -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, 4096))
from enginery.cli.doctor_checks import descriptors
found = descriptors()
print(found.status, found.detail, found.advice)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{status} ")
    assert ("ulimit -n 65536 before engine serve" in done.stdout) == (status != "ok")


def test_a_distribution_that_registers_nothing_is_a_warning(reading) -> None:
    row = LIVE | {"name": "forgotten", "status": "unregistered", "reason": "it requires enginery and has no entry point"}
    lines, code = reading(LIVE | {"name": "a"}, row)
    assert code == 0
    (warning,) = (line for line in lines if line.startswith("warn"))
    assert "plugin forgotten" in warning
