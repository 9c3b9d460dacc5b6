# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the cases combine: parameters and their values, and the overrides of the tiny exemplars that a value means."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from tests.functional import grpo_runs, sft_runs
from tests.support.golden_runs import make_moe_teacher

STEPS_BEFORE_STOP, NUM_STEPS = 2, 3
NUM_PROMPTS_A_STEP, NUM_GENERATIONS = 2, 2
RESPONSES_A_STEP = NUM_PROMPTS_A_STEP * NUM_GENERATIONS
NUM_PROMPTS, NUM_VALIDATION_PROMPTS = 24, 3
MODEL = sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools"
PARTS = "tests.functional.pairs.parts"
Overrides = Mapping[str, Any]
Setting = Mapping[str, str]
"""A value of each parameter, or of some of them."""

_PARALLEL = "policy.megatron_cfg"
_TOOLS: dict[str, Any] = {
    "kind": "tools",
    "tools": ["tests.support.tool_functions:add"],
    "format": f"{PARTS}:ANY_TEXT",
    "max_turns": 2,
    "limits": {"num_workers": 1},
}
_MIXTURE: dict[str, dict[str, Any]] = {
    "plain": {"weight": 1.0},
    "tools": {"weight": 1.0, "driver": _TOOLS},
}


def _lora(experts: str, refit: str) -> Overrides:
    fields: dict[str, Any] = {"rank": 4, "alpha": 8.0, "use_rslora": False, "targets": ["all-linear"], "dropout": 0.0}
    section = fields | {"experts": experts, "init": "kaiming", "path": None}
    return {"policy.lora": section, "policy.generation.lora_refit": refit}


def _ahead(staleness: int, **more: Any) -> Overrides:
    keys = {"mode": "asynchronous", "max_staleness": staleness} | more
    values: dict[str, Any] = {f"grpo.rollouts.{key}": value for key, value in keys.items()}
    if staleness:
        values |= {"loss_fn.importance_sampling_correction": "truncated"}
    return values


def _layout(num_workers: int, **sizes: Any) -> Overrides:
    return {"cluster.cpu_workers_per_node": num_workers} | {
        f"{_PARALLEL}.{name}": value for name, value in sizes.items()
    }


def _estimator(name: str) -> Overrides:
    return {"grpo.adv_estimator.name": name, "grpo.adv_estimator.normalize_rewards": False}


def _environment(**keys: Any) -> Overrides:
    return {f"env.{key}": value for key, value in keys.items()}


PARAMETERS: Mapping[str, Mapping[str, Overrides]] = {
    "algorithm": {"grpo": {}, "ppo": {}, "distillation": {}},
    "engine": {
        "trainer": {},
        "separate": {
            "policy.generation.backend": "megatron_separate",
            f"+cluster.roles.{GENERATION_ROLE}": {"cpu_workers_per_node": 1},
        },
    },
    "rollouts": {
        "synchronous": {},
        "staleness_0": _ahead(0),
        "staleness_1": _ahead(1),
        "staleness_2": _ahead(2, order="ready_first", partial="discard"),
        "drop": _ahead(1, order="ready_first", on_stale="drop", partial="restart"),
    },
    "environment": {
        "single_turn": {},
        "function": _environment(driver={"kind": "function", "function": f"{PARTS}:ask_twice"}),
        "several_sequences": _environment(driver={"kind": "function", "function": f"{PARTS}:ask_anew"}),
        "tools": _environment(driver=_TOOLS),
        "agent": _environment(driver={"kind": "agent", "program": f"{PARTS}:agent", "limits": {"num_workers": 2}}),
        "mixture": _environment(mixture=_MIXTURE),
    },
    # The engine applies adapters, of the layers that all engines can.
    "lora": {"off": {}, "on": _lora("per_expert", "merged"), "adapter": _lora("none", "adapter")},
    "replay": {
        "none": {},
        "rollout": {f"{_PARALLEL}.routing_replay": "rollout"},
        "old_policy": {f"{_PARALLEL}.routing_replay": "old_policy"},
    },
    "batching": {
        "plain": {},
        "dynamic": {"policy.dynamic_batching.enabled": True, "policy.dynamic_batching.train_mb_tokens": 1000},
        "packed": {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": 1000},
    },
    "layout": {
        "one": _layout(1),
        "dp2": _layout(2),
        "tp2": _layout(2, tensor_model_parallel_size=2, sequence_parallel=True),
        "pp2": _layout(2, pipeline_model_parallel_size=2),
        "ep2": _layout(2, expert_model_parallel_size=2),
    },
    "updates": {"one": {}, "two": {"policy.train_global_batch_size": RESPONSES_A_STEP // 2}},
    "sampling_mask": {"off": {}, "replay": {"policy.generation.top_k": 64, "loss_fn.sampling_mask": "replay"}},
    "dynamic_sampling": {
        "off": {},
        "on": {"grpo.use_dynamic_sampling": True, "grpo.dynamic_sampling_max_groups": 3 * NUM_PROMPTS_A_STEP},
    },
    "objective": {
        "clipped": {},
        "dppo": _estimator("maxrl") | {"loss_fn.objective": "dppo_tv", "grpo.zero_variance_filtering": True},
        "clip_cov": _estimator("optimal_token_baseline")
        | {"loss_fn.objective": "clip_cov", "loss_fn.cov_ratio": 0.5, "loss_fn.clip_cov_min": 0.0},
    },
    "reward_shaping": {
        "off": {},
        "on": {"grpo.reward_shaping.enabled": True, "grpo.reward_shaping.overlong_buffer_length": 6},
    },
    "kl_penalty": {
        "none": {},
        "loss": {"loss_fn.reference_policy_kl_penalty": 0.1},
        "reward": {
            "loss_fn.reference_policy_kl_penalty": 0.1,
            "loss_fn.reference_policy_kl_type": "k1",
            "loss_fn.use_kl_in_reward": True,
        },
    },
    "precision": {"float32": {}, "bfloat16": {"policy.precision": "bfloat16"}},
    "validation": {"on": {}, "off": {"data.validation": None}},
    "optimizer": {"saved": {}, "not_saved": {"checkpointing.save_optimizer": False}},
}
BY_NAME: Mapping[str, Mapping[str, Overrides]] = {"engine": {"vllm": {"policy.generation.backend": "vllm"}}}
"""Further values, of cases by name alone: they need vLLM, which not every machine has."""
SIMPLEST: Setting = {name: next(iter(values)) for name, values in PARAMETERS.items()}


@dataclass(frozen=True)
class Inputs:
    """Data and models of all cases, made once below a folder.

    Attributes:
        folder: Holds them.
    """

    folder: Path

    @property
    def model(self) -> Path:
        """The policy's configuration and tokenizer; its weights are random."""
        return self.folder / "model"

    @property
    def weights(self) -> Path:
        """A model of the policy's shape with weights: the teacher, and what the critic begins with."""
        return self.folder / "weights"

    @staticmethod
    def made(folder: Path) -> "Inputs":
        """Make them where they are not there yet."""
        if not folder.is_dir():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            grpo_runs.make_prompts(unfinished, NUM_PROMPTS)
            for path in unfinished.glob("*.jsonl"):
                records = [json.loads(line) for line in path.read_text().splitlines()]
                for number, record in enumerate(records):
                    record["environment"] = ("plain", "tools")[number % 2]
                path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
            model = sft_runs.make_model_folder(unfinished / "model", MODEL, num_hidden_layers=2)
            make_moe_teacher(unfinished / "weights", model)
            unfinished.rename(folder)
        return Inputs(folder)


def words(setting: Setting, inputs: Inputs, folder: Path, num_steps: int) -> list[str]:
    """Return what follows the program's name for a run of so many steps.

    Args:
        setting: A value of each parameter.
        inputs: Data and models.
        folder: Gets `logs`.
        num_steps: Steps after which the run ends.
    """
    algorithm = setting["algorithm"]
    exemplar = grpo_runs.EXEMPLAR.with_name(f"{algorithm}_tiny_moe.yaml")
    return [algorithm, "--config", str(exemplar), *overrides(setting, inputs, folder, num_steps)]


def overrides(setting: Setting, inputs: Inputs, folder: Path, num_steps: int = NUM_STEPS) -> list[str]:
    """Return the overrides of the algorithm's tiny exemplar; arguments as of `words`."""
    values = dict(_common(inputs, folder, num_steps))
    if setting["algorithm"] == "ppo":
        values |= {"value.model_name": inputs.weights, "value.logprob_batch_size": RESPONSES_A_STEP // 2}
    if setting["algorithm"] == "distillation":
        teacher = "distillation.teachers.teacher"
        # With the rewards beside the teacher, so that what shapes them has an effect.
        values |= {f"{teacher}.model_name": inputs.weights, f"{teacher}.logprob_batch_size": 4}
        values |= {"distillation.policy_gradient_weight": 0.5}
    for parameter, value in setting.items():
        values |= {**PARAMETERS[parameter], **BY_NAME.get(parameter, {})}[value]
    if values["data.validation"] is None:
        del values["data.validation.path"]
    else:
        del values["data.validation"]
    return sft_runs.as_overrides(values, {})


def _common(inputs: Inputs, folder: Path, num_steps: int) -> Overrides:
    """Return what all cases have; each value of a parameter may change it."""
    return {
        "policy.model_name": inputs.model,
        "policy.init": "random",
        "policy.max_total_sequence_length": 700,
        "policy.train_global_batch_size": RESPONSES_A_STEP,
        "policy.train_micro_batch_size": 1,
        "policy.logprob_batch_size": 4,
        "policy.generation.max_new_tokens": 10,
        # Most bytes end a response: behind a token that ends none, a template cannot go on.
        "policy.generation.stop_token_ids": list(range(0, 250, 8)),
        f"{_PARALLEL}.scheduler.lr_warmup_iters": 0,
        f"{_PARALLEL}.scheduler.lr_decay_iters": 2 * NUM_STEPS,
        "grpo.num_prompts_per_step": NUM_PROMPTS_A_STEP,
        "grpo.num_generations_per_prompt": NUM_GENERATIONS,
        "grpo.max_num_steps": num_steps,
        "grpo.val_period": STEPS_BEFORE_STOP,
        "grpo.max_val_samples": NUM_VALIDATION_PROMPTS,
        "grpo.val_num_generations": 1,
        "env.reward.kind": "callable",
        "env.reward.function": f"{PARTS}:grade",
        "env.score_truncated": True,
        # Prompts are taken in the order of the file, so that a step's own are known.
        "data.shuffle": False,
        "data.train.path": inputs.folder / "grpo.jsonl",
        "data.validation": {},
        "data.validation.path": inputs.folder / "validation_prompts.jsonl",
        "logger.log_dir": folder / "logs",
        "checkpointing.checkpoint_dir": None,
        "checkpointing.save_period": 1,
        "checkpointing.keep_top_k": None,
        "checkpointing.metric_name": None,
        "cluster.worker_call_timeout_s": 300,
        **{f"logger.{name}": False for name in sft_runs.JSONL_ONLY},
    }
