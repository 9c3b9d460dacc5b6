# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What came of a call to a Ray actor."""

from typing import Any

import ray
from ray.exceptions import RayActorError, RayError


def outcome(call: Any) -> Any:
    """A call's result, or the error by which Ray says what went wrong."""
    try:
        return ray.get(call)
    except RayError as error:
        return error


def exit_reason(error: RayActorError) -> str:
    """The part of Ray's message that says how a process ended, in one line."""
    text = " ".join(str(error).split())
    for start in ("Worker exit type:", "The actor is dead because"):
        if start in text:
            return text[text.index(start) :].partition(" If the process was killed by the kernel OOM killer")[0]
    return text
