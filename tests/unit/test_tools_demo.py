# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo with a tool: its data, what is read of its runs, and its table."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples.tools_demo.data import Question, conversation, draw_question, needs_tool
from examples.tools_demo.data import main as make_data
from examples.tools_demo.results import Run, table, validations
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.tools.calculator import calculator
from nemo_rl_moe.tools.definitions import load_tools
from nemo_rl_moe.tools.formats.interface import ToolCall
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.conftest import REPOSITORY_ROOT

MODEL = REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_calculator"
FILES = ("train.jsonl", "validation.jsonl", "grpo.jsonl", "validation_prompts.jsonl")


def made(folder: Path, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    sizes = ["--num-train", "300", "--num-validation", "40", "--num-grpo-prompts", "60"]
    assert make_data(["--output", str(folder), "--seed", str(seed), *sizes]) == 0
    return {name: [json.loads(line) for line in (folder / name).read_text().splitlines()] for name in FILES}


def test_answers_and_results_are_right_and_no_question_is_in_two_sets(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert [len(found[name]) for name in FILES] == [300, 40, 60, 40]
    prompts = [record["prompt"] for name in FILES[2:] for record in found[name]]
    for record in found["train.jsonl"] + found["validation.jsonl"]:
        question, *calls, answer = record["messages"]
        assert answer["content"] == calculator(question["content"].removesuffix("="))
        for call, result in zip(calls[::2], calls[1::2], strict=True):
            (asked,) = call["tool_calls"]
            assert result["content"] == calculator(asked["function"]["arguments"]["expression"])
        assert "tools" in record or not calls
    prompts += [record["messages"][0]["content"] for record in found["train.jsonl"]]
    assert len(set(prompts)) == len(prompts) == 400
    assert [each["messages"][0]["content"] for each in found["validation.jsonl"]] == prompts[60:100]
    kinds = {needs_tool(prompt) for prompt in prompts}
    assert kinds == {True, False}


def test_the_same_seed_gives_the_same_data_and_another_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, again, other = (made(tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert one == again != other
    made(tmp_path / "a", 3)
    assert capsys.readouterr().out.splitlines()[-1].endswith("already made with these parameters")


def test_an_easy_question_has_its_answer_in_it() -> None:
    chance = Random(0)
    for question in (draw_question(chance) for _ in range(500)):
        assert needs_tool(question.text) != (question.answer == f"{question.a}{question.c}")


def test_the_model_writes_calls_in_two_tokens_and_the_expression() -> None:
    tokenizer = load_tokenizer(str(MODEL))
    tool = load_tools(["calculator"], {})["calculator"]
    conversations = (conversation(Question(482, 317, 905), Random(seed), tool.definition) for seed in range(100))
    record = next(each for each in conversations if len(each["messages"]) > 2)  # type: ignore[arg-type]
    text = tokenizer.apply_chat_template(record["messages"], tools=record["tools"], tokenize=False)
    assert text.startswith("<tools>calculator</tools>482*317+905=<tool_call>")
    response = text.partition("=")[2].partition("<eos>")[0]
    (call,) = TOOL_FORMATS["hermes"].calls(response, {})
    assert isinstance(call, ToolCall)
    assert len(tokenizer.encode(response)) == 2 + len(str(call.arguments["expression"]))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def write_samples(folder: Path, steps: dict[int, list[tuple[str, bool, int]]]) -> Path:
    folder.mkdir(parents=True)
    lines = [{"step": 1, "split": "train", "prompt": "100*10+1=", "is_correct": False}]
    for step, samples in steps.items():
        for prompt, is_correct, num_turns in samples:
            turns = {"num_turns": num_turns} if num_turns > 1 else {}
            asked = prompt[:-1] if num_turns == 2 else "1+1"
            response = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{asked}"}}}}</tool_call>'
            sample = {"step": step, "split": "val", "prompt": prompt, "response": response, "is_correct": is_correct}
            lines.append(sample | turns)
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_shares_are_of_each_kind_of_question_and_the_table_has_intervals_over_seeds(tmp_path: Path) -> None:
    hard, easy = "482*317+905=", "482*100+37="
    runs = {}
    for seed, last in ((0, [(hard, True, 2)] * 4), (1, [(hard, True, 2)] * 2 + [(hard, False, 1)] * 2)):
        steps = {0: [(hard, False, 1)] * 3 + [(hard, True, 3), (easy, True, 2)], 40: [*last, (easy, True, 1)]}
        runs[Run("tool", seed)] = validations(write_samples(tmp_path / str(seed), steps))
    assert runs[Run("tool", 0)][0] == {
        "right": 0.4,
        "hard right": 0.25,
        "easy right": 1.0,
        "hard called": 0.25,
        "easy called": 1.0,
        "hard asked whole": 0.0,
    }
    lines = table(runs).splitlines()
    assert lines[2] == (
        "| with the calculator | 0 | 0.40 to 1.00 | 0.25 to 1.00 | 1.00 to 1.00 | 0.25 to 1.00 | 0.00 to 1.00 |"
        " 1.00 to 0.00 |"
    )
    # Of two seeds that differ so much, Student's t leaves everything open.
    assert lines[4].split(" | ")[2:5] == ["0.80 (0.00 to 1.00)", "0.75 (0.00 to 1.00)", "1.00 (1.00 to 1.00)"]


@pytest.mark.parametrize("content", ["", "no JSON\n", '{"split": "val"}\n'])
def test_a_run_without_validations_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "samples.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"samples\.jsonl: no"):
        validations(tmp_path)
