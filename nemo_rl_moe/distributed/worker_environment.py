# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment variables that make a process one rank of a program."""

from collections.abc import Sequence

from nemo_rl_moe.distributed.node_tools import threads_per_worker
from nemo_rl_moe.distributed.worker_process import WorkerPlace


def worker_environment(
    places: Sequence[WorkerPlace], workers_per_node: int, master_port: int, *, is_local: bool
) -> list[dict[str, str]]:
    """The environment variables of each rank.

    Args:
        places: Where each rank runs, neighbours on one node.
        workers_per_node: Ranks on each node.
        master_port: A free port on the node of rank 0.
        is_local: True when all ranks run on the driver's machine.
    """
    environments = []
    for rank, place in enumerate(places):
        local_rank = rank % workers_per_node
        on_this_node = places[rank - local_rank : rank - local_rank + workers_per_node]
        threads = str(threads_per_worker(place.num_cores, workers_per_node))
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(workers_per_node),
            "MASTER_ADDR": "127.0.0.1" if is_local else places[0].node_ip,
            "MASTER_PORT": str(master_port),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            # Every worker sees all GPUs of the run on its node, so that LOCAL_RANK is the CUDA device and NCCL finds
            # the direct ways between them. Empty on CPUs: GPUs that happen to be there stay out of it.
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for neighbour in on_this_node for gpu in neighbour.gpu_ids),
        }
        if not place.gpu_ids:
            environment["TORCHDYNAMO_DISABLE"] = "1"
        environments.append(environment)
    return environments
