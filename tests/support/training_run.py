# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps and responses of the tiny model in any layout, and what a test compares or looks at of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, SamplingParameters
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.generation import MegatronGenerator
from nemo_rl_moe.models.megatron.model.releases import HAS_MOE_METRICS_TRACKER
from nemo_rl_moe.models.megatron.training.step_observer import StepObserver
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece, parameter_pieces
from nemo_rl_moe.models.rank_results import RankTrainResult
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
    with tiny_trainer(settings.policy, settings.model) as trainer:
        steps = (shard_of_step(trainer, settings, step) for step in range(settings.num_steps))
        return weights_of(trainer, [trainer.train([shard], sft_loss) for shard in steps])


def weights_of(trainer: MegatronTrainer, results: Sequence[RankTrainResult]) -> RankRun:
    """Return the results of a rank's steps and its weights after them."""
    pieces, shards = {}, {}
    for piece in parameter_pieces(trainer.chunks, trainer.config):
        pieces[piece.name, piece.shard_rank] = piece.local.float().cpu().numpy().copy()
        shards[piece.name] = (piece.shard_dimension, piece.num_shards, piece.sections)
    losses, norms = [result.global_loss for result in results], [result.grad_norm for result in results]
    return RankRun(losses, norms, [result.moe_metrics for result in results], pieces, shards)


def hf_config_of(model: Mapping[str, Any] | str) -> Any:
    """Return the configuration of the tiny model with changes, or of one of `FAMILY_MODELS`."""
    return FAMILY_MODELS[model].hf_config() if isinstance(model, str) else tiny_hf_config(**model)


def shard_of_step(trainer: MegatronTrainer, settings: RunSettings, step: int) -> Any:
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
    weights, expected = full_weights(runs), full_weights([reference])
    assert weights.keys() == expected.keys()
    wanted = [_independent_of_layout(metrics) for metrics in reference.moe_metrics]
    found = [[_independent_of_layout(metrics) for metrics in run.moe_metrics] for run in runs]
    assert all([metrics.keys() for metrics in steps] == [metrics.keys() for metrics in wanted] for steps in found)
    return Difference(
        loss=max(_relative(run.losses, reference.losses) for run in runs),
        grad_norm=max(_relative(run.grad_norms, reference.grad_norms) for run in runs),
        moe_metrics=max(
            (
                abs(value - expected_metrics[name])
                for steps in found
                for metrics, expected_metrics in zip(steps, wanted, strict=True)
                for name, value in metrics.items()
            ),
            default=0.0,
        ),
        weights=max(float(np.abs(weights[name] - expected[name][: len(weights[name])]).max()) for name in weights),
    )


def difference_by_rank(runs: Sequence[RankRun], others: Sequence[RankRun]) -> Difference:
    """Return the largest differences between two jobs of one layout, rank by rank."""
    weights, expected = full_weights(runs), full_weights(others)
    assert weights.keys() == expected.keys()
    metrics = [
        (values, wanted)
        for run, other in zip(runs, others, strict=True)
        for values, wanted in zip(run.moe_metrics, other.moe_metrics, strict=True)
    ]
    assert all(values.keys() == wanted.keys() for values, wanted in metrics)
    # A comparison with NaN is never true, so that it would be nobody's largest difference.
    numbers = [*(run.losses + run.grad_norms for run in others), *(list(wanted.values()) for _, wanted in metrics)]
    assert all(np.isfinite(each).all() for each in (*numbers, *expected.values(), *weights.values()))
    return Difference(
        loss=max(_relative(run.losses, other.losses) for run, other in zip(runs, others, strict=True)),
        grad_norm=max(_relative(run.grad_norms, other.grad_norms) for run, other in zip(runs, others, strict=True)),
        moe_metrics=max(
            (abs(value - wanted[name]) for found, wanted in metrics for name, value in found.items()), default=0
        ),
        weights=max(float(np.abs(weights[name] - expected[name]).max()) for name in weights),
    )


def _independent_of_layout(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the overload factors compare ranks, so they depend on the layout; everything else does not."""
    return {name: value for name, value in metrics.items() if "overload" not in name}


def _relative(values: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(value - wanted) / abs(wanted) for value, wanted in zip(values, expected, strict=True))


WEIGHT_VERSION = 3
PROMPT_LENGTHS = (3, 7, 1, 12, 7, 5)
SAMPLING = SamplingParameters(max_new_tokens=11, temperature=0.8, stop_token_ids=(5, 17, 40))


@dataclass(frozen=True)
class GenerationRun:
    """What is generated.

    Attributes:
        policy: The configuration.
        sampling: How.
        shares: Prompts of each data-parallel rank.
        max_batch_size: Most sequences at a time.
        model: Changes to the tiny model, or the name of one of `FAMILY_MODELS`.
    """

    policy: PolicyConfig
    sampling: SamplingParameters = SAMPLING
    shares: Sequence[Sequence[int]] = (tuple(range(len(PROMPT_LENGTHS))),)
    max_batch_size: int | None = None
    model: Mapping[str, Any] | str = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """A generated sequence as it crosses processes."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    is_truncated: bool


def prompts() -> tuple[tuple[int, ...], ...]:
    generator = np.random.default_rng(11)
    return tuple(tuple(generator.integers(1, 64, length).tolist()) for length in PROMPT_LENGTHS)


def request_of(indices: Sequence[int], sampling: SamplingParameters = SAMPLING) -> GenerationBatch:
    """Return some of the prompts, each with a seed of its own."""
    every = prompts()
    return GenerationBatch(tuple(every[index] for index in indices), tuple(100 + index for index in indices), sampling)


def build_trainer(policy: PolicyConfig, model: Mapping[str, Any] | str | None = None) -> MegatronTrainer:
    """Return the trainer of this rank, from random weights."""
    return MegatronTrainer(policy, hf_config_of(model or {}), None, num_steps=10)


@contextmanager
def tiny_trainer(
    policy: PolicyConfig, model: Mapping[str, Any] | str = {}, **options: Any
) -> Iterator[MegatronTrainer]:
    """Give the trainer of this rank, from random weights, of the tiny model with changes or of a family's."""
    with parallel_job(policy):
        yield MegatronTrainer(policy, hf_config_of(model), None, num_steps=10, **options)


def generator_of(trainer: MegatronTrainer, tokenizer: Any = None) -> MegatronGenerator:
    return MegatronGenerator(trainer.chunks, trainer.config, tokenizer, trainer.device)


def generate_run(run: GenerationRun) -> dict[int, Response]:
    """Run on every rank of the job; the responses of this rank by the number of their prompt."""
    with tiny_trainer(run.policy, run.model) as trainer:
        share = run.shares[trainer.coordinates.data_parallel_rank]
        sequences = generator_of(trainer).generate(
            request_of(share, run.sampling), weight_version=WEIGHT_VERSION, max_batch_size=run.max_batch_size
        )
        assert len(sequences) == (len(share) if trainer.coordinates.reports_loss else 0)
        assert all(sequence.weight_version == WEIGHT_VERSION for sequence in sequences)
        return {index: _response(sequence) for index, sequence in zip(share, sequences, strict=False)}


def _response(sequence: GeneratedSequence) -> Response:
    return Response(sequence.token_ids.tolist(), sequence.logprobs, sequence.is_truncated)


def evaluated_logprobs(trainer: MegatronTrainer, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Return what an evaluation forward says of the tokens of a response."""
    tokens = torch.tensor([[*prompt, *response]])
    batch = TokenBatch(tokens, torch.tensor([tokens.shape[1]]), torch.ones_like(tokens, dtype=torch.bool), ("one",))
    return trainer.logprobs([batch])[0][0, len(prompt) :]


Kind = TypeVar("Kind", bound=StepObserver)


def observer_of(trainer: MegatronTrainer, kind: type[Kind]) -> Kind:
    (found,) = (observer for observer in trainer.observers if isinstance(observer, kind))
    return found


def record_auxiliary_loss(name: str, value: Tensor, layer_number: int, num_layers: int) -> None:
    """Add to a layer's auxiliary loss as a router does; `layer_number` counts from 1 as in Megatron."""
    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().record(name, value, layer_number, num_layers)
        return
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

    save_to_aux_losses_tracker(name, value, layer_number, num_layers)


@dataclass(frozen=True)
class SpoiledLoss:
    """The loss of fine-tuning with something wrong in the microbatches of one length.

    Attributes:
        kind: `loss`: its value alone is infinite; `gradient`: its gradient is NaN; `both`.
        only_width: Number of targets a row of the microbatches that are spoiled; 0: all.
    """

    kind: str
    only_width: int = 0

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = sft_loss(inputs)
        if self.only_width and inputs.logprobs.shape[1] != self.only_width:
            return outputs
        loss = outputs.loss
        if self.kind == "gradient":
            spoiled = inputs.logprobs.sum() * 0
            spoiled.register_hook(lambda gradient: gradient * math.nan)
            loss = loss + spoiled
        else:
            loss = loss + (math.inf if self.kind == "loss" else loss * math.nan)
        return LossOutputs(loss, outputs.metrics)
