# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment of a process that sees the fake card."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
START = Path(__file__).resolve().parent / "start"
STAND_IN = REPOSITORY / "tests" / "support" / "transformer_engine_stand_in"


def card_environment(folder: Path, num_cards: int = 1, **changes: str) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        folder: Where ranks of one job share memory.
        num_cards: That it sees.
        changes: Further variables.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_CARD_")}
    return environment | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_cards))),
        "FAKE_CARD_COUNT": str(num_cards),
        "FAKE_CARD_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, (START, STAND_IN, REPOSITORY))),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # there is no compiler for the card
        **changes,
    }


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in memory for the ranks of one job."""
    with tempfile.TemporaryDirectory(prefix="fake_card_", dir="/dev/shm") as folder:
        yield Path(folder)
