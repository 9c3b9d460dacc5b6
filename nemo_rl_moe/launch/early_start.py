# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts Ray and imports modules in workers, in the background while a run reads its data."""

import os
import threading
from concurrent.futures import Future
from contextlib import suppress

import ray

from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import SHORTEST_WAIT, THREADS, threads_per_worker, usable_cores
from nemo_rl_moe.distributed.worker_group import start_processes

IMPORTED_BY_WORKERS = ("torch", "nemo_rl_moe.models.policy.start_rank")
ROUTE_BYTES_OF_A_TOKEN = 1024
"""Upper bound of a token's routed experts in the object store: 61 layers x 8 experts x 2 bytes are 976."""
POSITION_BYTES_OF_A_TOKEN = 320
"""Upper bound of the bytes of each position that a token's indexers choose: 78 layers x 4 bytes are 312."""
MOST_POSITIONS = 2048
"""Number of positions that the indexers of DeepSeek-V3.2 and GLM-5 choose (`index_topk`)."""


def stored_bytes(config: MasterConfig) -> int:
    """Return the maximum number of bytes that a run keeps in Ray's object store at the same time: routed experts, and
    positions of indexers.

    The number is an upper bound, because the model has not been read yet. Asynchronous rollouts keep the responses of
    several steps.
    """
    if not isinstance(config, GRPOMasterConfig) or not config.policy.generation.engine.captures_routes(config):
        return 0
    megatron = config.policy.megatron_cfg
    if not megatron.capture_routing and megatron.routing_replay == "none":
        return 0
    longest = config.policy.max_total_sequence_length
    of_a_token = ROUTE_BYTES_OF_A_TOKEN
    if megatron.indexer_replay != "none":
        of_a_token += POSITION_BYTES_OF_A_TOKEN * min(longest, MOST_POSITIONS)
    return (1 + config.grpo.rollouts.most_lag) * config.responses_per_step * longest * of_a_token


class EarlyCluster:
    """The cluster of a run. A local Ray starts at once, in a thread.

    The operating system ends Ray's servers when the thread that started them ends, so the thread lives until `close`.
    """

    def __init__(self, config: MasterConfig):
        self._config = config
        self._cluster: Future[RayCluster] = Future()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if not ray.is_initialized() and os.environ.get("RAY_ADDRESS", "") in ("", "local"):
            self._thread = threading.Thread(target=self._start_and_stay, name="start of Ray", daemon=True)
            self._thread.start()

    def get(self) -> RayCluster:
        """Wait until the cluster has started, and return it."""
        if self._thread is None and not self._cluster.done():
            self._cluster.set_result(self._start())
        return self._cluster.result()

    @property
    def is_starting(self) -> bool:
        """Whether a local Ray is starting, so that `close` would wait for it."""
        return self._thread is not None and not self._cluster.done()

    def close(self) -> None:
        """Stop Ray. If the cluster existed before, only disconnect from it."""
        if self._thread is None and not self._cluster.done():
            return
        if self._cluster.exception() is None:
            self._cluster.result().shutdown()
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> RayCluster:
        return RayCluster(self._config.cluster, stored_bytes=stored_bytes(self._config))

    def _start_and_stay(self) -> None:
        try:
            cluster = self._start()
        except BaseException as error:
            self._cluster.set_exception(error)
            return
        is_on_cpus = self._config.cluster.gpus_per_node == 0
        # Not with the user's variables, since they may have to be set before libraries are loaded.
        if ray.is_initialized() and is_on_cpus and not self._config.policy.megatron_cfg.env_vars:
            with suppress(Exception):  # without them, the worker group starts its processes itself
                _start_workers(cluster)
        self._cluster.set_result(cluster)
        self._closing.wait()


def _start_workers(cluster: RayCluster) -> None:
    """Start the processes of the first group of workers, and let them import their modules."""
    threads = str(threads_per_worker(usable_cores(), cluster.config.workers_per_node, cluster.num_threads))
    # Numeric libraries read these variables when they are loaded. Workers get the same values later.
    environment = {
        THREADS: threads,
        "MKL_NUM_THREADS": threads,
        **{name: os.environ.get(name, value) for name, value in SHORTEST_WAIT.items()},
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # Actors, not tasks: Ray does not reuse the process of a task for an actor.
    cluster.started_processes = start_processes(cluster)
    for process in cluster.started_processes:
        process.prepare.remote(environment, IMPORTED_BY_WORKERS)
