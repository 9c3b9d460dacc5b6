# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A one-line summary of a memory shortage, from the report of Ray's memory monitor."""

import re
from collections.abc import Mapping

MOST_PROCESSES = 5
LONGEST_COMMAND = 60
_USE = re.compile(r"Memory on the node \(IP: ([^,)]+).*?\) was ([\d.]+)GB used / ([\d.]+)GB limit")
_THRESHOLD = re.compile(r"exceeded threshold of \d+B \(([\d.]+%)")
_PROCESS = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)


def memory_shortage(report: str, names: Mapping[tuple[str, int], str]) -> str:
    """Summarize why Ray ended a process: the machine's memory, the threshold, the largest processes.

    Args:
        report: Text of Ray's `OutOfMemoryError`.
        names: Address of a machine and process id -> name of a process of this run. Others are shown by their command.

    Returns:
        One line. For an unknown form of report, its first line.
    """
    use, threshold = _USE.search(report), _THRESHOLD.search(report)
    if use is None or threshold is None:
        return report.partition("\n")[0]
    address, used, limit = use.groups()
    largest = [
        f"{names.get((address, int(pid)), command[:LONGEST_COMMAND])} (pid {pid}) {size} GB"
        for pid, size, command in _PROCESS.findall(report)[:MOST_PROCESSES]
    ]
    return (
        f"the memory of {address} ran short: {used} of {limit} GB in use, above the threshold of {threshold[1]}"
        f" (RAY_memory_usage_threshold); the largest processes: {', '.join(largest)}"
    )
