# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One network thread for all gloo process groups of a process, instead of one for each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


@contextmanager
def shared_gloo_device() -> Iterator[None]:
    """Makes the gloo process groups that are made inside share one device.

    A device has a thread that wakes up a hundred times a second. Megatron-Core makes about twenty groups, whose threads
    take 4% of a core from a worker that computes on it. torch.distributed has no option for it.
    """
    # As torch chooses them for a single group.
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    devices = [ProcessGroupGloo.create_device(interface=name) for name in names.split(",") if name]
    devices = devices or [ProcessGroupGloo.create_default_device()]

    class SharedDeviceGloo(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta):
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)

    # A subclass and no function: torch also asks whether a group is an instance of this name.
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]
