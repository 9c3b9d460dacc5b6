# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Leaves the tests of the fake card to `make test-fake-card`: no other environment has its torch."""

import os
import sys
from pathlib import Path

_OF_TORCH_ALONE = ("test_collectives.py", "test_planted_faults.py")

collect_ignore_glob: list[str] = []
if ".venv-fake-card" not in sys.prefix:
    collect_ignore_glob = ["test_*.py"]
else:
    # This process and the ranks over gloo that it starts have no card.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if (Path(sys.prefix) / "missing").is_file():  # `make test-fake-card` says what
        every = Path(__file__).parent.glob("test_*.py")
        collect_ignore_glob = [path.name for path in every if path.name not in _OF_TORCH_ALONE]
