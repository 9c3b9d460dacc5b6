# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import socket

import pytest
import ray

from nemo_rl_moe.config.schema_run import ClusterConfig
from nemo_rl_moe.distributed.cluster import RayCluster, describe_shortage, node_resources
from nemo_rl_moe.errors import ConfigurationError
from tests.support.grpo_inputs import cluster_config


def test_workers_of_a_cluster():
    on_cpus, on_gpus = cluster_config(2, 0, 3), cluster_config(2, 8, 3)
    assert (on_cpus.workers_per_node, on_cpus.world_size, node_resources(on_cpus)) == (3, 6, {"CPU": 3})
    assert (on_gpus.workers_per_node, on_gpus.world_size, node_resources(on_gpus)) == (8, 16, {"CPU": 8, "GPU": 8})


@pytest.mark.parametrize(
    ("config", "nodes"),
    [
        (cluster_config(1, 0, 4), [{"CPU": 4}]),
        (cluster_config(1, 8, 1), [{"CPU": 2}, {"CPU": 64, "GPU": 8}]),
        (cluster_config(2, 4, 1), [{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 4}, {"CPU": 64}]),
    ],
)
def test_a_cluster_that_is_large_enough(config: ClusterConfig, nodes: list[dict[str, float]]):
    assert describe_shortage(config, nodes) == []


ON_CPUS = (
    "the Ray cluster has 0; nearest: cluster.gpus_per_node=0, which trains on CPUs, with parallel sizes of"
    " policy.megatron_cfg, such as expert_model_parallel_size, that divide cluster.cpu_workers_per_node"
)


@pytest.mark.parametrize(
    ("config", "nodes", "problem"),
    [
        (cluster_config(1, 8, 1), [{"CPU": 2}], f"cluster.gpus_per_node: asked for 8 GPUs on one node, {ON_CPUS}"),
        (cluster_config(1, 1, 1), [{"CPU": 2}], f"cluster.gpus_per_node: asked for 1 GPU on one node, {ON_CPUS}"),
        (
            cluster_config(2, 8, 1),
            [{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 4}],
            "cluster.gpus_per_node: asked for 8 GPUs on each of 2 nodes, the Ray cluster has 8, 4 on its 2 nodes;"
            " nearest: cluster.gpus_per_node=4",
        ),
        (
            cluster_config(4, 8, 1),
            [{"CPU": 64, "GPU": 8}],
            "cluster.num_nodes: got 4, the Ray cluster has 1; nearest: cluster.num_nodes=1",
        ),
        (
            cluster_config(1, 0, 16),
            [{"CPU": 4}],
            "cluster.cpu_workers_per_node: 16 workers on one node need a CPU each, the Ray cluster has 4; nearest:"
            " cluster.cpu_workers_per_node=4",
        ),
        (
            cluster_config(1, 8, 1),
            [{"CPU": 4, "GPU": 8}],
            "cluster.gpus_per_node: 8 workers on one node need a CPU each, the Ray cluster has 4; nearest:"
            " cluster.gpus_per_node=4",
        ),
    ],
)
def test_a_shortage_is_named(config: ClusterConfig, nodes: list[dict[str, float]], problem: str):
    assert describe_shortage(config, nodes) == [problem]


def refusal(*sizes: int) -> str:
    with pytest.raises(ConfigurationError) as error:
        RayCluster(cluster_config(*sizes))
    assert not ray.is_initialized()
    return str(error.value)


def test_one_machine_is_not_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert refusal(3, 8, 1) == (
        "cluster.num_nodes: got 3, but without RAY_ADDRESS a run has only this machine: set cluster.num_nodes=1, or"
        " start Ray on all machines (ray start) and set RAY_ADDRESS"
    )


def test_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    assert refusal(1, 0, 2).startswith("RAY_ADDRESS: got ray://10.0.0.1:10001, expected host:port or auto;")


@pytest.mark.parametrize("address", ["no port here", "127.0.0.1:{free_port}"])
def test_no_cluster_at_the_address(monkeypatch: pytest.MonkeyPatch, address: str):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = address.format(free_port=probe.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", address)
        text = refusal(1, 0, 2)
    assert text.startswith(f"RAY_ADDRESS: cannot join a Ray cluster at {address} (")
    assert "\n" not in text
