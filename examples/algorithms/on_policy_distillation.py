# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: the policy samples responses, and learns to give them a larger teacher's probabilities.

The loss is the reverse Kullback-Leibler divergence of the policy from the teacher on the policy's samples (MiniLLM,
arXiv:2306.08543; GKD, arXiv:2306.13649). Its policy gradient has the advantage `log p_teacher - log p_policy` for each
sampled token. An example of an algorithm outside of the package: see docs/adding-an-algorithm.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nemo_rl_moe.algorithms.grpo import update_engine
from nemo_rl_moe.algorithms.grpo_batch import prev_is_current
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.step_metrics import training_metrics
from nemo_rl_moe.algorithms.step_recorder import RunSummary, StepOutcome, StepRecorder, num_training_steps
from nemo_rl_moe.config.algorithm import ALGORITHMS, Algorithm
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import StrictModel
from nemo_rl_moe.config.schema_policy import RoleModelConfig
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.launch.grpo import prepare_rollouts, start_rollouts, start_source
from nemo_rl_moe.launch.rollouts import plan_rollouts
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.models.policy.model_workers import ModelWorkers
from nemo_rl_moe.rollouts.source import RolloutSource
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import rollout_metrics


class DistillationConfig(StrictModel):
    """On-policy distillation."""

    teacher: RoleModelConfig
    """The teacher model. `cluster.roles.teacher` sets the location of its workers."""


class DistillationMasterConfig(GRPOMasterConfig):
    """Configuration of a run: GRPO's and the teacher."""

    opd: DistillationConfig
    """On-policy distillation."""


def policy_is_sampled_as_it_is(config: DistillationMasterConfig) -> Iterator[str]:
    """Sampling: the estimate of the divergence needs samples from the policy's unchanged distribution."""
    generation = config.policy.generation
    if generation.temperature != 1 or generation.top_p != 1 or generation.top_k is not None:
        yield "policy.generation: on-policy distillation needs temperature 1, top_p 1 and top_k null"


def loss_of(config: DistillationMasterConfig) -> PolicyGradientLoss:
    """Return the loss: GRPO's, with advantages of tokens."""
    return PolicyGradientLoss(config.loss_fn, prev_is_current=prev_is_current(config))


def run_distillation(config: DistillationMasterConfig, run: TrainingRun) -> None:
    """Run on-policy distillation from start to end."""
    prepared, teacher_model = prepare_rollouts(config, run), run.prepare_role("teacher")
    loader = prepared.loader(config)
    run.begin(num_training_steps(config.grpo, len(loader)), prepared.fingerprints(config))
    if run.is_complete:
        return
    policy = run.start_policy()
    teacher = run.start_role("teacher", teacher_model)
    run.restore()
    runner = start_rollouts(config, run, policy, prepared)
    recorder = run.open()
    source = start_source(config, run, plan_rollouts(config), runner, prepared, recorder)
    pad_id = pad_token_id(prepared.model.tokenizer)
    distillation = Distillation(config, policy, teacher, runner.engine, source, pad_id)
    run.end(distillation.train(recorder))


@dataclass(frozen=True)
class Distillation:
    """The loop.

    Attributes:
        engine: Generates with the policy's weights.
        source: Trajectories of each step.
        pad_token_id: Token after a sequence's end.
    """

    config: DistillationMasterConfig
    policy: MegatronPolicy
    teacher: ModelWorkers
    engine: GenerationEngine
    source: RolloutSource
    pad_token_id: int

    def train(self, recorder: StepRecorder) -> RunSummary:
        """Train from the run's present step to its last one, and end each step with the recorder."""
        last_step = num_training_steps(self.config.grpo, self.source.steps_per_epoch)
        loss_function = loss_of(self.config)
        step = recorder.state.step
        update_engine(self.engine, self.policy, PhaseClock(), source=self.source, step=step)
        goes_on = step < last_step
        while goes_on:
            clock = PhaseClock()
            with clock.phase("step"):
                trajectories = self.source.next(step, clock).trained
                step += 1
                unweighted = torch.zeros(len(trajectories), 1)
                batch = training_batch(trajectories, unweighted, self.pad_token_id, leave_out_truncated=False)
                batch, reverse_kl = self.with_advantages(batch, clock)
                with clock.phase("train"):
                    result = self.policy.train(batch, loss_function)
                clock.count_tokens("train", result.num_tokens)
                update_engine(self.engine, self.policy, clock, source=self.source, step=step)
            state = self.source.state(step)
            outcome = StepOutcome(
                batches_taken=state.batches_taken,
                result=result,
                training=training_metrics(result, rollout_metrics(trajectories) | {"reverse_kl": reverse_kl}),
                validation={},
                sample_ids=batch.sample_ids,
                samples={"train": trajectories},
                write_more=state.write,
            )
            goes_on = recorder.end_step(outcome, clock, is_last=step == last_step)
        recorder.finish()
        return RunSummary.of(recorder.state, recorder.stopped_for)

    def with_advantages(self, batch: TokenBatch, clock: PhaseClock) -> tuple[TokenBatch, float]:
        """Return the batch with `log p_teacher - log p_policy` as advantages, and its reverse KL."""
        with clock.phase("teacher_logprobs"):
            advantages = self.teacher.logprobs(batch) - batch.columns["generation_logprobs"].values
        advantages = advantages.where(batch.token_mask, 0.0)
        reverse_kl = -float(advantages.sum() / batch.token_mask.sum())
        return batch.with_columns(advantages=per_token(advantages)), reverse_kl


GRPO = ALGORITHMS["grpo"]
ALGORITHM = Algorithm(
    name="opd",
    summary="on-policy distillation from a larger teacher (reverse KL)",
    config_class=DistillationMasterConfig,
    run=run_distillation,
    rules=(*GRPO.rules, policy_is_sampled_as_it_is),
    resume_keys={
        **GRPO.resume_keys,
        "opd.teacher.model_name": "the policy would learn from another teacher",
    },
    loop="grpo",
    updates_per_step=GRPO.updates_per_step,
    needs_reference=GRPO.needs_reference,
    roles=lambda config: {"teacher": config.opd.teacher},
    responses_at_a_time=GRPO.responses_at_a_time,
    losses=lambda config: [loss_of(config)],
)
