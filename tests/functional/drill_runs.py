# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of runs that drills kill: their commands, their phases, and what two runs must have in common."""

import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.functional import dpo_runs, grpo_runs, sft_runs, vision_runs

VAL_PERIOD = 4
FROZEN_AFTER_S = 40
STALLED_AFTER_S = 15
NUM_PROMPTS = 40
GROUPS_A_STEP = 4
STEPS_AN_EPOCH = NUM_PROMPTS // GROUPS_A_STEP
STEP_PHASES = ("generation", "rewards", "logprobs", "reference_logprobs", "train", "refit", "refit_check")
"""In the order in which a step has them; the metrics have their times under these names."""
ROUTING = "train/moe/routing/"
VALIDATION_TIME = "timing/validation/seconds"
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
    """

    name: str
    command: Callable[[Path, Path, int], list[str]]
    phases: tuple[str, ...]
    num_nodes: int = 1
    only_if_asked: bool = False
    anchors: Mapping[str, str] = field(default_factory=dict)
    uses_vllm: bool = False
    repeats: bool = True

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
        "env__name": "callable",
        "env__callable": {"function": "tests.support.drill_reward:grade"},
        "env__answer_after": None,
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


_ALWAYS = ("start", "train", "validation", "saving", "end")
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
    )
}


@dataclass(frozen=True)
class Logs:
    """What the attempts of one training leave below a folder: `logs`, with a folder for each run.

    Attributes:
        folder: Holds `logs`.
    """

    folder: Path

    @property
    def run_folder(self) -> Path | None:
        """The newest: attempts that are killed before the first checkpoint is whole have others before it."""
        return max((self.folder / "logs").glob("exp_*"), default=None)

    def num_records(self) -> int:
        """Number of steps recorded up to now."""
        return len(self._lines("metrics.jsonl"))

    def metrics(self, routes_lost: Collection[int] = (), *, of_all: bool = False) -> dict[int, list[str]]:
        """Metrics of each recorded step, all but times; of some steps also without those of routes.

        Args:
            routes_lost: These steps.
            of_all: As of `samples`.
        """
        return {
            step: [
                str(
                    {
                        key: value
                        for key, value in record["metrics"].items()
                        if not _is_time(key) and not (step in routes_lost and key.startswith(ROUTING))
                    }
                )
                for record in records
            ]
            for step, records in self._by_step("metrics.jsonl", of_all).items()
        }

    def samples(self, *, of_all: bool = False) -> dict[int, list[dict[str, Any]]]:
        """The responses of each recorded step; none but of GRPO.

        Args:
            of_all: Of all folders, the newest one that has a step, and not of the newest alone.
        """
        return self._by_step("samples.jsonl", of_all)

    def last_step_s(self) -> float | None:
        """Seconds of the last step's phases; None where the run's folder has just been deleted with its records."""
        lines = self._lines("metrics.jsonl")
        return sum(_phase_seconds(json.loads(lines[-1])["metrics"]).values()) if lines else None

    def is_saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        return any(self.folder.glob("logs/*/checkpoints/.*.incomplete"))

    def weights(self) -> dict[str, bytes]:
        """The final weights, tensor by tensor; none where there are none."""
        tensors = {}
        for path in sorted(self.folder.glob("logs/*/checkpoints/final/*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                tensors |= {name: file.get_tensor(name).numpy().tobytes() for name in names}
        return tensors

    def _by_step(self, name: str, of_all: bool) -> dict[int, list[dict[str, Any]]]:
        """Records by step, in the order of the file."""
        found: dict[int, list[dict[str, Any]]] = {}
        for folder in sorted((self.folder / "logs").glob("exp_*")) if of_all else [self.run_folder]:
            own: dict[int, list[dict[str, Any]]] = {}
            for record in map(json.loads, self._lines(name, folder)):
                own.setdefault(record["step"], []).append(record)
            first = min(own, default=None)
            found = {step: records for step, records in found.items() if first is None or step < first} | own
        return found

    def _lines(self, name: str, folder: Path | None = None) -> list[str]:
        folder = folder or self.run_folder
        if folder is None or not (path := folder / name).is_file():
            return []
        return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _is_time(key: str) -> bool:
    return key.startswith("timing/")


def _phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics.get(f"timing/{name}/seconds", 0.0) for name in STEP_PHASES}


@dataclass(frozen=True)
class Reference:
    """An unharmed run of a kind, which every killed one must equal.

    Attributes:
        logs: What it has left.
    """

    logs: Logs

    @cached_property
    def _metrics(self) -> list[dict[str, float]]:
        """Metrics of the steps after the first, which is slower than the others."""
        assert self.logs.run_folder is not None
        lines = (self.logs.run_folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["metrics"] for line in lines[2:]]

    @cached_property
    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds of each phase of a step, in their order, and of a validation, which comes after them."""
        means = {
            name: sum(_phase_seconds(metrics)[name] for metrics in self._metrics) / len(self._metrics)
            for name in STEP_PHASES
        }
        times = [metrics[VALIDATION_TIME] for metrics in self._metrics if VALIDATION_TIME in metrics]
        return means | {"validation": sum(times) / len(times)}

    @property
    def step_s(self) -> float:
        """Mean seconds of a step's phases."""
        return sum(self.phase_seconds[name] for name in STEP_PHASES)

    def window(self, phase: str) -> tuple[float, float]:
        """Return the average start and end of a phase, in seconds after the step's start."""
        start = 0.0
        for name, seconds in self.phase_seconds.items():
            if name == phase:
                return start, start + seconds
            start += seconds
        raise AssertionError(phase)

    def differences(
        self, found: Logs, *, lost_until: int | None = None, routes_lost: Collection[int] = ()
    ) -> list[str]:
        """Differences of another run's end: metrics of all steps but times, samples, final weights' bytes.

        Args:
            found: What the other run has left.
            lost_until: Last step whose records may be lost, with a folder that was deleted; later ones must be there.
                The deleted folder's `run.json` is lost, too, so that the next attempt begins a folder of its own: later
                records may lie in several. None: no folder was deleted, all records are in one.
            routes_lost: Steps whose routes may be lost, with an engine: not compared are metrics of routes.
        """
        differences, of_all = [], lost_until is not None
        pairs: tuple[tuple[str, dict[int, Any], dict[int, Any]], ...] = (
            ("metrics", found.metrics(routes_lost, of_all=of_all), self.logs.metrics(routes_lost)),
            ("samples", found.samples(of_all=of_all), self.logs.samples()),
        )
        for name, records, expected in pairs:
            needed = {step for step in expected if lost_until is None or step > lost_until}
            missing, others = sorted(needed - records.keys()), sorted(records.keys() - expected.keys())
            changed = [step for step in expected if step in records and records[step] != expected[step]]
            if missing or others or changed:
                differences.append(f"{name}: missing are steps {missing}, too many {others}, not the same {changed}")
            if list(records) != sorted(records):
                differences.append(f"{name}: steps in the order {list(records)}")
        if not found.weights() or found.weights() != self.logs.weights():
            differences.append("final weights")
        return differences

    def doubts(self) -> list[str]:
        """Return what would make the comparison worthless: weights that do not change, rewards that do not vary."""
        doubts = []
        idle = [index for index, metrics in enumerate(self._metrics) if not metrics["train/grad_norm"] > 0]
        if idle:
            doubts.append(f"no gradient in steps {idle}")
        rewards = {sample["reward"] for samples in self.logs.samples().values() for sample in samples}
        if rewards and len(rewards) < 4:
            doubts.append("the rewards do not vary")
        return doubts
