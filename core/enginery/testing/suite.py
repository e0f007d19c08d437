"""The kit as pytest tests.

    class TestMine(AttnBackendSuite):
        backend = "mine"

is all that a plugin's tests need.
"""

from __future__ import annotations

from typing import ClassVar, Final

import pytest
import torch

from enginery.plugin.registry import Registry
from enginery.testing.conformance import Check, checks_of
from enginery.testing.subject import Subject

_ARGUMENTS: Final = ("subject_of_kit", "check")


class AttnBackendSuite:
    """One test per rule and case. backend: as `engine list-backends` names it, or `module:NAME`, see `Subject.imported`."""

    backend: ClassVar[str]
    device: ClassVar[str] = "cpu"

    @classmethod
    def subject(cls) -> Subject:
        if ":" in cls.backend:
            return Subject.imported(cls.backend, device=cls.device)
        return Subject.installed(cls.backend, Registry.load(), device=cls.device)

    @classmethod
    def checks(cls, subject: Subject) -> list[Check]:
        """What is run. A subclass may leave out what another runs, as of kernels interpreted here and compiled there."""
        return checks_of(subject)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest for each subclass."""
        if "check" not in metafunc.fixturenames:
            return
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            absent = pytest.param(None, None, marks=pytest.mark.skip(reason="there is no CUDA device"))
            metafunc.parametrize(_ARGUMENTS, [absent])
            return
        subject = self.subject()
        metafunc.parametrize(_ARGUMENTS, [pytest.param(subject, check, id=str(check)) for check in self.checks(subject)])

    def test_rule(self, subject_of_kit: Subject, check: Check) -> None:
        """A skipped rule is a skipped test, with the reason."""
        row = check.run(subject_of_kit)
        if row.outcome == "skipped":
            pytest.skip(row.message)
        assert row.outcome == "passed", row.message
