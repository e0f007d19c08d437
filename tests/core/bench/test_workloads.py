"""Workloads by name: those that are listed, and a shape with a number of streams."""

from __future__ import annotations

import pytest

from enginery.bench.workloads import WORKLOADS, find_workload
from enginery.errors import ConfigError


def test_a_workload_may_be_a_shape_and_a_number_of_streams() -> None:
    workload = find_workload("gpt-oss-120b:32")
    assert (workload.name, workload.shape) == ("gpt-oss-120b:32", "gpt-oss-120b")
    assert workload.lengths == ((512, 256),) * 32
    assert workload.summary == "32 requests, 512 in, 256 out"
    assert find_workload("W7") is WORKLOADS["W7"]


@pytest.mark.parametrize(
    "name", ["gpt-oss-120b:0", "gpt-oss-120b:-1", "gpt-oss-120b:", "gpt-oss-120b:x", "gpt-oss-120b", "nope:3", "W8", ""]
)
def test_other_names_are_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no workload") as refused:
        find_workload(name)
    assert repr(name) in str(refused.value)
    assert "W7   deepseek-v2-lite" in str(refused.value)
    assert "SHAPE:STREAMS" in str(refused.value)
