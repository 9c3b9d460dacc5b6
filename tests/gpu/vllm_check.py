# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A short run of GRPO with rollouts by vLLM on the trainer's own GPU: weights arrive, and so do the routed experts.

Between two transfers of weights the engine generates several times: each step is validated, before the first one too,
and random weights get no reward, so that dynamic sampling takes a second round.
"""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.functional import grpo_runs, sft_runs
from tests.gpu.models import Failed, Numbers

NUM_STEPS = 3
_MISSING = "train/moe/routing/rows_missing_share"
_VALIDATED = "val/accuracy"


def overrides(folder: Path, *, rehearse: bool) -> list[str]:
    """The run's settings; a rehearsal lets the trainer's own engine generate, on one CPU rank."""
    changes: dict[str, Any] = {
        "grpo__max_num_steps": 1 if rehearse else NUM_STEPS,
        "grpo__val_period": 1,
        "grpo__val_at_start": True,
        "grpo__val_at_end": True,
        "grpo__max_val_samples": 4,
        "grpo__use_dynamic_sampling": True,
        "grpo__dynamic_sampling_max_groups": 8,
        "checkpointing__enabled": False,
        "cluster__cpu_workers_per_node": 1,
        "policy__megatron_cfg__routing_replay": "rollout",
        **sft_runs.only_jsonl(),
    }
    if not rehearse:
        changes |= {
            "cluster__gpus_per_node": 1,
            "policy__precision": "bfloat16",
            "policy__generation__vllm__gpu_memory_utilization": 0.3,
        }
    return grpo_runs.settings(folder, grpo_runs.make_prompts(folder / "prompts", 40), **changes)


def exemplar(*, rehearse: bool) -> Path:
    """The configuration that is changed."""
    return grpo_runs.EXEMPLAR if rehearse else grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_vllm.yaml")


def vllm_routes_and_refit(*, rehearse: bool) -> Iterator[Numbers]:
    """Yield what the run's own metrics say of each step."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        folder = Path(scratch)
        records = _run(folder, overrides(folder, rehearse=rehearse), rehearse=rehearse)
        yield judged(records, 1 if rehearse else NUM_STEPS, has_engine=not rehearse)


def vllm_resume(*, rehearse: bool) -> Iterator[Numbers]:
    """Yield the same of a run that goes on from a checkpoint: its state is loaded beside an engine."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        folder = Path(scratch)
        saved = [
            "checkpointing.enabled=true",
            f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
            "checkpointing.save_period=1",
        ]
        for last in (1, 2):
            changes = [*saved, f"grpo.max_num_steps={last}"]
            records = _run(folder, [*overrides(folder, rehearse=rehearse), *changes], rehearse=rehearse)
        yield judged(records, 2, has_engine=not rehearse)


def _run(folder: Path, settings: Sequence[str], *, rehearse: bool) -> list[Mapping[str, float]]:
    """Run GRPO; return the metrics of the one run below the folder, in which a resumed one goes on."""
    subprocess.run(grpo_runs.command(settings, exemplar(rehearse=rehearse)), check=True)
    return [record.metrics for record in read_metrics(sft_runs.only_run_folder(folder) / "metrics.jsonl")]


def judged(records: Sequence[Mapping[str, float]], num_steps: int, *, has_engine: bool) -> Numbers:
    """Return the numbers of a run.

    Args:
        records: Metrics of the start and of each step.
        num_steps: Steps that there must be.
        has_engine: The engine keeps a copy of the weights, which are checked after each refit.

    Raises:
        Failed: Steps, validations, weights or routes are missing.
    """
    steps = [metrics for metrics in records if "train/loss" in metrics]
    wanted = (_MISSING, *(("train/refit/logprob_gap", "train/refit/checks_failed") if has_engine else ()))
    numbers: dict[str, Any] = {"steps": len(steps)}
    numbers |= {key: [step.get(key) for step in steps] for key in (*wanted, "train/token_mult_prob_error")}
    if len(steps) != num_steps:
        raise Failed(f"{len(steps)} steps instead of {num_steps}", numbers)
    validated = sum(_VALIDATED in metrics for metrics in records)
    if validated != num_steps + 1:
        raise Failed(f"{validated} validations instead of {num_steps + 1}", numbers)
    absent = [key for key in wanted if None in numbers[key]]
    if absent:
        raise Failed(f"steps lack {', '.join(absent)}", numbers)
    if any(numbers[_MISSING]):
        raise Failed("routed experts of some tokens did not arrive", numbers)
    if any(numbers.get("train/refit/checks_failed", ())):
        raise Failed("weights did not arrive at the engine", numbers)
    return numbers
