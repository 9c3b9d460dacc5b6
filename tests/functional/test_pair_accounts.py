# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The accounts of combined features find what is lost, counted twice, or no number."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.functional.pairs.accounts import Accounts
from tests.functional.pairs.settings import SIMPLEST


@dataclass
class Made:
    """Records of a run of three steps, each of two groups of two responses of 5 tokens, one of them left out in step 2.

    Attributes:
        folder: The run's folder.
        is_asynchronous: Its groups run ahead by a step.
        metrics: By step.
        samples: In their order.
        schedule: Positions of each step's prompts.
        queues: What waits in the checkpoint of each step, by its number.
        rounds: Rounds taken, by checkpoint.
        weights: The final ones.
    """

    folder: Path
    is_asynchronous: bool = False
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    schedule: list[list[int]] = field(default_factory=lambda: [[0, 1], [2, 3], [4, 5]])
    queues: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=lambda: [1, 2, 3])
    weights: float = 1.0

    def __post_init__(self) -> None:
        self.metrics = {0: {"val/reward": 0.5}}
        self.samples = [self._sample(0, line, split="val") for line in range(3)]
        for step in (1, 2, 3):
            trained = 20 if step != 2 else 15
            self.metrics[step] = {
                "train/grad_norm": 1.0,
                "train/skipped_updates": 0.0,
                "train/num_valid_tokens": float(trained),
                "train/mean_gen_tokens_per_sample": 5.0,
                "train/env/num_groups_left_out": 0.0,
            }
            for line in (2 * step - 2, 2 * step - 1):
                self.samples += [self._sample(step, line) for _ in range(2)]
            if step == 2:
                self.samples[-1]["left_out"] = "timeout: it took too long (env.on_failure: leave_out)"
                self.samples[-1]["conversation"][1]["trained"] = False
            if step > 1:
                self.metrics[step] |= {"val/reward": 0.5}
                self.samples += [self._sample(step, line, split="val") for line in range(3)]
            if self.is_asynchronous:
                waiting = [{"position": 2 * step}, {"position": 2 * step + 1}]
                self.queues.append(
                    {"num_taken": 2 * step + 2, "open": waiting[:1], "groups": waiting[1:], "given_up": []}
                )
                self.metrics[step] |= {
                    "train/by_lag/0/num_valid_tokens": 4.0,
                    "train/by_lag/1/num_valid_tokens": trained - 4.0,
                    "train/rollouts/wasted_tokens": 7.0,
                    "train/rollouts/wasted_tokens/stale": 4.0,
                    "train/rollouts/wasted_tokens/restart": 3.0,
                    "train/rollouts/num_cancelled/stale": 1.0,
                }

    @staticmethod
    def _sample(step: int, line: int, *, split: str = "train") -> dict[str, Any]:
        turns = [("user", [0, 9], False), ("assistant", [9, 14], True)]
        conversation = [
            {"role": role, "tokens": tokens, "sampled": sampled, "trained": sampled and split == "train"}
            for role, tokens, sampled in turns
        ]
        sample_id = f"data/prompts.jsonl:{line + 1}"
        return {"step": step, "split": split, "sample_id": sample_id, "num_tokens": 5, "conversation": conversation}

    def faults(self) -> list[str]:
        """Write the records, and return what the accounts find."""
        final = self.folder / "checkpoints" / "final"
        final.mkdir(parents=True)
        save_file({"weight": torch.tensor([self.weights])}, final / "model.safetensors")
        records = [{"step": step, "time": 1.0, "metrics": metrics} for step, metrics in self.metrics.items()]
        (self.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        (self.folder / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in self.samples))
        for step, rounds in enumerate(self.rounds, start=1):
            checkpoint = self.folder / "checkpoints" / f"step_{step}"
            (checkpoint / "rollouts").mkdir(parents=True)
            queue = self.queues[step - 1] if self.is_asynchronous else {"num_taken": 2 * rounds}
            (checkpoint / "rollouts" / "queue.json").write_text(json.dumps(queue))
        if self.is_asynchronous:
            steps = [
                {"version": version, "groups": [_scheduled(position, version) for position in positions]}
                for version, positions in enumerate(self.schedule)
            ]
            (self.folder / "schedule.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
        rollouts = "staleness_1" if self.is_asynchronous else "synchronous"
        return list(Accounts({**SIMPLEST, "rollouts": rollouts}, self.folder).faults())


def _scheduled(position: int, version: int) -> dict[str, Any]:
    sample_id = f"data/prompts.jsonl:{position + 1}"
    return {"position": position, "sample_id": sample_id, "attempt": 0, "version": version, "finished_version": version}


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_whole_run_has_no_fault(is_asynchronous: bool, tmp_path: Path) -> None:
    assert Made(tmp_path, is_asynchronous).faults() == []


def drop_a_token(made: Made) -> None:
    made.metrics[1]["train/num_valid_tokens"] = 19.0


def lose_a_response(made: Made) -> None:
    del made.samples[3]


def forget_a_turn(made: Made) -> None:
    del made.samples[3]["conversation"][1]


def train_on_what_is_left_out(made: Made) -> None:
    next(sample for sample in made.samples if "left_out" in sample)["conversation"][1]["trained"] = True


def leave_out_without_a_reason(made: Made) -> None:
    next(sample for sample in made.samples if "left_out" in sample)["left_out"] = "it was late"


def skip_prompts(made: Made) -> None:
    for sample in made.samples:
        if (sample["step"], sample["split"]) == (3, "train"):
            number = int(sample["sample_id"].rpartition(":")[2])
            sample["sample_id"] = f"data/prompts.jsonl:{number + 2}"


def count_a_round_twice(made: Made) -> None:
    made.rounds = [1, 2, 4]


def repeat_a_step(made: Made) -> None:
    made.metrics = {0: made.metrics[0], 2: made.metrics[2], 1: made.metrics[1], 3: made.metrics[3]}


def forget_a_validation(made: Made) -> None:
    del made.metrics[3]["val/reward"]


def validate_a_prompt_twice(made: Made) -> None:
    made.samples.insert(0, made.samples[0])


def make_a_number_nan(made: Made) -> None:
    made.metrics[2]["train/loss"] = "NaN"


def make_weights_nan(made: Made) -> None:
    made.weights = float("nan")


def skip_an_update(made: Made) -> None:
    made.metrics[2]["train/skipped_updates"] = 1.0


def have_no_gradient(made: Made) -> None:
    for metrics in made.metrics.values():
        metrics["train/grad_norm"] = 0.0


def see_other_probabilities(made: Made) -> None:
    made.metrics[2]["train/token_mult_prob_error"] = 1.01


def count_a_group_as_left_out(made: Made) -> None:
    made.metrics[1]["train/env/num_groups_left_out"] = 1.0


SYNCHRONOUS: dict[Callable[[Made], None], str] = {
    drop_a_token: "step 1: 20 sampled tokens are said to be trained on, and 19 were",
    lose_a_response: "step 1: 15 sampled tokens are said to be trained on, and 20 were",
    forget_a_turn: "step 1, data/prompts.jsonl:1: 0 tokens in sampled turns, 5 sampled",
    train_on_what_is_left_out: "step 2, data/prompts.jsonl:4: timeout: it took too long (env.on_failure: leave_out)",
    leave_out_without_a_reason: "step 2: left out for no known reason: it was late",
    skip_prompts: "step 3: responses by line {6: 2, 7: 2}, expected 2 of each of 2 among [4, 5]",
    count_a_round_twice: "checkpoint of step 3: 8 prompts taken, expected 6",
    repeat_a_step: "steps of the metrics: [0, 2, 1, 3], expected [0, 1, 2, 3]",
    forget_a_validation: "step 3: 0 metrics of a validation, due at (0, 2, 3)",
    validate_a_prompt_twice: "step 0: validated prompts {0: 2, 1: 1, 2: 1}",
    make_a_number_nan: "step 2: not finite are train/loss",
    make_weights_nan: "final weights are not finite: weight",
    skip_an_update: "step 2: train/skipped_updates 1",
    have_no_gradient: "no step has a gradient",
    see_other_probabilities: "step 2: train/token_mult_prob_error 1.01, expected 1",
    count_a_group_as_left_out: "step 1: 0 groups have nothing that is trained on, and 1 are counted",
}


def lose_a_prompt(made: Made) -> None:
    made.queues[1]["open"] = []


def train_twice(made: Made) -> None:
    made.schedule[2] = [2, 5]


def keep_what_was_trained_on(made: Made) -> None:
    made.queues[1]["groups"].append({"position": 0})


def waste_without_a_reason(made: Made) -> None:
    made.metrics[2]["train/rollouts/wasted_tokens"] = 9.0


def waste_for_another_reason(made: Made) -> None:
    del made.metrics[2]["train/rollouts/num_cancelled/stale"]


def lose_a_lag(made: Made) -> None:
    made.metrics[2]["train/by_lag/1/num_valid_tokens"] = 10.0


def take_another_prompt(made: Made) -> None:
    made.schedule[2] = [4, 7]


ASYNCHRONOUS: dict[Callable[[Made], None], str] = {
    lose_a_prompt: "checkpoint of step 2: 6 prompts taken, of which [0, 1, 2, 3] were trained on and [5] wait or",
    train_twice: "step 3: responses by line {4: 2, 5: 2}, expected 2 of each of 2 among [2, 5]",
    keep_what_was_trained_on: "checkpoint of step 2: 6 prompts taken, of which [0, 1, 2, 3] were trained on and [0, 4",
    waste_without_a_reason: "step 2: 9 tokens sampled in vain, by reason {'stale': 4.0, 'restart': 3.0}",
    waste_for_another_reason: "step 2: tokens were sampled in vain for stale, for which no group was cancelled",
    lose_a_lag: "step 2: 14 tokens by their lags, 15 trained on",
    take_another_prompt: "step 3: responses by line {4: 2, 5: 2}, expected 2 of each of 2 among [4, 7]",
}


@pytest.mark.parametrize(
    ("is_asynchronous", "spoil"),
    [*product([False], SYNCHRONOUS), *product([True], ASYNCHRONOUS)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_it_finds(is_asynchronous: bool, spoil: Callable[[Made], None], tmp_path: Path) -> None:
    made = Made(tmp_path, is_asynchronous=is_asynchronous)
    spoil(made)
    found = made.faults()
    assert found
    assert found[0].startswith((ASYNCHRONOUS if is_asynchronous else SYNCHRONOUS)[spoil]), found
