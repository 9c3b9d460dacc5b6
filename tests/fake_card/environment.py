# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment of a process that sees the fake card."""

import os
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
START = Path(__file__).resolve().parent / "start"
LIBRARY_FOLDER = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "lib"
"""Where torch's libraries look for NVIDIA's: the fake card's lie there."""
STAND_IN = REPOSITORY / "tests" / "support" / "transformer_engine_stand_in"


def transformer_engine_folder(environment: Path) -> Path:
    """Return where Transformer Engine itself lies, apart from the environment's packages, which have the stand-in."""
    return environment / "transformer_engine"


def card_environment(
    folder: Path, num_cards: int = 1, *, transformer_engine: Path = STAND_IN, **changes: str
) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        folder: Where ranks of one job share memory.
        num_cards: That it sees.
        transformer_engine: The folder of the package.
        changes: Further variables.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_CARD_")}
    return environment | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_cards))),
        "FAKE_CARD_COUNT": str(num_cards),
        "FAKE_CARD_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, (START, transformer_engine, REPOSITORY))),
        "LD_LIBRARY_PATH": str(LIBRARY_FOLDER),  # where a driver's would be
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # there is no compiler for the card
        **changes,
    }


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in memory for the ranks of one job."""
    with tempfile.TemporaryDirectory(prefix="fake_card_", dir="/dev/shm") as folder:
        yield Path(folder)
