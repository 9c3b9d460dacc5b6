# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measurements of routing on a sample of a step's sequences, by further log-probability passes.

They show how much of the mismatch between rollout and training comes from routing, how far a router disagrees with
itself if only the composition of batches changes, and how far routing has moved. The policy is not changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.capture_writer import CapturedRow, CaptureWriter, MeasuredPass, captured_rows
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig, RoutingMeasurementsConfig
from nemo_rl_moe.distributed.batch import StoredColumn, TokenBatch
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.metrics import PhaseClock, with_prefix
from nemo_rl_moe.models.images import sequence_inputs
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.metrics.metric_keys import with_moe_prefix
from nemo_rl_moe.routing.metrics.mismatch_split import RatioLimits, gap_metrics, split_gap, split_metrics
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

PHASE = "routing_measurements"
NOISE_DIVISOR = 8
MOST_SCORED_TOKENS, MOST_SCORED_SEQUENCES = 2048, 8


@dataclass(frozen=True)
class _Measured:
    """Results of the passes before the updates of a step. Later passes are compared with them.

    Attributes:
        capture: Experts of the rollout, if there are any.
        generation: Log-probabilities of the trained tokens by the engine that sampled them.
        replayed: Log-probabilities of the trainer with the experts of the rollout.
    """

    sample: TokenBatch
    own_capture: StoredColumn
    capture: StoredColumn | None
    generation: Float[np.ndarray, " tokens"]
    replayed: Float[np.ndarray, " tokens"] | None


class RoutingMeasurements(RunObserver):
    """Observer that measures routing in some steps of a run.

    Args:
        seed: Seed that, together with the step, chooses the sequences to measure.
        updates_per_step: Number of updates per step. If it is above 1, the policy is also measured at the end of a
            step.
        replays: Whether training replays the experts of the rollout, so that the loss uses log-probabilities with these
            experts.
        has_reference: Whether the policy keeps a reference model.
        capture: Writer of the measured sequences, if they are saved.
    """

    def __init__(
        self,
        config: RoutingMeasurementsConfig,
        loss: PolicyGradientLossConfig,
        policy: "MegatronPolicy",
        engine: GenerationEngine,
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        updates_per_step: int,
        replays: bool,
        has_reference: bool,
        capture: CaptureWriter | None = None,
    ):
        self._config, self._policy, self._engine = config, policy, engine
        self._limits = RatioLimits(1 - loss.ratio_clip_min, 1 + loss.ratio_clip_max)
        self._temperature, self._max_tokens, self._seed = temperature, max_tokens, seed
        self._several_updates = updates_per_step > 1
        self._replays, self._has_reference = replays, has_reference
        self._capture = capture
        self._before: _Measured | None = None

    def before_update(
        self, step: int, batch: TokenBatch, trajectories: Sequence[Trajectory], clock: PhaseClock
    ) -> dict[str, float]:
        """Measure the policy that sampled a step's tokens, if the step is due.

        Args:
            batch: The step's batch, with the routed experts of the rollouts if the engine reports them.
            trajectories: Trajectories of the batch, needed if a capture is saved.
            clock: Clock on which the phase `routing_measurements` is timed.

        Returns:
            `moe/routing_split/...`, `moe/routing_noise/...` and, with a reference model, `moe/routing_drift/...`.
        """
        self._before = None
        every = self._config.every_n_steps
        if every is None or step % every != 0:
            return {}
        with clock.phase(PHASE):
            chosen = sampled_sequences(batch, self._config.share_of_tokens, (self._seed, step))
            if not chosen:
                return {}
            sample = batch.select(chosen)
            captured: list[CapturedRow] = []
            if self._capture is not None:
                rows = captured_rows(trajectories)
                captured = [rows[row] for row in chosen]
            return with_moe_prefix(self._measure(step, sample, captured))

    def after_update(self, result: TrainResult, clock: PhaseClock) -> dict[str, float]:
        """Measure the policy after the step's updates, if it was measured before them.

        Returns:
            `moe/routing_drift/...`, and after several updates `moe/routing_split_end/...`.
        """
        before = self._before
        if before is None:
            return {}
        with clock.phase(PHASE):
            moved = self._policy.compare_routes(before.sample.with_stored(ROUTED_EXPERTS, before.own_capture))
            metrics = with_prefix("routing_drift", moved.differences("of_step"))
            if self._several_updates and before.replayed is not None and before.capture is not None:
                own = _of_targets(moved.logprobs, before.sample)
                replaying = before.sample.with_stored(ROUTED_EXPERTS, before.capture)
                replayed = _of_targets(self._policy.logprobs(replaying), before.sample)
                parts = split_gap(before.generation, before.replayed, own, replayed)
                metrics |= with_prefix("routing_split_end", split_metrics(parts, self._limits))
            return with_moe_prefix(metrics)

    def after_refit(self, clock: PhaseClock) -> dict[str, float]:
        """Measure the engine's noise floor, if the step is measured and the engine scores tokens.

        The same sequences are scored together and one at a time, both with the new weights. The previous weights cannot
        be used, because an engine that sleeps during training does not keep them.

        Returns:
            `moe/routing_noise/{mean_abs,max_abs,kl}_engine`.
        """
        before, engine = self._before, self._engine
        if before is None or engine.shares_weights or not engine.can_score:
            return {}
        rows = self._scored(before.sample)
        if not rows:
            return {}
        sequences = [before.sample.input_ids[row, : int(before.sample.lengths[row])].tolist() for row in rows]
        inputs = sequence_inputs(before.sample, rows)
        with clock.phase(PHASE):
            try:
                temperature = self._temperature or 1.0
                together = engine.score(sequences, temperature, *inputs)[0]
                own = [[each] for each in inputs] if inputs else [[] for _ in sequences]
                alone = [
                    engine.score([sequence], temperature, *of_sequence)[0][0]
                    for sequence, of_sequence in zip(sequences, own, strict=True)
                ]
            except GenerationError:  # an engine was lost; the next refit replaces it
                return {}
            gap = gap_metrics(np.concatenate(alone).astype(np.float64) - np.concatenate(together))
            return {f"moe/routing_noise/{name}_engine": gap[name] for name in ("mean_abs", "max_abs", "kl")}

    def _scored(self, sample: TokenBatch) -> list[int]:
        """Return the rows of the sequences that the engine scores to measure its noise floor, the shortest first."""
        # An engine computes the logits of all scored tokens. For thousands of tokens this takes gigabytes. It also
        # samples one more token, and the longest sequences have no room for it.
        order = sample.lengths.argsort().tolist()
        lengths = sample.lengths[order]
        fitting = (lengths.cumsum(0) <= MOST_SCORED_TOKENS) & (lengths < self._max_tokens)
        return order[: int(fitting.sum())][:MOST_SCORED_SEQUENCES]

    def _measure(self, step: int, sample: TokenBatch, captured: Sequence[CapturedRow]) -> dict[str, float]:
        bare = sample.without_stored(ROUTED_EXPERTS)
        logprobs, own_capture = self._policy.logprobs_and_routes(bare)
        if own_capture is None:  # a model without MoE layers
            return {}
        own = _of_targets(logprobs, sample)
        generation = _of_targets(sample.columns["generation_logprobs"].values, sample)
        metrics = self._noise(bare.with_stored(ROUTED_EXPERTS, own_capture), logprobs)
        if self._has_reference:
            asked = bare.without_stored(INDEXER_POSITIONS).with_stored(ROUTED_EXPERTS, own_capture)
            reference = self._policy.compare_routes(asked, reference=True)
            metrics |= with_prefix("routing_drift", reference.differences("from_reference"))
        capture, replayed, of_replay = sample.stored.get(ROUTED_EXPERTS), None, None
        if capture is not None:
            of_replay = self._policy.logprobs(sample)
            replayed = _of_targets(of_replay, sample)
            parts = split_gap(generation, replayed, own)
            metrics |= with_prefix("routing_split", split_metrics(parts, self._limits))
            # `in_force` is the gap in the loss. Under replay this gap has no part of routing.
            in_force = gap_metrics(parts["numerics"] if self._replays else parts["total"])
            metrics |= {f"routing_split/{name}_in_force": in_force[name] for name in ("mean_abs", "kl")}
            metrics["routing_split/tokens"] = float(len(own))
        if self._capture is not None:
            again = self._policy.logprobs_and_routes(bare.select(_noise_rows(bare)), one_at_a_time=True)
            own_pass, repeated = MeasuredPass(logprobs, own_capture), MeasuredPass(*again)
            biases = self._policy.expert_biases()
            self._capture.write(step, sample, captured, own_pass, of_replay, repeated, biases)
        self._before = _Measured(bare, own_capture, capture, generation, replayed)
        return metrics

    def _noise(self, own: TokenBatch, logprobs: Float[Tensor, "sequences tokens"]) -> dict[str, float]:
        """Return the trainer's noise floor: how experts and log-probabilities change if each sequence is one batch."""
        rows = _noise_rows(own)
        part = own.select(rows)
        again = self._policy.compare_routes(part, one_at_a_time=True)
        before = _of_targets(logprobs[rows, : part.input_ids.shape[1]], part)
        gap = gap_metrics(_of_targets(again.logprobs, part) - before)
        noise = {f"{name}_trainer": gap[name] for name in ("mean_abs", "max_abs", "kl")}
        return with_prefix("routing_noise", again.differences("trainer") | noise)


def sampled_sequences(batch: TokenBatch, share: float, seed: Sequence[int]) -> list[int]:
    """Return the sorted rows of random sequences which together have at least a share of the batch's trained tokens.

    Args:
        share: Share of the trained tokens, above 0 and at most 1.
    """
    trained = batch.token_mask[:, 1:].sum(1).numpy()
    order = np.random.default_rng(list(seed)).permutation(np.flatnonzero(trained))
    if not len(order):
        return []
    enough = int(np.searchsorted(trained[order].cumsum(), share * trained.sum())) + 1
    return sorted(map(int, order[:enough]))


def _noise_rows(sample: TokenBatch) -> list[int]:
    """Return the rows that measure the noise floor: only a part of the sample, because one batch per row is slow."""
    return list(range(-(-len(sample) // NOISE_DIVISOR)))


def _of_targets(values: Float[Tensor, "sequences tokens"], sample: TokenBatch) -> Float[np.ndarray, " tokens"]:
    """Return the values of the trained tokens, which all have a predecessor."""
    found: Float[np.ndarray, " tokens"] = values[:, 1:][sample.token_mask[:, 1:]].double().numpy()
    return found
