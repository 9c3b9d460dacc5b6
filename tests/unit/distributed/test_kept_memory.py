# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory that a worker frees and asks for again: page faults of a step, and what stays in the process."""

import subprocess
import sys

STEPS = """
import resource, sys
import numpy as np
import psutil
from nemo_rl_moe.distributed.worker_process import keep_freed_memory

def step(megabytes, count):
    arrays = [np.ones(megabytes << 17) for _ in range(count)]
    del arrays

if sys.argv[1] == "kept":
    keep_freed_memory()
step(8, 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step(8, 24)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
own = psutil.Process()
small = own.memory_info().rss
step(48, 12)
print(faults, own.memory_info().rss - small)
"""


def faults_and_growth(kind: str) -> tuple[int, int]:
    """Page faults of five steps that hold 192 MB, and what a step that holds 576 MB in large arrays leaves behind."""
    done = subprocess.run([sys.executable, "-c", STEPS, kind], capture_output=True, text=True, timeout=280, check=True)
    faults, growth = map(int, done.stdout.split())
    return faults, growth


def test_what_a_step_frees_is_there_for_the_next_one() -> None:
    faults, growth = faults_and_growth("kept")
    assert faults < 20, "960 MB were written to"
    assert growth < 32 * 1024**2, "large arrays are given back"
    # 60,000 of 4 KiB; fewer where the system gives pages of 2 MiB.
    assert faults_and_growth("as always")[0] > 200, "otherwise there is nothing to cure"
