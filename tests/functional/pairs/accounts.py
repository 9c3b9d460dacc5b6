# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Accounts of a case from its own files: steps, prompts and tokens are there once, and no number is missing."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from nemo_rl_moe.algorithms.logged_samples import NOT_IN_BATCH, TRUNCATED, ZERO_VARIANCE
from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.dispatch.saved_queue import FOLDER, JSON_FILE
from nemo_rl_moe.rollouts.dispatch.schedule import ScheduledStep, read_schedule
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, StepRecord, read_metrics
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME
from tests.functional.pairs.settings import (
    NUM_GENERATIONS,
    NUM_PROMPTS_A_STEP,
    NUM_STEPS,
    NUM_VALIDATION_PROMPTS,
    STEPS_BEFORE_STOP,
    Setting,
)

VALIDATED_STEPS = (0, STEPS_BEFORE_STOP, NUM_STEPS)
REASONS = (
    NOT_IN_BATCH,
    TRUNCATED,
    ZERO_VARIANCE,
    "only ",
    "too few responses of the step ",
    *(f"{each.value}: " for each in Fault),
)
"""How the reasons begin for which a response is not trained on."""
_WASTED = "train/rollouts/wasted_tokens"
_CANCELLED = "train/rollouts/num_cancelled"
_PROBABILITY_ERROR, _ROUNDING = "train/token_mult_prob_error", 1e-3
_OF_LAGS, _TRAINED = "train/by_lag/", "num_valid_tokens"


@dataclass(frozen=True)
class Accounts:
    """What a case has left.

    Attributes:
        setting: Its values.
        run_folder: Its folder, with the records of both of its calls.
    """

    setting: Setting
    run_folder: Path

    def faults(self) -> Iterator[str]:
        """Yield what is wrong."""
        yield from self._faults_of_steps()
        yield from self._faults_of_validation()
        yield from self._faults_of_numbers()
        yield from self._faults_of_weights()
        yield from self._faults_of_probabilities()
        for step in range(1, NUM_STEPS + 1):
            yield from self._faults_of_tokens(step)
        yield from self._faults_of_schedule() if self._is_asynchronous else self._faults_of_prompts()

    @property
    def _is_asynchronous(self) -> bool:
        return self.setting["rollouts"] != "synchronous"

    @cached_property
    def _records(self) -> list[StepRecord]:
        return read_metrics(self.run_folder / METRICS_FILE_NAME)

    @cached_property
    def _samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / SAMPLES_FILE_NAME).read_text().splitlines()]

    @cached_property
    def schedule(self) -> list[ScheduledStep]:
        """The steps of asynchronous rollouts."""
        return read_schedule(self.run_folder / SCHEDULE_FILE)

    def _metrics(self, step: int) -> dict[str, float]:
        return next((record.metrics for record in self._records if record.step == step), {})

    def _samples_of(self, step: int, split: str = "train") -> list[dict[str, Any]]:
        return [sample for sample in self._samples if (sample["step"], sample["split"]) == (step, split)]

    def _in_batch(self, step: int) -> list[dict[str, Any]]:
        return [sample for sample in self._samples_of(step) if sample.get("left_out") != NOT_IN_BATCH]

    def _faults_of_steps(self) -> Iterator[str]:
        first = 0 if self.setting["validation"] == "on" else 1
        if (found := [record.step for record in self._records]) != (wanted := list(range(first, NUM_STEPS + 1))):
            yield f"steps of the metrics: {found}, expected {wanted}"
        steps = [sample["step"] for sample in self._samples]
        if steps != sorted(steps):
            yield f"steps of the samples in the order {list(dict.fromkeys(steps))}"

    def _faults_of_validation(self) -> Iterator[str]:
        due = VALIDATED_STEPS if self.setting["validation"] == "on" else ()
        for record in self._records:
            names = [name for name in record.metrics if name.startswith("val/")]
            if bool(names) != (record.step in due):
                yield f"step {record.step}: {len(names)} metrics of a validation, due at {due}"
        for step in range(NUM_STEPS + 1):
            found = Counter(_line(sample) for sample in self._samples_of(step, "val"))
            if found != (wanted := Counter(range(NUM_VALIDATION_PROMPTS) if step in due else ())):
                yield f"step {step}: validated prompts {dict(found)}, expected {dict(wanted)}"

    def _faults_of_numbers(self) -> Iterator[str]:
        for record in self._records:
            if names := sorted(name for name, value in record.metrics.items() if not math.isfinite(value)):
                yield f"step {record.step}: not finite are {', '.join(names)}"
            for name in ("train/skipped_updates", "train/critic/skipped_updates"):
                if record.metrics.get(name):
                    yield f"step {record.step}: {name} {record.metrics[name]:g}"
        if not any(record.metrics.get("train/grad_norm", 0.0) > 0 for record in self._records):
            yield "no step has a gradient"

    def _faults_of_weights(self) -> Iterator[str]:
        tensors = {
            name: tensor
            for path in sorted((self.run_folder / "checkpoints/final").glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        if not tensors:
            yield "no final weights"
        if names := sorted(name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()):
            yield f"final weights are not finite: {', '.join(names)}"

    def _faults_of_probabilities(self) -> Iterator[str]:
        """Yield tokens that training does not see as generation did, where both have the same weights in float32."""
        same = {"rollouts": ("synchronous", "staleness_0"), "updates": ("one",), "precision": ("float32",)}
        if all(self.setting[name] in values for name, values in same.items()):
            for record in self._records:
                found = record.metrics.get(_PROBABILITY_ERROR, 1.0)
                if not abs(found - 1.0) < _ROUNDING:
                    yield f"step {record.step}: {_PROBABILITY_ERROR} {found:g}, expected 1"

    def _faults_of_tokens(self, step: int) -> Iterator[str]:
        """Yield sampled tokens that are neither trained nor left out for one reason, or both, or more than sampled."""
        metrics, samples = self._metrics(step), self._samples_of(step)
        trained = sum(sample["num_tokens"] for sample in samples if "left_out" not in sample)
        if trained != (found := metrics.get(f"train/{_TRAINED}", 0)):
            yield f"step {step}: {trained} sampled tokens are said to be trained on, and {found:g} were"
        for sample in samples:
            if "left_out" in sample and not sample["left_out"].startswith(REASONS):
                yield f"step {step}: left out for no known reason: {sample['left_out']}"
            yield from _faults_of_turns(sample)
        yield from self._faults_of_replaced(step)
        reasons = [[each.get("left_out") for each in group] for group in _groups(self._in_batch(step)).values()]
        left_out = sum(all(of_group) and ZERO_VARIANCE not in of_group for of_group in reasons)
        if left_out != (found := metrics.get("train/env/num_groups_left_out", 0)):
            yield f"step {step}: {left_out} groups have nothing that is trained on, and {found:g} are counted"
        lags = [value for name, value in metrics.items() if name.startswith(_OF_LAGS) and name.endswith(_TRAINED)]
        if lags and sum(lags) != trained:
            yield f"step {step}: {sum(lags):g} tokens by their lags, {trained} trained on"
        yield from self._faults_of_waste(step)

    def _faults_of_replaced(self, step: int) -> Iterator[str]:
        """Yield sampled tokens that belong neither to a sample nor to a group that dynamic sampling has replaced."""
        samples, number = self._samples_of(step), self._num_groups(step) * NUM_GENERATIONS
        sampled = self._metrics(step).get("train/mean_gen_tokens_per_sample", 0.0) * number
        replaced = round(sampled) - sum(sample["num_tokens"] for sample in samples)
        # Each response of those groups has tokens; failed ones are among the samples.
        if replaced < 0 or (replaced > 0) != (len(samples) < number):
            yield f"step {step}: {sampled:g} tokens sampled in {number} responses, {replaced} more than by its samples"

    def _faults_of_waste(self, step: int) -> Iterator[str]:
        """Yield tokens sampled in vain that have no reason, or one for which no group was cancelled."""
        metrics, prefix = self._metrics(step), f"{_WASTED}/"
        wasted = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if sum(wasted.values()) != (found := metrics.get(_WASTED, 0)):
            yield f"step {step}: {found:g} tokens sampled in vain, by reason {wasted}"
        for reason in wasted.keys() - {"restart"}:
            if not metrics.get(f"{_CANCELLED}/{reason}"):
                yield f"step {step}: tokens were sampled in vain for {reason}, for which no group was cancelled"

    def _num_groups(self, step: int) -> int:
        """Return the groups of a step, those included that dynamic sampling has replaced."""
        return round(NUM_PROMPTS_A_STEP * self._metrics(step).get("train/dynamic_sampling/num_gen_batches", 1))

    def _faults_of_groups(self, step: int, lines: Sequence[int]) -> Iterator[str]:
        """Yield what is wrong with the groups of a step, whose prompts are among those of some lines."""
        groups = _groups(self._in_batch(step))
        sizes = {line: len(group) for line, group in groups.items()}
        are_whole = [*sizes.values()] == [NUM_GENERATIONS] * NUM_PROMPTS_A_STEP
        if not are_whole or not groups.keys() <= {*lines}:
            wanted = f"{NUM_GENERATIONS} of each of {NUM_PROMPTS_A_STEP} among {[*lines]}"
            yield f"step {step}: responses by line {sizes}, expected {wanted}"

    def _queue(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._checkpoint(step) / FOLDER / JSON_FILE).read_text())
        return found

    def _faults_of_prompts(self) -> Iterator[str]:
        """Yield prompts that are not those of the file's next lines, and checkpoints that count others."""
        taken = 0
        for step in range(1, NUM_STEPS + 1):
            first, taken = taken, taken + self._num_groups(step)
            yield from self._faults_of_groups(step, range(first, taken))
            if (counted := self._queue(step)["num_taken"]) != taken:
                yield f"checkpoint of step {step}: {counted} prompts taken, expected {taken}"

    def _faults_of_schedule(self) -> Iterator[str]:
        """Yield prompts that are trained on twice, lost, or not those of the samples."""
        updates = 1 if self.setting["updates"] == "one" else 2
        if (versions := [step.version for step in self.schedule]) != [updates * step for step in range(NUM_STEPS)]:
            yield f"versions of the schedule: {versions}"
            return
        trained: list[int] = []
        replaced = 0
        for number, step in enumerate(self.schedule, start=1):
            trained += [group.position for group in step.groups]
            lines = [int(group.sample_id.rpartition(":")[2]) - 1 for group in step.groups]
            yield from self._faults_of_groups(number, lines)
            for group, line in zip(step.groups, lines, strict=True):
                # Within a step the prompts of several environments are not in the order of the file.
                if group.position // NUM_PROMPTS_A_STEP != line // NUM_PROMPTS_A_STEP:
                    yield f"step {number}: prompt {group.position} is line {line + 1}"
            queue = self._queue(number)
            replaced += round(self._metrics(number).get(f"{_CANCELLED}/uninformative", 0))
            waiting = [each["position"] for name in ("open", "groups") for each in queue[name]] + queue["given_up"]
            known = trained + waiting
            # Of groups ahead of the step, some have been replaced that no step has counted yet.
            missing = queue["num_taken"] - len(known)
            if (
                len({*known}) < len(known)
                or max(known) >= queue["num_taken"]
                or missing < replaced
                or (missing and self.setting["dynamic_sampling"] == "off")
            ):
                yield (
                    f"checkpoint of step {number}: {queue['num_taken']} prompts taken, of which {sorted(trained)} were"
                    f" trained on and {sorted(waiting)} wait or are given up; {replaced} were replaced"
                )

    def _checkpoint(self, step: int) -> Path:
        return self.run_folder / "checkpoints" / f"step_{step}"


def _line(sample: dict[str, Any]) -> int:
    """Return the number of the prompt's line, from 0."""
    return int(sample["sample_id"].rpartition(":")[2]) - 1


def _groups(samples: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(_line(sample), []).append(sample)
    return groups


def _faults_of_turns(sample: dict[str, Any]) -> Iterator[str]:
    """Yield a conversation whose sampled tokens are not those of the sample, or not trained on as a whole."""
    if "conversation" not in sample:
        return
    place = f"step {sample['step']}, {sample['sample_id']}"
    turns = [turn for turn in sample["conversation"] if turn["sampled"]]
    if (found := sum(turn["tokens"][1] - turn["tokens"][0] for turn in turns)) != sample["num_tokens"]:
        yield f"{place}: {found} tokens in sampled turns, {sample['num_tokens']} sampled"
    if any(turn["trained"] != ("left_out" not in sample) for turn in turns):
        yield f"{place}: {sample.get('left_out', 'trained on')}, and its turns are not"
