# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core workers beside a trainer as its engine, started for a test, and what it is asked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.registry import EngineSetup
from nemo_rl_moe.models.hf_files import find_model, load_hf_config
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.models.policy.separate_engine import SeparateEngine, start_copies
from tests.functional import grpo_runs
from tests.support.scripted_rollouts import generate_all

ROUNDING = 5e-6
"""Nats: batches of other sizes, and ranks with other layouts, add up in another order."""
SAMPLED = SamplingParameters(max_new_tokens=12, temperature=1.0, stop_token_ids=(1,))
GREEDY = SamplingParameters(max_new_tokens=12, temperature=0.0)


def configuration(folder: Path, num_copies: int, *more: str) -> GRPOMasterConfig:
    """Two ranks of the trainer, with half of the experts each; with further overrides."""
    overrides = grpo_runs.settings(
        folder,
        folder,
        policy__generation__backend="megatron_separate",
        policy__megatron_cfg__expert_model_parallel_size=2,
        policy__train_global_batch_size=8,
        policy__train_micro_batch_size=2,
        policy__megatron_cfg__optimizer__lr=0.01,
        policy__megatron_cfg__optimizer__min_lr=0.01,
    )
    roles = f"+cluster.roles.{GENERATION_ROLE}={{cpu_workers_per_node: {num_copies}}}"
    return load_grpo_config(grpo_runs.EXEMPLAR, [*overrides, roles, *more], check_paths=False)


@contextmanager
def started(config: GRPOMasterConfig) -> Iterator[tuple[MegatronPolicy, SeparateEngine, WorkerGroup[MegatronModel]]]:
    """The policy, the engine, and its workers."""
    source = find_model(config.policy)
    cluster = RayCluster(config.cluster)
    places = RayCluster(config.cluster.place_of(GENERATION_ROLE), beside=cluster)
    policy = MegatronPolicy(config, cluster, seed=1, num_steps=9, source=source, model_files={})
    hf_config = load_hf_config(str(source.folder()))
    setup = EngineSetup(config, cluster, source, hf_config, None, policy, print, places)
    copies = start_copies(setup, places)
    engine = SeparateEngine(copies, max_batch_size=5, vocabulary_size=hf_config.vocab_size)
    try:
        yield policy, engine, copies
    finally:
        engine.shutdown()
        policy.shutdown()
        places.shutdown()
        cluster.shutdown()


def requests(sampling: SamplingParameters) -> list[GenerationRequest]:
    """Prompts of different lengths."""
    generator = np.random.default_rng(5)
    return [
        GenerationRequest(tuple(generator.integers(2, 45, 1 + index % 4).tolist()), 70 + index, sampling)
        for index in range(12)
    ]


def sequences(engine: GenerationEngine, asked: Sequence[GenerationRequest]) -> list[GeneratedSequence]:
    found = dict(generate_all(engine, asked))
    return [found[index] for index in range(len(asked))]
