# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Places of vLLM's engines: which machine and which GPUs each gets, beside the trainer and on machines of its own."""

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.vllm.placement import Placement
from tests.support.grpo_inputs import cluster_config


def placement(num_nodes: int, gpus: int, cpus: int, per_engine: int, *, is_shared: bool) -> Placement:
    cluster: Any = SimpleNamespace(config=cluster_config(num_nodes, gpus, cpus), placement_group=None)
    return Placement(cluster, per_engine, is_shared=is_shared)


def machine(options: dict[str, Any]) -> int:
    return int(options["scheduling_strategy"].placement_group_bundle_index)


@pytest.mark.parametrize(
    ("is_shared", "gpus", "of_ray"), [(True, [(0, 1, 2, 3), (4, 5, 6, 7)] * 2, 0), (False, [()] * 4, 4)]
)
def test_engines_share_out_the_trainers_gpus_or_get_their_own_of_ray(is_shared: bool, gpus: Any, of_ray: int) -> None:
    places = placement(2, 8, 1, 4, is_shared=is_shared)
    assert places.num_engines == 4
    assert [machine(places.options(number)) for number in range(4)] == [0, 0, 1, 1]
    assert [places.gpus(number) for number in range(4)] == gpus
    for number in range(4):
        assert places.options(number)["num_gpus"] == places.options(number)["num_cpus"] == of_ray


def test_on_cpus_there_is_one_engine_beside_the_trainer_and_one_a_worker_elsewhere() -> None:
    assert placement(3, 0, 4, 0, is_shared=True).num_engines == 1
    own = placement(3, 0, 2, 0, is_shared=False)
    assert own.num_engines == 6
    assert [machine(own.options(number)) for number in range(6)] == [0, 0, 1, 1, 2, 2]
    assert own.options(5)["num_cpus"] == 1
    assert own.options(5)["num_gpus"] == 0


def test_a_place_for_engines_needs_engines() -> None:
    with pytest.raises(ConfigurationError) as error:
        load_grpo_config("grpo_tiny_moe.yaml", ["+cluster.roles.generation={}"], check_paths=False)
    assert error.value.problems == [
        "cluster.roles.generation: expected none with policy.generation.backend megatron, which generates on the"
        " policy's own workers; to remove it: ~cluster.roles.generation"
    ]
    chosen = ["+cluster.roles.generation={cpu_workers_per_node: 2}", "policy.generation.backend=vllm"]
    assert load_grpo_config("grpo_tiny_moe.yaml", chosen, check_paths=False).cluster.roles.keys() == {"generation"}
