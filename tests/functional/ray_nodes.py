# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Several Ray nodes on this machine, in a process of their own that can be killed in part and started anew."""

import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.functional import sft_runs

OBJECT_STORE_BYTES = 80 * 1024**2
END_LIMIT_S = 30.0


class RayNodes:
    """The nodes as a test sees them: what a cluster's manager would do.

    Args:
        folder: Of Ray: sockets and logs. Names of sockets are at most 107 bytes long, and Ray adds 70.
        num_nodes: How many.
    """

    def __init__(self, folder: Path, num_nodes: int):
        self._folder, self._num_nodes = folder, num_nodes
        self._host: subprocess.Popen[str] | None = None
        self._address = ""

    @property
    def process(self) -> psutil.Process | None:
        """The process that has started them; None: they have not been started."""
        return psutil.Process(self._host.pid) if self._host is not None else None

    def address(self) -> str:
        """Return the address of the nodes, started where they are not there, and anew where a server of one has
        died.
        """
        if self.process is not None:
            names = [process.name() for process in sft_runs.running(self.process.children())]
            if names.count("raylet") == self._num_nodes and "gcs_server" in names:
                return self._address
            self.end()
        self._host = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(self._folder), str(self._num_nodes)],
            env=sft_runs.environment(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._host.stdout is not None
        self._address = self._host.stdout.readline().strip()
        assert self._address, "the Ray nodes do not start"
        return self._address

    def end(self) -> None:
        """Kill them with all that they have started; does nothing where they are not there."""
        if self._host is None or self.process is None:
            return
        family = [self.process, *self.process.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._host.wait()
        psutil.wait_procs(family, timeout=END_LIMIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._host = None


def main(folder: str, num_nodes: int) -> None:
    """Start them, print their address, and waits until it is killed."""
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    # Where Ray has never run on this machine, the folder of the file in which a cluster notes its address is missing.
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    nodes = Cluster()
    for _ in range(num_nodes):
        nodes.add_node(num_cpus=1, include_dashboard=False, temp_dir=folder, object_store_memory=OBJECT_STORE_BYTES)
    print(nodes.address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
