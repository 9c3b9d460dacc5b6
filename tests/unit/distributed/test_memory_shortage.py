# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The line on memory that ran short, out of Ray's own text."""

from nemo_rl_moe.distributed.memory_shortage import memory_shortage

# As Ray 2.60 wrote it, shortened.
REPORT = """\
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, ID: 8df6318d) was \
23.1GB used / 23.54GB limit (0.981)
OOM kill reason: Memory usage 24803852288B exceeded threshold of 24012676915B (95.0% of 25276502016B limit)
Object store memory usage: [- objects spillable: 0
- bytes spillable: 0]
Total non-selected idle workers: 0
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
15367\t12.42\tray::WorkerProcess.call
14838\t6.76\tpython -m some.program --with a --very --long --command --line --of --many --words
15366\t2.50\tray::WorkerProcess.call
101\t0.41\t/usr/bin/python3 -P -m nemo_rl_moe.cli grpo
102\t0.30\tray::IDLE
103\t0.20\tnot shown
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io
"""


def test_by_hand() -> None:
    names = {("10.0.0.7", 15367): "rank 3", ("10.0.0.8", 15366): "rank 9", ("10.0.0.7", 101): "main process"}
    assert memory_shortage(REPORT, names) == (
        "the memory of 10.0.0.7 ran short: 23.1 of 23.54 GB in use, above the threshold of 95.0%"
        " (RAY_memory_usage_threshold); the largest processes: rank 3 (pid 15367) 12.42 GB,"
        " python -m some.program --with a --very --long --command --li (pid 14838) 6.76 GB,"
        " ray::WorkerProcess.call (pid 15366) 2.50 GB, main process (pid 101) 0.41 GB, ray::IDLE (pid 102) 0.30 GB"
    )


def test_another_text_is_one_line_too() -> None:
    assert memory_shortage("Task was killed.\nMore of it\n", {}) == "Task was killed."
