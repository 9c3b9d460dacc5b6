# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's data: right answers, fixed shares, no sum in two sets."""

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe import demo_data
from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.config.schema_grpo import PromptDataConfig, PromptSourceConfig
from nemo_rl_moe.data.preferences import load_preferences
from nemo_rl_moe.data.prompts import load_prompts
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rewards.registry import make_reward_function
from tests.support.grpo_inputs import environment_section


@pytest.fixture(scope="module")
def script(repository):
    return repository / "examples/make_demo_data.py"


@pytest.fixture(scope="module")
def maker():
    return demo_data


@pytest.fixture(scope="module")
def small(maker):
    return maker.Parameters(seed=0, num_train=2000, num_validation=100, num_grpo_prompts=50, num_preferences=300)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def unordered(prompts):
    return {tuple(sorted(prompt.removesuffix("=").split("+"))) for prompt in prompts}


def test_working_by_hand(maker):
    assert maker.working("228", "378") == "8+8=16;2+7+1=10;2+3+1=6"
    assert maker.working("721", "978") == "1+8=9;2+7+0=9;7+9+0=16"
    assert maker.completion(("228", "378"), True) == "<think>8+8=16;2+7+1=10;2+3+1=6</think>606"
    assert maker.completion(("541", "592"), False) == "<think></think>1133"


@given(st.integers(100, 999), st.integers(100, 999))
def test_working_spells_the_answer(maker, a, b):
    columns = [step.split("=")[1] for step in maker.working(str(a), str(b)).split(";")]
    assert columns[2] + columns[1][-1] + columns[0][-1] == str(a + b)


def test_files(maker, small, tmp_path):
    maker.write_data(tmp_path, small)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["manifest.json", *maker.FILES])
    for name, size in (("train", 2000), ("validation", 100)):
        lines = read(tmp_path / f"{name}.jsonl")
        assert len(lines) == size
        at_once = [line for line in lines if line["completion"].startswith("<think></think>")]
        assert len(at_once) == round(size * 0.55)
        for line in lines:
            a, b = line["prompt"].removesuffix("=").split("+")
            assert len(a) == len(b) == 3
            working = "" if line in at_once else maker.working(a, b)
            assert line == {"prompt": f"{a}+{b}=", "completion": f"<think>{working}</think>{int(a) + int(b)}"}


def test_prompts_of_grpo(maker, small, tmp_path):
    maker.write_data(tmp_path, small)
    asked, held_out = read(tmp_path / "grpo.jsonl"), read(tmp_path / "validation_prompts.jsonl")
    assert (len(asked), len(held_out)) == (50, 100)
    for line in [*asked, *held_out]:
        a, b = line["prompt"].removesuffix("=").split("+")
        assert line == {
            "prompt": f"{a}+{b}=",
            "answer": str(int(a) + int(b)),
            "metadata": {"source_dataset": "basic_arithmetic", "expression": f"{a}+{b}"},
        }
    imitated = [line["prompt"] for name in ("train", "validation") for line in read(tmp_path / f"{name}.jsonl")]
    assert not unordered(line["prompt"] for line in asked) & unordered(imitated)
    assert [line["prompt"] for line in held_out] == imitated[-100:]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert sorted(manifest["sha256"]) == sorted(maker.FILES)
    assert manifest["parameters"]["recipe_version"] == 4


def test_a_slip_by_hand(maker):
    assert maker.work_out("228", "378", (1, -1)) == ("8+8=16;2+7+1=9;2+3+0=5", 596)
    assert maker.work_out("721", "978", (2, 1)) == ("1+8=9;2+7+0=9;7+9+0=17", 1799)


@pytest.mark.full
def test_preferences(maker, small, tmp_path, demo_tokenizer):
    maker.write_data(tmp_path, small)
    report = load_preferences(str(tmp_path / "preferences.jsonl"), "train", demo_tokenizer, 64).report
    assert (report.num_kept, report.num_truncated, report.num_dropped, report.num_bad_lines) == (300, 0, 0, 0)
    lines = read(tmp_path / "preferences.jsonl")
    held_out = read(tmp_path / "validation_preferences.jsonl")
    assert (len(lines), len(held_out)) == (300, 100)
    for line in [*lines, *held_out]:
        a, b = line["prompt"].removesuffix("=").split("+")
        assert line["chosen"] == f"<think>{maker.working(a, b)}</think>{int(a) + int(b)}"
        steps, _, answer = line["rejected"].removeprefix("<think>").partition("</think>")
        columns = [step.split("=")[1] for step in steps.split(";")]
        assert answer != str(int(a) + int(b))
        assert str(int(columns[2] + columns[1][-1] + columns[0][-1])) == answer, "the answer follows from the slip"
        wrong = [eval_column(step) for step in steps.split(";")]
        assert sorted(map(abs, wrong)) == [0, 0, 1]
        assert "-" not in line["rejected"]
    asked = [line["prompt"] for name in ("train", "validation", "grpo") for line in read(tmp_path / f"{name}.jsonl")]
    assert not unordered(line["prompt"] for line in lines) & unordered(asked)
    assert [line["prompt"] for line in held_out] == [line["prompt"] for line in read(tmp_path / "validation.jsonl")]


@pytest.mark.full
def test_reward_pairs(maker, small, tmp_path):
    maker.write_data(tmp_path, small)
    for prefix in ("", "validation_"):
        pairs, of_dpo = read(tmp_path / f"{prefix}reward_pairs.jsonl"), read(tmp_path / f"{prefix}preferences.jsonl")
        assert [(each["prompt"], each["chosen"]) for each in pairs] == [
            (each["prompt"], each["chosen"]) for each in of_dpo
        ]
        answers = [each["chosen"].partition("</think>")[2] for each in pairs]
        assert [each["rejected"] for each in pairs] == [f"<think></think>{answer}" for answer in answers]


def eval_column(step):
    """By how much a column like `2+7+1=9` is wrong."""
    terms, _, total = step.partition("=")
    return int(total) - sum(map(int, terms.split("+")))


def test_no_sum_twice_in_any_set(maker, small):
    problems = maker.draw_problems(small)
    sets = (problems.validation, problems.grpo, problems.train, problems.preferences)
    assert [len(each) for each in sets] == [100, 50, 2000, 300]
    assert len(unordered(f"{a}+{b}=" for each in sets for a, b in each)) == 2450


def test_seeds_share_no_run_of_problems(maker, small):
    first, second = (maker.draw_problems(dataclasses.replace(small, seed=seed, num_train=500)).train for seed in (0, 1))
    assert len(set(first) & set(second)) < 10  # by chance 500 * 500 / 810,000


def test_validation_depends_on_neither_the_size_of_training_nor_its_own_tail(maker, small, tmp_path):
    maker.write_data(tmp_path / "a", small)
    maker.write_data(tmp_path / "b", dataclasses.replace(small, num_train=10, num_grpo_prompts=0))
    assert (tmp_path / "a/validation.jsonl").read_bytes() == (tmp_path / "b/validation.jsonl").read_bytes()


def test_made_twice_is_the_same_and_made_once_is_skipped(maker, small, tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--num-train", "50", "--num-validation", "10", "--num-grpo-prompts", "5"]
    arguments += ["--num-preferences", "7"]
    files = [tmp_path / name for name in maker.FILES]

    def contents():
        return [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]

    assert maker.main(arguments) == 0
    made = contents()
    counts = "50 sums for SFT, 7 for DPO, 5 for GRPO and 10 to validate with"
    assert capsys.readouterr().out == f"{tmp_path}: wrote {counts}\n"
    assert maker.main(arguments) == 0
    assert "already made" in capsys.readouterr().out
    assert contents() == made
    assert maker.main([*arguments, "--force"]) == 0
    assert [text for text, _ in contents()] == [text for text, _ in made]
    assert contents() != made

    files[0].write_text("changed by hand")
    assert maker.main(arguments) == 0
    assert contents()[0][0] == made[0][0]
    assert maker.main([*arguments, "--seed", "1"]) == 0
    assert contents()[0][0] != made[0][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "-1"], "--seed: got -1, expected 0 or more"),
        (["--num-train", "0"], "--num-train: got 0, expected 1 or more"),
        (["--num-train", "400000"], "sums in all, expected 300000 at most"),
    ],
)
def test_wrong_arguments(maker, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        maker.main(["--output", str(tmp_path / "x"), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.full
def test_as_a_program_and_read_by_the_product(script, tmp_path, demo_tokenizer):
    command = [sys.executable, str(script), "--output", str(tmp_path), "--num-train", "300", "--seed", "3"]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    dataset = load_sft_dataset(str(tmp_path / "train.jsonl"), "train", demo_tokenizer, 64)
    report = dataset.report
    assert (report.num_kept, report.num_truncated, report.num_bad_lines) == (300, 0, 0)
    lines = read(tmp_path / "train.jsonl")
    assert [demo_tokenizer.decode(item.input_ids) for item in dataset] == [
        f"{line['prompt']}{line['completion']}<eos>" for line in lines
    ]
    assert [demo_tokenizer.decode(item.input_ids[item.token_mask]) for item in dataset] == [
        f"{line['completion']}<eos>" for line in lines
    ]
    # What generation may produce later: 31 tokens hold the longest answer with its working.
    assert max(item.num_trained_tokens() for item in dataset) <= 31


def test_prompts_of_grpo_as_the_product_reads_and_scores_them(maker, small, tmp_path, demo_tokenizer):
    maker.write_data(tmp_path, small)
    env = environment_section({"kind": "reasoning_gym", "task": "basic_arithmetic", "answer_after": "</think>"})
    assert isinstance(env.reward, WorkerRewardConfig)
    source = PromptSourceConfig(path=str(tmp_path / "validation_prompts.jsonl"), split="train", num_items=None, seed=0)
    data = PromptDataConfig(
        train=source,
        validation=None,
        prompt_key="prompt",
        prompt_template=None,
        answer_key="answer",
        on_bad_line="stop",
        shuffle=True,
        load_timeout_s=60.0,
        image_key=None,
        image_root=None,
        max_image_pixels=1000,
        chat_template_kwargs={},
        tools=[],
    )
    prompts = load_prompts(source, data, demo_tokenizer, 33, env)
    assert (len(prompts), prompts.report.num_dropped) == (100, 0)

    environment = make_reward_function(env.reward, env)
    imitated = load_sft_dataset(str(tmp_path / "validation.jsonl"), "train", demo_tokenizer, 64)
    for prompt, example in zip(prompts, imitated, strict=True):
        start = int(example.token_mask.argmax())
        assert prompt.token_ids == tuple(example.input_ids[:start]), "SFT and GRPO agree token for token"
        completion = demo_tokenizer.decode(example.input_ids[start:-1])
        right = ScoringItem(prompt.sample_id, prompt.text, completion, False, prompt.record)
        assert environment.score(right) == Score(1.0, True)
        assert environment.score(dataclasses.replace(right, response=f"{completion}0")) == Score(0.0, False)
