# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data, results and pictures of the demo with a released model; the model itself is in `tests/world`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.real_demo.data import NUM_SHOWN, NUM_TRAINED, WORDS, write_data
from examples.real_demo.data import main as make_data
from examples.real_demo.experts import KindsByExpert, draw_kinds, sharpest_table
from examples.real_demo.results import Answer, Run, accuracy, read_run, responses, table
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.errors import DataError


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words_of(folder: Path, name: str) -> list[str]:
    return [record.get("prompt", record.get("messages"))[1]["content"] for record in records(folder / f"{name}.jsonl")]


def test_words_are_distinct_and_held_out_ones_are_never_trained_on(tmp_path: Path) -> None:
    everything = [word for text in WORDS.values() for word in text.split()]
    assert len(set(everything)) == len(everything) == 160
    assert make_data(["--output", str(tmp_path), "--seed", "0"]) is None
    shown, trained, held_out = (words_of(tmp_path, name) for name in ("sft", "grpo", "validation"))
    assert len(shown) == 5 * NUM_SHOWN
    assert len(trained) == 5 * NUM_TRAINED
    assert set(shown) < set(trained)
    assert not set(trained) & set(held_out)
    assert sorted(trained + held_out) == sorted(everything)
    assert words_of(tmp_path, "sft_validation") == held_out


def test_answers_are_the_kinds_and_seeds_hold_out_other_words(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_data(tmp_path / str(seed), seed)
        for record in records(tmp_path / str(seed) / "grpo.jsonl"):
            assert record["prompt"][1]["content"] in WORDS[record["answer"]].split()
        for record in records(tmp_path / str(seed) / "sft.jsonl"):
            _, asked, answered = record["messages"]
            assert asked["content"] in WORDS[answered["content"]].split()
    first, second = (words_of(tmp_path / name, "validation") for name in ("0", "1"))
    assert sorted(first) != sorted(second)


def test_reinforcement_begins_with_what_fine_tuning_leaves() -> None:
    sft, grpo = (load_any_config(f"{name}_real_moe.yaml", [], check_paths=False) for name in ("sft", "grpo"))
    assert grpo.policy.model_name == f"{sft.checkpointing.checkpoint_dir}/final"


def write_samples(folder: Path, answers: dict[int, list[tuple[str, str, bool]]]) -> None:
    lines = [
        {"step": step, "split": "val", "prompt": f"question?\n\n{word}", "response": text, "is_correct": is_right}
        for step, found in answers.items()
        for word, text, is_right in found
    ]
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"split": "train"}]))


def test_first_and_last_validation_of_the_last_run_are_compared(tmp_path: Path) -> None:
    write_samples(tmp_path / "exp_001", {0: [("wolf", "x", False)]})
    middle = [("wolf", "food", False), ("wolf", "food", False)]
    write_samples(
        tmp_path / "exp_002",
        {0: [("wolf", "car", False), ("wolf", "animal", True)], 10: middle, 20: [("wolf", "animal", True)] * 2},
    )
    run = read_run(tmp_path)
    assert run.folder.name == "exp_002"
    assert (accuracy(run.before), accuracy(run.after)) == (0.5, 1.0)
    assert responses(run) == "  wolf  'car' (wrong)  ->  'animal' (right)"


@pytest.mark.parametrize("content", ['{"split": "train"}\n', "{", ""])
def test_run_without_a_validation_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "exp_001").mkdir()
    (tmp_path / "exp_001" / "samples.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"samples\.jsonl: no"):
        read_run(tmp_path)


def run_of(num_before: int, num_after: int) -> Run:
    before, after = ([Answer("wolf", "", number < right) for number in range(10)] for right in (num_before, num_after))
    return Run(Path(), before, after)


def test_table_has_the_gain_of_each_seed_and_its_interval() -> None:
    lines = table({1: run_of(2, 7), 0: run_of(2, 8), 2: run_of(3, 7)}).splitlines()
    assert lines[2:5] == [
        "| 0 | 0.200 | 0.800 | +0.600 |",
        "| 1 | 0.200 | 0.700 | +0.500 |",
        "| 2 | 0.300 | 0.700 | +0.400 |",
    ]
    # Student's t with two degrees of freedom: 4.303 * 0.1 / sqrt(3).
    assert lines[5] == "| mean of 3 | | | +0.500 (+0.252 to +0.748) |"
    assert len(table({0: run_of(2, 8)}).splitlines()) == 3


def test_information_is_none_for_equal_experts_and_all_of_it_for_own_ones() -> None:
    of_words = torch.zeros(3, 5, 2, 6)
    of_words[0] = torch.tensor([1.0, 2, 3, 4, 5, 6])
    of_words[1, range(5), :, range(5)] = 7.0
    of_words[2] = torch.tensor([2.0, 1, 1, 1, 1, 1])
    words = [["bee", "cow"], ["ivy", "oak"], ["ham", "pie"], ["axe", "saw"], ["Iran", "Peru"]]
    found = KindsByExpert(words, of_words)
    assert found.information.tolist() == pytest.approx([0.0, math.log2(5), 0.0], abs=1e-6)
    lower_case = KindsByExpert(words, torch.ones(3, 5, 2, 6))
    lines = sharpest_table(found, lower_case).splitlines()
    assert lines[0].startswith("layer 1, bits that the experts tell about the kind of a word: 2.32 (mean")
    assert lines[1].startswith("  control, all words in lower case: 0.00 (mean")
    assert "  expert 0: 2 words, such as bee, cow" in lines
    assert "  expert 5: -" in lines
    figure = draw_kinds(found, lower_case)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels[:10:5] == ["layer, words as written", "layer, words in lower case"]


def test_few_words_tell_something_by_chance() -> None:
    # Each word has an expert of its own choice, which says nothing about its kind.
    chosen = torch.randint(6, (4, 5, 8), generator=torch.Generator().manual_seed(1))
    found = KindsByExpert([], torch.nn.functional.one_hot(chosen, 6).float())
    by_chance = found.information_by_chance()
    assert (by_chance > 0.1).all()
    # As near as any other deal of the kinds.
    assert found.information.mean().item() == pytest.approx(by_chance.mean().item(), rel=0.3)
    # Many words tell much less.
    many = KindsByExpert([], torch.nn.functional.one_hot(chosen.repeat(1, 1, 30), 6).float())
    assert (many.information_by_chance() < by_chance / 10).all()
