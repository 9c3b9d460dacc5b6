# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests give to parts of GRPO: sections of a configuration, trajectories, and rewards with their advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import compute_advantages
from nemo_rl_moe.algorithms.custom_estimator import find_estimator
from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.config.environments.verifiers_v1 import VerifiersV1Config
from nemo_rl_moe.config.files import BASE_OF, exemplars_folder, merge, read_with_defaults
from nemo_rl_moe.config.mixtures import with_mixtures
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_grpo import AdvantageConfig
from nemo_rl_moe.config.schema_run import ClusterConfig
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence, Trajectory


def tokens_of(
    given: Sequence[int],
    sampled: Sequence[int] = (),
    logprobs: Sequence[float] | None = None,
    *,
    version: int = 0,
    routed_experts: StoredRows | None = None,
    model_inputs: Mapping[str, ModelInput] | None = None,
) -> TokenSequence:
    """Return a sequence of given tokens and sampled ones behind them, by default of log-probability -0.5."""
    before, after = len(given), len(sampled)
    return TokenSequence(
        token_ids=np.array([*given, *sampled], dtype=np.int64),
        loss_mask=np.array([False] * before + [True] * after),
        logprobs=np.array([0.0] * before + list([-0.5] * after if logprobs is None else logprobs), dtype=np.float32),
        weight_versions=np.array([NOT_SAMPLED] * before + [version] * after),
        routed_experts=routed_experts,
        model_inputs=model_inputs or {},
    )


def only_sequence(trajectory: Trajectory) -> TokenSequence:
    (sequence,) = trajectory.sequences
    return sequence


def sampled_ids(trajectory: Trajectory) -> list[int]:
    """Return the trained tokens of a trajectory of one sequence."""
    found = only_sequence(trajectory)
    ids: list[int] = found.token_ids[found.loss_mask].tolist()
    return ids


def with_tokens(trajectory: Trajectory, *sequences: TokenSequence) -> Trajectory:
    return replace(trajectory, sequences=sequences)


def assert_same_trajectories(found: Sequence[Trajectory], expected: Sequence[Trajectory]) -> None:
    """Assert that trajectories are equal in all but the places of their routed experts."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert replace(one, sequences=()) == replace(other, sequences=())
        assert one.num_sequences == other.num_sequences
        for ours, theirs in zip(one.sequences, other.sequences, strict=True):
            for each in fields(TokenSequence):
                if each.name != "routed_experts":
                    ours_of, theirs_of = vars(ours)[each.name], vars(theirs)[each.name]
                    np.testing.assert_array_equal(ours_of, theirs_of, each.name)
            assert (ours.routed_experts is None) == (theirs.routed_experts is None)


def inputs_of_rewards(
    rewards: Tensor, config: AdvantageConfig, named: Mapping[str, tuple[float, Tensor]] | None = None
) -> EstimatorInputs:
    """Return the inputs of responses of three tokens each, none of which failed.

    Args:
        rewards: Of each response, one row a group.
        config: The section.
        named: Weight and rewards of each name.
    """
    return EstimatorInputs(
        rewards=rewards,
        takes_part=torch.ones_like(rewards, dtype=torch.bool),
        config=config,
        named_rewards={name: values for name, (_, values) in (named or {}).items()},
        reward_weights={name: weight for name, (weight, _) in (named or {}).items()},
        group_ids=tuple(f"group:{number}" for number in range(len(rewards))),
        num_tokens=torch.full(rewards.shape, 3),
        token_mask=torch.ones(*rewards.shape, 3, dtype=torch.bool),
        token_turns=torch.zeros(*rewards.shape, 3, dtype=torch.long),
        turn_rewards=torch.zeros(*rewards.shape, 1, dtype=torch.float64),
    )


def advantages_of_rewards(rewards: Tensor, config: AdvantageConfig) -> Tensor:
    return compute_advantages(find_estimator(config.name), inputs_of_rewards(rewards, config))


def advantages_of_named(named: Tensor, weights: Sequence[float], config: AdvantageConfig) -> Tensor:
    pairs = {f"reward_{place}": pair for place, pair in enumerate(zip(weights, named, strict=True))}
    return compute_advantages(find_estimator(config.name), inputs_of_rewards(named.sum(dim=0), config, pairs))


Section = TypeVar("Section", bound=BaseModel)


def environment_section(
    reward: Mapping[str, Any] | None, driver: Mapping[str, Any] | None = None, **changes: Any
) -> EnvironmentConfig:
    """Makes a section. One worker, with time enough on a busy machine."""
    shipped = read_with_defaults(exemplars_folder() / BASE_OF["grpo"])["env"]
    patient = {"num_workers": 1, "timeout_s": 60.0}
    own = {
        "driver": {"kind": "single_turn"} if driver is None else driver,
        "reward": reward if reward is None or reward["kind"] == "reward_model" else {**patient, **reward},
    }
    values = with_mixtures({"env": merge(shipped, {"score_truncated": False, **changes, **own})})["env"]
    return EnvironmentConfig.model_validate({key: value for key, value in values.items() if key != "mixture"})


def reward_section(kind: str, **keys: Any) -> WorkerRewardConfig:
    return _of_type(WorkerRewardConfig, environment_section({"kind": kind, **keys}).reward)


def tools_section(**keys: Any) -> ToolsConfig:
    limits = {"num_workers": 1, "max_result_characters": 1000, "memory_mb": 100, **keys.pop("limits", {})}
    found = environment_section({"kind": "exact"}, {"kind": "tools", "limits": limits, **keys})
    return _of_type(ToolsConfig, found.driver)


def verifiers_section(name: str, **arguments: Any) -> VerifiersConfig:
    found = environment_section(None, {"kind": "verifiers", "id": name, "arguments": arguments})
    return _of_type(VerifiersConfig, found.driver)


def verifiers_v1_section(name: str, **keys: Any) -> VerifiersV1Config:
    return _of_type(VerifiersV1Config, environment_section(None, {"kind": "verifiers_v1", "id": name, **keys}).driver)


def openenv_section(**keys: Any) -> OpenEnvConfig:
    return _of_type(OpenEnvConfig, environment_section(None, {"kind": "openenv", **keys}).driver)


def _of_type(kind: type[Section], found: object) -> Section:
    assert isinstance(found, kind)
    return found


def cluster_config(num_nodes: int, gpus_per_node: int, cpu_workers_per_node: int) -> ClusterConfig:
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
