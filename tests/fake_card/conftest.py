# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Leaves the tests of the fake card to `make test-fake-card`: no other environment has its torch."""

import os
import sys

collect_ignore_glob: list[str] = []
if ".venv-fake-card" in sys.prefix:
    # This process and the ranks over gloo that it starts have no card.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
else:
    collect_ignore_glob = ["test_*.py"]
