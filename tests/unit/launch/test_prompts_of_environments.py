# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of several environments: from one file or several, with the tools and the checks of each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.launch.environments import check_environments
from nemo_rl_moe.launch.prompts import read_held_out_prompts, read_training_prompts
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

MODEL = Path(__file__).resolve().parents[3] / "examples/assets/tiny_qwen3_moe_tools"
MIXTURE = (
    "env.mixture={sums: {weight: 1.0, reward: {kind: exact}},"
    " tools: {weight: 1.0, reward: {kind: exact}, driver: {kind: tools, tools: [calculator]}}}"
)


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def records(names: Sequence[str], first: int = 0) -> list[dict[str, Any]]:
    """Return one record for each name of an environment, with a prompt of its own."""
    return [
        {"prompt": f"{number}+1=", "answer": str(number + 1), "environment": name}
        for number, name in enumerate(names, start=first)
    ]


def config_of(folder: Path, train: Sequence[str], held_out: Sequence[str], *more: str) -> GRPOMasterConfig:
    return load_grpo_config(
        "grpo_tiny_moe.yaml",
        [
            f"policy.model_name={MODEL}",
            "policy.max_total_sequence_length=4000",
            f"data.train.path={write(folder / 'train.jsonl', records(train))}",
            f"data.validation.path={write(folder / 'held_out.jsonl', records(held_out, 100))}",
            MIXTURE,
            *more,
        ],
    )


def read(config: GRPOMasterConfig) -> tuple[dict[str, list[str]], list[str]]:
    """Return the texts of the training prompts of each environment, and the environments of the held-out prompts."""
    tokenizer, console = load_tokenizer(str(MODEL)), ConsoleLogger(total_steps=0, live="never")
    training = read_training_prompts(config, tokenizer, console, image_rule=None)
    held_out = read_held_out_prompts(config, tokenizer, console, training, image_rule=None)
    for name, dataset in training.items():
        assert {prompt.environment for prompt in dataset} == {name}
    texts = {name: [tokenizer.decode(prompt.token_ids) for prompt in dataset] for name, dataset in training.items()}
    return texts, [prompt.environment for prompt in held_out]


def test_records_of_one_file_go_to_their_environments_with_its_tools(tmp_path: Path) -> None:
    texts, held_out = read(config_of(tmp_path, ["sums", "tools", "sums"], ["tools", "tools", "sums"]))
    assert [len(found) for found in texts.values()] == [2, 1]
    assert ["0+1=" in texts["sums"][0], "2+1=" in texts["sums"][1], "1+1=" in texts["tools"][0]] == [True] * 3
    assert '"name": "calculator"' in texts["tools"][0]
    assert not any("calculator" in text for text in texts["sums"])
    assert held_out == ["tools", "sums", "tools"]


def test_an_environment_without_held_out_records_is_not_validated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, held_out = read(config_of(tmp_path, ["sums", "tools"], ["sums"]))
    assert held_out == ["sums"]
    assert "no record of tools; validation uses the other environments only" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_environment_without_training_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(config_of(tmp_path, ["sums", "sums"], ["sums"]))
    assert caught.value.problems == [
        f"data.train.path: {tmp_path}/train.jsonl has no record of the environment tools (data.environment_key:"
        " environment)"
    ]


def test_each_may_have_data_of_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    write(other, [{"question": "7+7=", "solution": "14"}])
    own = f"{{train: {{path: {other}}}, validation: null, prompt_key: question, answer_key: solution}}"
    texts, held_out = read(config_of(tmp_path, ["x"], ["x"], f"data.environments={{sums: {{}}, tools: {own}}}"))
    assert ["0+1=" in texts["sums"][0], "7+7=" in texts["tools"][0]] == [True, True]
    assert held_out == ["sums"]


def test_what_is_wrong_with_an_environment_has_its_name(tmp_path: Path) -> None:
    wrong = "+env.mixture.own={weight: 1.0, driver: {kind: function, function: 'tests.functional.grpo_runs:nothing'}}"
    with pytest.raises(ConfigurationError) as caught:
        check_environments(config_of(tmp_path, ["sums"], ["sums"], wrong))
    (problem,) = caught.value.problems
    assert problem.startswith("env.mixture.own.driver.function: tests.functional.grpo_runs")
