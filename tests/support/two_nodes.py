# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes on this machine, for as long as this process runs; prints their address."""

import signal
import sys

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80 * 1024**2


def main(temporary_folder: str) -> None:
    """Starts both.

    Args:
        temporary_folder: Of Ray: sockets and logs. Names of sockets are at most 107 bytes long, and Ray adds 70.
    """
    nodes = Cluster()
    for _ in range(2):
        nodes.add_node(
            num_cpus=1, include_dashboard=False, temp_dir=temporary_folder, object_store_memory=OBJECT_STORE_BYTES
        )
    print(nodes.address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
