# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps of the tiny model in any layout, and everything that a test compares of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece, parameter_pieces
from tests.support.family_models import FAMILY_MODELS
from tests.support.tiny_model import (
    MICROBATCHES,
    parallel_job,
    shard_of_rank,
    tiny_batch,
    tiny_hf_config,
    with_image_tokens,
)

# The second one moves weights that the first has moved, with moments that it has left.
NUM_STEPS = 2
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RunSettings:
    """What is trained.

    Attributes:
        policy: The configuration.
        model: Changes to the tiny model, or the name of one of `FAMILY_MODELS`.
        microbatches: Sequences of each microbatch, over all data-parallel ranks.
        batch: Arguments of `tiny_batch`.
        num_steps: Optimizer steps.
        images: Some tokens are image tokens.
    """

    policy: PolicyConfig
    model: Mapping[str, Any] | str = field(default_factory=dict)
    microbatches: Sequence[Sequence[int]] = MICROBATCHES
    batch: Mapping[str, int] = field(default_factory=dict)
    num_steps: int = NUM_STEPS
    images: bool = False


@dataclass(frozen=True)
class RankRun:
    """What one rank saw.

    Attributes:
        losses: Global loss of each step.
        grad_norms: Gradient norm of each step.
        moe_metrics: MoE metrics of each step.
        pieces: (canonical name, shard rank) to this rank's piece of the trained weights.
        shards: Canonical name to the dimension that is cut, the number of pieces, and whether it holds two halves.
    """

    losses: list[float]
    grad_norms: list[float]
    moe_metrics: list[dict[str, float]]
    pieces: dict[tuple[str, int], Array]
    shards: dict[str, tuple[int | None, int, bool]]


def train_run(settings: RunSettings) -> RankRun:
    """Run on every rank of the job."""
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        losses, norms, metrics = [], [], []
        for step in range(settings.num_steps):
            shard = shard_of_step(trainer, settings, step)
            result = trainer.train([shard], sft_loss)
            losses.append(result.global_loss)
            norms.append(result.grad_norm)
            metrics.append(result.moe_metrics)
        pieces, shards = {}, {}
        for piece in parameter_pieces(trainer.chunks, trainer.config):
            pieces[piece.name, piece.shard_rank] = piece.local.float().cpu().numpy().copy()
            shards[piece.name] = (piece.shard_dimension, piece.num_shards, piece.sections)
        return RankRun(losses, norms, metrics, pieces, shards)


def build_trainer(settings: RunSettings) -> MegatronTrainer:
    """Return the trainer of this rank, from random weights."""
    return MegatronTrainer(settings.policy, hf_config_of(settings.model), None, num_steps=10)


def hf_config_of(model: Mapping[str, Any] | str) -> Any:
    """Return the configuration of the tiny model with changes, or of one of `FAMILY_MODELS`."""
    return FAMILY_MODELS[model].hf_config() if isinstance(model, str) else tiny_hf_config(**model)


def shard_of_step(trainer: MegatronTrainer, settings: RunSettings, step: int) -> Any:
    """Return what this rank trains on in one step."""
    place = trainer.coordinates
    batch = tiny_batch(100 + step, **settings.batch)
    if settings.images:
        batch = with_image_tokens(batch)
    return shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, settings.microbatches)


def full_weights(runs: Sequence[RankRun]) -> dict[str, Array]:
    """Return the whole model out of the ranks' pieces. Replicas must agree in every bit."""
    held: dict[tuple[str, int], Array] = {}
    for run in runs:
        for key, values in run.pieces.items():
            if key in held:
                np.testing.assert_array_equal(held[key], values, err_msg=f"replicas of {key} differ")
            held[key] = values
    shards = {name: shard for run in runs for name, shard in run.shards.items()}
    return {name: _join(name, shard, held) for name, shard in shards.items()}


def _join(name: str, shard: tuple[int | None, int, tuple[int, ...]], held: Mapping[tuple[str, int], Array]) -> Array:
    import torch

    dimension, num_shards, sections = shard
    parts = [torch.from_numpy(held[name, rank]) for rank in range(num_shards)]
    piece = ParameterPiece(name, parts[0], dimension, num_shards, 0, sections, ".experts." in name)
    return piece.join(parts).numpy()


@dataclass(frozen=True)
class Difference:
    """The largest differences between a job's ranks and a run on one rank. Relative for loss and norm."""

    loss: float
    grad_norm: float
    moe_metrics: float
    weights: float


def difference(runs: Sequence[RankRun], reference: RankRun) -> Difference:
    """Compare every rank of a job with a single-rank run."""
    weights, expected = full_weights(runs), full_weights([reference])
    assert weights.keys() == expected.keys()
    wanted = [_independent_of_layout(metrics) for metrics in reference.moe_metrics]
    found = [[_independent_of_layout(metrics) for metrics in run.moe_metrics] for run in runs]
    assert all([metrics.keys() for metrics in steps] == [metrics.keys() for metrics in wanted] for steps in found)
    return Difference(
        loss=max(_relative(run.losses, reference.losses) for run in runs),
        grad_norm=max(_relative(run.grad_norms, reference.grad_norms) for run in runs),
        moe_metrics=max(
            abs(value - expected_metrics[name])
            for steps in found
            for metrics, expected_metrics in zip(steps, wanted, strict=True)
            for name, value in metrics.items()
        ),
        weights=max(float(np.abs(weights[name] - expected[name][: len(weights[name])]).max()) for name in weights),
    )


def _independent_of_layout(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the overload factors compare ranks, so they depend on the layout; everything else does not."""
    return {name: value for name, value in metrics.items() if "overload" not in name}


def _relative(values: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(value - wanted) / abs(wanted) for value, wanted in zip(values, expected, strict=True))
