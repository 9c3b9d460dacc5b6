# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reason of a worker's end out of Ray's messages."""

import pytest
from ray.exceptions import RayActorError

from nemo_rl_moe.distributed.worker_group import exit_reason

ENDED = "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits. End of file."


class Died(RayActorError):
    def __init__(self, text: str):
        super().__init__()
        self._text = text

    def __str__(self) -> str:
        return self._text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"The actor died.\n\tclass_name: A\n{ENDED} Some common causes include: (1) the process was killed", ENDED),
        (f"{ENDED} If the process was killed by the kernel OOM killer, see", ENDED),
        ("The actor is dead because its node has died.", "The actor is dead because its node has died."),
        ("Anything\nelse", "Anything else"),
    ],
)
def test_is_one_line_without_guesses(text: str, reason: str) -> None:
    assert exit_reason(Died(text)) == reason
