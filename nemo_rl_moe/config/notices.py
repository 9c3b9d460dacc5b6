# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Notices on the console, before training, about settings that are allowed but questionable.

Each notice is a pure function that yields lines. Errors are reported by the rules in `checks.py`.
"""

from collections.abc import Iterator, Mapping

from nemo_rl_moe.config.algorithm import algorithm_of, metric_in_force, roles_of
from nemo_rl_moe.config.checks_run import LoopMasterConfig, chooses_by_validation, loop_section
from nemo_rl_moe.config.role_keys import key_of_role, lines_on_trained_models
from nemo_rl_moe.config.schema import (
    DPOMasterConfig,
    GRPOMasterConfig,
    MasterConfig,
    PairMasterConfig,
    RMMasterConfig,
    SFTMasterConfig,
)
from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import PolicyConfig, TrainedRoleConfig
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import counted


def notices(config: LoopMasterConfig, num_steps: int, num_samples: int | None = None) -> list[str]:
    """Return a line for each notice of a run. `num_samples` is the number of samples in an epoch, or None if epochs are
    not divided into batches."""
    found = [line for notice in NOTICES for line in notice(config, num_steps)] + rates_for_adapters(config)
    return found if num_samples is None else [*found, *left_out_of_an_epoch(config, num_steps, num_samples)]


LEAST_SHARE_LEFT_OUT = 0.01
"""If at least this share of an epoch fills no batch, it is reported."""


def left_out_of_an_epoch(config: LoopMasterConfig, num_steps: int, num_samples: int) -> Iterator[str]:
    """Warn of samples that each epoch skips because they fill no batch."""
    kind, key = "samples", "policy.train_global_batch_size"
    size = config.policy.train_global_batch_size
    if isinstance(config, GRPOMasterConfig):
        kind, key, size = "prompts", "grpo.num_prompts_per_step", config.grpo.num_prompts_per_step
    elif isinstance(config, PairMasterConfig):
        kind = "pairs"
    left_out, whole = num_samples % size, num_samples // size
    if left_out >= LEAST_SHARE_LEFT_OUT * num_samples > 0 and num_steps >= whole:
        yield (
            f"{left_out} of {num_samples} {kind} of each epoch are left out: a step takes {size} of them ({key}), and"
            f" the last {left_out} fill no step"
        )


def epochs_end_the_run(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn if the passes over the data end the run before its maximum number of steps."""
    name, loop = loop_section(config)
    if loop.max_num_steps is not None and num_steps < loop.max_num_steps:
        yield (
            f"{name}.max_num_epochs: {loop.max_num_epochs} ends the run after {counted(num_steps, 'step')}, before"
            f" {name}.max_num_steps: {loop.max_num_steps}; more epochs make it longer"
        )


def warmup_outlasts_the_run(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn if the warm-up of the policy or of another trained model is longer than the run."""
    algorithm = algorithm_of(config)
    of_policy = config.policy.megatron_cfg.scheduler.lr_warmup_iters, algorithm.num_policy_updates(config, num_steps)
    warmups = {"policy.megatron_cfg.scheduler": of_policy}
    for role, model in roles_of(config).items():
        if isinstance(model, TrainedRoleConfig):
            warmups[key_of_role(config, role)] = model.lr_warmup_iters, algorithm.num_updates(config, num_steps)
    for key, (warmup, updates) in warmups.items():
        if 0 < updates < warmup:
            yield (
                f"the learning rate is still warming up when the run ends: {updates} of the {warmup} steps of"
                f" {key}.lr_warmup_iters, so the learning rate ends at {updates / warmup:.0%} of lr"
            )


def policy_never_trains(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn if the run ends while the critic still trains alone."""
    if isinstance(config, PPOMasterConfig) and config.ppo.policy_training_start_step >= num_steps:
        yield (
            f"the policy never trains: ppo.policy_training_start_step is {config.ppo.policy_training_start_step}, and"
            f" the run has {num_steps} steps (grpo.max_num_steps, grpo.max_num_epochs of the data)"
        )


def validation_is_off(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn of settings for validation if there is no validation data."""
    if config.data.validation is not None:
        return
    name, loop = loop_section(config)
    idle = [f"{name}.{key}" for key in ("val_period", "val_at_start", "val_at_end") if getattr(loop, key)]
    consequence = ""
    if chooses_by_validation(config):
        idle.append(f"checkpointing.metric_name {metric_in_force(config)}")
        consequence = "; the newest checkpoints are kept"
    if idle:
        yield f"data.validation is null: there is no validation; without effect: {', '.join(idle)}{consequence}"


def metric_may_be_misspelt(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn if the metric's name is unknown and similar to a metric that runs have."""
    metric = config.checkpointing.metric_name
    if not config.checkpointing.enabled or metric is None or metric in _METRICS:
        return
    if (meant := nearest(metric, _METRICS, cutoff=0.85)) is not None:
        yield (
            f"checkpointing.metric_name: {metric}, which only code of your own can measure; without it checkpoints are"
            f" not ranked{did_you_mean(meant)}"
        )


def microbatch_size_is_not_used(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn of a number of samples in a microbatch if microbatches are filled by tokens."""
    policy = config.policy
    size = policy.train_micro_batch_size
    for name in ("sequence_packing", "dynamic_batching"):
        if size > 1 and getattr(policy, name).enabled:
            yield (
                f"policy.train_micro_batch_size: {size} has no effect: with policy.{name}.enabled true, a microbatch"
                f" has as many samples as fit into policy.{name}.train_mb_tokens"
            )


def transport_is_not_used(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn of a weight transport if the engine is the trainer itself."""
    if isinstance(config, GRPOMasterConfig):
        generation = config.policy.generation
        if generation.backend == "megatron" and generation.weight_transport != "files":
            yield (
                f"policy.generation.weight_transport: {generation.weight_transport} has no effect: with backend"
                " megatron the trainer generates with its own weights"
            )


_METRICS = [f"{source}:{name}" for source in ("val", "train") for name in ("loss", "accuracy", "reward")]


def checkpoints_without_the_metric(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn of checkpoints at steps without a validation. Such checkpoints rank below the others."""
    if config.data.validation is None or not chooses_by_validation(config):
        return
    name, loop = loop_section(config)
    period = config.checkpointing.save_period
    if period == 0 or (loop.val_period > 0 and period % loop.val_period == 0):
        return
    # The first checkpoint already lacks the metric, since its step is no multiple of val_period.
    if period < num_steps or (period == num_steps and not loop.val_at_end):
        yield (
            f"checkpointing.save_period: {period} saves at steps without a validation, such as {period}"
            f" ({name}.val_period: {loop.val_period}): such checkpoints have no {metric_in_force(config)}, and rank"
            " below all others; to validate at each save, set a multiple of val_period"
        )


def ipo_by_sums(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn of IPO on summed log-probabilities: the margin then grows with the length of the responses."""
    if not isinstance(config, DPOMasterConfig) or config.dpo.preference_loss_type != "ipo":
        return
    if not config.dpo.preference_average_log_probs:
        yield (
            "dpo.preference_average_log_probs: false compares sums of log-probabilities, which grow with the length of"
            " a response, while the margin that ipo aims at does not; true divides the sums by the length, as IPO's"
            " authors do"
        )


MOST_BFLOAT16_PARTS = 16
"""Maximum number of microbatches whose gradients may be summed in bfloat16. In a sum of 16 equal parts, each keeps 4
of its 8 bits."""


MOST_OF_FULL_LENGTH = 64
"""Like `MOST_BFLOAT16_PARTS`, for microbatches that are filled by tokens, counted for samples of maximum length."""


def gradients_add_up_in_bfloat16(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn if gradients of many microbatches are summed in a format with 8 bits of precision."""
    policy = config.policy
    if policy.precision != "bfloat16" or policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32:
        return
    samples = policy.train_global_batch_size // max(config.data_parallel_size, 1)
    parts, up_to, most = samples // policy.train_micro_batch_size, "", MOST_BFLOAT16_PARTS
    for budget in (policy.sequence_packing, policy.dynamic_batching):
        if budget.enabled:
            most = MOST_OF_FULL_LENGTH
            parts, up_to = -(-samples * policy.max_total_sequence_length // budget.train_mb_tokens), "up to "
    if parts > most:
        yield (
            f"gradients of {up_to}{parts} microbatches a rank add up in bfloat16, which rounds each sum to 8 bits;"
            " policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=true adds them in float32, at 2"
            " more bytes a parameter"
        )


def rollouts_draw_from_a_part(config: LoopMasterConfig, num_steps: int) -> Iterator[str]:
    """Warn of top-p and top-k, since importance weights ignore that only some tokens could be sampled."""
    policy = generating(config.policy)
    if policy is None or (isinstance(config, GRPOMasterConfig) and config.loss_fn.sampling_mask == "replay"):
        return
    generation, key = policy.generation, "policy.generation"
    chosen = [f"{key}.top_p: {generation.top_p:g}"] if generation.top_p < 1 else []
    chosen += [f"{key}.top_k: {generation.top_k}"] if generation.top_k is not None else []
    if chosen:
        yield (
            f"{' and '.join(chosen)}: responses are sampled from the kept tokens, but log-probabilities in rollout and"
            " training are over the whole vocabulary. A token was sampled with a higher probability than the loss"
            " assumes, by the factor 1 / train/sampling_kept_mass, and no ratio, mismatch metric or importance weight"
            " contains this factor; top_p 1 and top_k null remove the difference, and loss_fn.sampling_mask replay"
            " trains with the probabilities of the kept tokens"
        )


ADAPTER_RATE = 10
"""Best learning rate of adapters relative to that of all weights, by Schulman et al. 2025, LoRA Without Regret."""
RATES_OF_WEIGHTS: Mapping[type[MasterConfig], float] = {
    SFTMasterConfig: 1e-5,
    DPOMasterConfig: 5e-7,
    RMMasterConfig: 2e-6,
    GRPOMasterConfig: 1e-6,
}
"""Class of the configuration -> learning rate of all weights in the shipped configuration that others begin with."""
RATE_OF_A_CRITIC = 1e-5
"""Learning rate of all weights of a critic, in `ppo_math_1B.yaml`."""


def rates_for_adapters(config: MasterConfig) -> list[str]:
    """Return a line with a proposal for each model whose adapters have a learning rate that is usual for all
    weights."""
    usual = next((rate for kind, rate in RATES_OF_WEIGHTS.items() if isinstance(config, kind)), 0.0)

    def line_on(model: PolicyConfig) -> Iterator[str]:
        lr, most = model.megatron_cfg.optimizer.lr, usual if model is config.policy else RATE_OF_A_CRITIC
        if model.lora is not None and 0 < lr <= most:
            yield (
                f"policy.megatron_cfg.optimizer.lr: {lr:g} is usual for all weights; adapters (policy.lora) learned"
                f" best at about {ADAPTER_RATE} times the rate of all weights in Schulman et al. 2025, LoRA Without"
                f" Regret, which would be {ADAPTER_RATE * lr:g}"
            )

    return list(lines_on_trained_models(config, line_on))


NOTICES = (
    epochs_end_the_run,
    warmup_outlasts_the_run,
    policy_never_trains,
    validation_is_off,
    checkpoints_without_the_metric,
    metric_may_be_misspelt,
    transport_is_not_used,
    microbatch_size_is_not_used,
    ipo_by_sums,
    gradients_add_up_in_bfloat16,
    rollouts_draw_from_a_part,
)
