"""The version of each hook group's contract.

A descriptor states the version it was written for (`api=(2, 0)`). The core accepts the same major with a minor that is not
above its own. Inside a major, changes only add: fields with defaults, optional hooks; never a rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

ApiVersion = tuple[int, int]


class HookGroup(StrEnum):
    """What a descriptor describes; each group has a contract version of its own."""

    ATTN_BACKEND = "attn-backend"
    SPARSE_COORDINATOR = "sparse-coordinator"
    MODEL = "model"
    CHECKPOINT = "checkpoint"
    OP = "op"
    WEIGHT_FORMAT = "weight-format"
    GRAMMAR = "grammar"
    DRAFTER = "drafter"
    SCHEDULE_POLICY = "schedule-policy"
    PARSER = "parser"
    EXECUTOR = "executor"


CONTRACT_VERSIONS: Final[Mapping[HookGroup, ApiVersion]] = dict.fromkeys(HookGroup, (2, 0)) | {
    HookGroup.ATTN_BACKEND: (2, 1),
    HookGroup.EXECUTOR: (2, 2),
    HookGroup.GRAMMAR: (2, 1),
    HookGroup.MODEL: (2, 1),
    HookGroup.OP: (2, 7),
    HookGroup.PARSER: (2, 2),
    HookGroup.SCHEDULE_POLICY: (2, 1),
}
