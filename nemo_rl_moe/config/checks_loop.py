# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that every algorithm's loop has, whatever its section is called; see `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.schema import DPOMasterConfig, GRPOMasterConfig, SFTMasterConfig
from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.config.schema_loop import SupervisedLoopConfig

LoopMasterConfig = SFTMasterConfig | DPOMasterConfig | GRPOMasterConfig


def loop_section(config: LoopMasterConfig) -> tuple[str, SupervisedLoopConfig | GRPOConfig]:
    """The name of the section that holds the loop, and the section."""
    if isinstance(config, GRPOMasterConfig):
        return "grpo", config.grpo
    return ("dpo", config.dpo) if isinstance(config, DPOMasterConfig) else ("sft", config.sft)


def warmup_ends_within_the_run(config: LoopMasterConfig) -> Iterator[str]:
    """Without a decay length of its own, the schedule ends with the run."""
    name, loop = loop_section(config)
    scheduler, steps = config.policy.megatron_cfg.scheduler, loop.max_num_steps
    if scheduler.lr_decay_iters is not None or scheduler.lr_decay_style == "constant" or steps is None:
        return
    updates = steps * config.updates_per_step
    if 0 < updates <= scheduler.lr_warmup_iters:  # 0: told by step_is_whole_updates
        yield (
            f"policy.megatron_cfg.scheduler.lr_warmup_iters: got {scheduler.lr_warmup_iters}, expected less than the"
            f" {updates} optimizer steps of {name}.max_num_steps = {steps} (lr_decay_iters is null)"
        )


def validation_has_data(config: LoopMasterConfig) -> Iterator[str]:
    """Validation at any time needs held-out data."""
    if config.data.validation is not None:
        return
    name, loop = loop_section(config)
    for key, off in (("val_period", "0"), ("val_at_start", "false"), ("val_at_end", "false")):
        value = getattr(loop, key)
        if value:
            yield f"{name}.{key}: {str(value).lower()} needs data.validation, which is null; set {off} or name the data"


LOOP_RULES = (warmup_ends_within_the_run, validation_has_data)
