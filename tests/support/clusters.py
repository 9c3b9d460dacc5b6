# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `cluster` section of a configuration, for tests that start Ray without a run."""

from nemo_rl_moe.config.schema_run import ClusterConfig


def cluster_config(num_nodes: int, gpus_per_node: int, cpu_workers_per_node: int) -> ClusterConfig:
    """Return the machines with so many workers each."""
    return ClusterConfig(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        cpu_workers_per_node=cpu_workers_per_node,
        worker_start_timeout_s=600.0,
        worker_call_timeout_s=600.0,
        max_restarts=0,
        network_interface=None,
        roles={},
    )
