# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of runs that drills kill: their commands and their phases."""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from tests.functional import dpo_runs, grpo_runs, sft_runs, vision_runs

VAL_PERIOD = 4
FROZEN_AFTER_S = 40
STALLED_AFTER_S = 15
NUM_PROMPTS = 40
GROUPS_A_STEP = 4
CALLING_MODEL = sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools"
STEPS_AN_EPOCH = NUM_PROMPTS // GROUPS_A_STEP
COMMON: dict[str, Any] = {
    **sft_runs.only_jsonl(),
    "policy__init": "random",
    "policy__megatron_cfg__scheduler__lr_warmup_iters": 0,
    "checkpointing__save_period": 1,
    "checkpointing__keep_top_k": 1,
    "checkpointing__metric_name": None,
    "cluster__worker_call_timeout_s": FROZEN_AFTER_S,
}


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        name: Its name in the table.
        command: Makes the command out of a folder for `logs`, the folder of `make_inputs` and the number of steps.
        phases: Where it can be hit.
        num_nodes: Machines of its Ray.
        only_if_asked: Left out unless it is named: slow on two cores, or near to another kind.
        anchors: Of phases that are not within a step: what the run prints at their beginning.
        uses_vllm: vLLM generates.
        repeats: It equals an unharmed run. False: it is asynchronous, and its accounts must be right.
        caller: What calls of the phase `calling` run in: tool or agent; empty without that phase.
        inexact: Metrics that equal those of an unharmed run but for their last bits, and are not compared.
    """

    name: str
    command: Callable[[Path, Path, int], list[str]]
    phases: tuple[str, ...]
    num_nodes: int = 1
    only_if_asked: bool = False
    anchors: Mapping[str, str] = field(default_factory=dict)
    uses_vllm: bool = False
    repeats: bool = True
    caller: str = ""
    inexact: Collection[str] = ()

    @property
    def scores(self) -> bool:
        """True where an environment has workers of its own."""
        return "scoring" in self.phases

    def num_steps(self, least: int) -> int:
        """Return the steps of a run that has at least so many: an asynchronous one ends with an epoch."""
        return least if self.repeats else -(-least // STEPS_AN_EPOCH) * STEPS_AN_EPOCH


def make_inputs(folder: Path) -> Path:
    """Data and a model for all kinds, made once."""
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        sft_runs.make_additions(unfinished, 256, 16)
        dpo_runs.make_pairs(unfinished, 64, 16)
        grpo_runs.make_prompts(unfinished, NUM_PROMPTS)
        vision_runs.make_shapes(unfinished / "shapes")
        sft_runs.make_model_folder(unfinished / "model", num_hidden_layers=2)
        sft_runs.make_model_folder(unfinished / "model_of_callers", CALLING_MODEL, num_hidden_layers=2)
        unfinished.rename(folder)
    return folder


def _sft(folder: Path, inputs: Path, num_steps: int, **changes: Any) -> list[str]:
    values = COMMON | {
        "policy__train_global_batch_size": 64,
        "policy__train_micro_batch_size": 16,
        "sft__max_num_steps": num_steps,
        "sft__max_num_epochs": 100,
        "sft__val_period": VAL_PERIOD,
    }
    return sft_runs.sft_command(sft_runs.settings(folder, inputs, inputs / "model", **values | changes))


def _sft_two_nodes(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    return _sft(folder, inputs, num_steps, cluster__num_nodes=2, cluster__cpu_workers_per_node=1)


def _grpo_four_nodes(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    return _grpo(folder, inputs, num_steps, cluster__num_nodes=4)


def _dpo(folder: Path, inputs: Path, num_steps: int, how: str, num_workers: int) -> list[str]:
    values = COMMON | {
        "policy__model_name": inputs / "model",
        "policy__train_global_batch_size": 16,
        "policy__train_micro_batch_size": 4,
        "dpo__max_num_steps": num_steps,
        "dpo__max_num_epochs": 100,
        "dpo__val_period": VAL_PERIOD,
        "dpo__reference_logprobs": how,
        "cluster__cpu_workers_per_node": num_workers,
    }
    script = sft_runs.REPOSITORY_ROOT / "examples/run_dpo.py"
    overrides = dpo_runs.settings(folder, inputs, **values)
    return [sys.executable, str(script), "--config", str(dpo_runs.EXEMPLAR), *overrides]


def _dpo_in_step(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    return _dpo(folder, inputs, num_steps, "in_step", 1)


def _dpo_precompute(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    return _dpo(folder, inputs, num_steps, "precompute", 2)


def _grpo(folder: Path, inputs: Path, num_steps: int, exemplar: Path = grpo_runs.EXEMPLAR, **more: Any) -> list[str]:
    values = COMMON | {
        "policy__model_name": inputs / "model",
        "policy__megatron_cfg__optimizer__lr": 1e-3,
        "grpo__max_num_steps": num_steps,
        "grpo__max_num_epochs": 100,
        "grpo__val_period": VAL_PERIOD,
        "grpo__max_val_samples": 8,
        # A pass over the log-probabilities and a reference model: every phase that a step can have.
        "loss_fn__force_on_policy_ratio": "never",
        "loss_fn__reference_policy_kl_penalty": 0.1,
        "env__reward__kind": "callable",
        "env__reward__function": "tests.support.rewards_of_tests:grade",
        "env__score_truncated": True,
        "cluster__cpu_workers_per_node": 1,
    }
    return grpo_runs.command(grpo_runs.settings(folder, inputs, **values | more), exemplar)


def _grpo_vllm(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    exemplar = grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_vllm.yaml")
    return _grpo(folder, inputs, num_steps, exemplar, policy__generation__vllm__stall_timeout_s=STALLED_AFTER_S)


def _grpo_async(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    """Groups are trained on in the order in which they are finished."""
    exemplar = grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_async_separate.yaml")
    changes: dict[str, Any] = {
        "grpo__rollouts__order": "ready_first",
        "grpo__max_num_epochs": num_steps // STEPS_AN_EPOCH,
        "cluster__roles__generation__cpu_workers_per_node": 1,
    }
    return _grpo(folder, inputs, num_steps, exemplar, **changes)


def _grpo_vision(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    changes = vision_runs.grpo_changes(inputs / "shapes")
    return _grpo(folder, inputs, num_steps, vision_runs.GRPO_EXEMPLAR, **changes)


def _grpo_calling(folder: Path, inputs: Path, num_steps: int, **env: Any) -> list[str]:
    """Two responses a trajectory, and a call behind the first."""
    changes: dict[str, Any] = {
        "policy__model_name": inputs / "model_of_callers",
        "policy__max_total_sequence_length": 700,
        # Most bytes end a response: behind a token that ends none, a template cannot go on.
        "policy__generation__stop_token_ids": list(range(0, 250, 8)),
    }
    return _grpo(folder, inputs, num_steps, **changes | env | {"env__driver__max_turns": 2})


def _grpo_tools(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    tools: dict[str, Any] = {
        "env__driver__kind": "tools",
        "env__driver__tools": ["tests.support.agents_of_tests:turn_around"],
        "env__driver__format": "tests.support.agents_of_tests:ANY_TEXT",
        "env__driver__limits__num_workers": 2,
    }
    return _grpo_calling(folder, inputs, num_steps, **tools)


def _grpo_agent(folder: Path, inputs: Path, num_steps: int) -> list[str]:
    """The engine is a rank of its own beside the trainer's."""
    agent: dict[str, Any] = {
        "policy__generation__backend": "megatron_separate",
        "env__driver__kind": "agent",
        "env__driver__program": "tests.support.agents_of_tests:asks_about_its_answer",
        "env__driver__limits__num_workers": 2,
    }
    return [*_grpo_calling(folder, inputs, num_steps, **agent), f"+cluster.roles.{GENERATION_ROLE}={{}}"]


_ALWAYS = ("start", "train", "validation", "saving", "end")
_OF_CALLERS = (*_ALWAYS, "generation", "calling", "scoring", "logprobs", "reference")
_OF_TWO_ENGINES = (
    *("train/approx_entropy", "train/token_mult_prob_error"),
    *("train/gen_kl_error", "train/policy_kl_error", "train/js_divergence_error"),
    *("train/sampling_logp_difference", "train/sampling_logp_difference_max"),
    *("train/sampling_importance_ratio", "train/sampling_importance_ratio_min", "train/sampling_importance_ratio_max"),
)
"""Metrics of log-probabilities at the engine: which requests share a batch there is decided by time."""
KINDS = {
    kind.name: kind
    for kind in (
        Kind("sft", _sft, _ALWAYS),
        Kind("dpo_in_step", _dpo_in_step, (*_ALWAYS, "reference")),
        Kind("grpo", _grpo, (*_ALWAYS, "generation", "scoring", "logprobs", "reference")),
        Kind("dpo_precompute", _dpo_precompute, (*_ALWAYS, "reference"), anchors={"reference": "measuring "}),
        Kind("sft_two_nodes", _sft_two_nodes, _ALWAYS, num_nodes=2),
        # Who scores is not seen from outside: Ray's nodes, which start the workers, were there before.
        Kind(
            "grpo_four_nodes",
            _grpo_four_nodes,
            (*_ALWAYS, "generation", "logprobs", "reference"),
            4,
            only_if_asked=True,
        ),
        Kind("grpo_vision", _grpo_vision, (*_ALWAYS, "generation", "scoring", "logprobs", "reference")),
        # Its responses are scored as they come: generation and scoring are one phase.
        Kind("grpo_vllm", _grpo_vllm, (*_ALWAYS, "generation", "logprobs", "reference", "refit"), uses_vllm=True),
        # The engine's ranks are workers, too.
        Kind(
            "grpo_async",
            _grpo_async,
            (*_ALWAYS, "generation", "scoring", "logprobs", "reference", "refit"),
            only_if_asked=True,
            repeats=False,
        ),
        Kind("grpo_tools", _grpo_tools, _OF_CALLERS, only_if_asked=True, caller="tool"),
        # The engine's rank is a worker, too.
        Kind(
            "grpo_agent",
            _grpo_agent,
            (*_OF_CALLERS, "refit"),
            only_if_asked=True,
            caller="agent",
            inexact=_OF_TWO_ENGINES,
        ),
    )
}
