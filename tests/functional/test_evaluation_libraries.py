# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""lm-eval and inspect-ai against a served model. They are in an environment of their own: make libraries."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import REPOSITORY_ROOT
from tests.functional.served import KEY, NAME, Served, make_model, serving

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="without lm-eval: make libraries"),
]
REAL_MODEL = REPOSITORY_ROOT / ".world/SmolLM2-135M-Instruct-MoE"
RECORDS: dict[str, list[dict[str, Any]]] = {
    "tiny": [
        {"question": "7+8=", "choices": ["15", "9"], "answer": 0},
        {"question": "11+2=", "choices": ["4", "13"], "answer": 1},
        {"question": "1+1=", "choices": ["2", "77"], "answer": 0},
        {"question": "40+2=", "choices": ["1", "42"], "answer": 1},
    ],
    "real": [
        {"question": "The capital of France is", "choices": [" Paris", " a banana"], "answer": 0},
        {"question": "Water freezes into", "choices": [" a song", " ice"], "answer": 1},
        {"question": "Two plus two equals", "choices": [" four", " a river"], "answer": 0},
        {"question": "The sun rises in the", "choices": [" keyboard", " east"], "answer": 1},
    ],
}
CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWERS = """\
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{reply}}"
generation_kwargs: {until: ["never"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
INSPECT = """\
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def answers():
    records = json_dataset("records.jsonl", FieldSpec(input="question", target="reply"))
    return Task(dataset=records, solver=generate(), scorer=exact())
"""


@dataclass(frozen=True)
class Evaluated:
    """A served model and the records that it is evaluated with. The first reply of them is the model's."""

    server: Served
    model: Path
    records: list[dict[str, Any]]
    folder: Path

    def run(self, *command: str) -> str:
        """Run a program, and return what it prints."""
        environment = {**os.environ, "OPENAI_API_KEY": KEY, "SERVED_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
        environment |= {"SERVED_BASE_URL": f"{self.server.url}/v1", "COLUMNS": "200"}
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, env=environment, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def lm_eval(self, task: str, kind: str, path: str, *more: str) -> dict[str, Any]:
        arguments = f"model={NAME},base_url={self.server.url}/v1/{path},num_concurrent=4,tokenizer={self.model}"
        words = ["--model", kind, "--model_args", arguments, "--tasks", task, "--include_path", ".", *more]
        self.run(sys.executable, "-m", "lm_eval", "run", *words, "--output_path", "out.json")
        [output] = self.folder.glob("out*.json")
        found: dict[str, Any] = json.loads(output.read_text())["results"][task]
        output.unlink()
        return found


@pytest.fixture(scope="module", params=["tiny", "real"])
def evaluated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluated]:
    folder = tmp_path_factory.mktemp("evaluated")
    if request.param == "real" and not REAL_MODEL.is_dir():
        pytest.skip("without the real model: make real-model")
    model = REAL_MODEL if request.param == "real" else make_model(folder / "model")
    with serving(model, folder, "--max-model-len", "256") as server:
        records = RECORDS[request.param]
        for number, record in enumerate(records):
            messages: Any = [{"role": "user", "content": record["question"]}]
            reply = server.client().chat.completions.create(
                model=NAME, messages=messages, max_tokens=6, temperature=0, stop=["never"]
            )
            record["reply"] = reply.choices[0].message.content if number == 0 else "no such reply"
        (folder / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        for name, text in (("choices", CHOICES), ("answers", ANSWERS)):
            (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "records.jsonl")))
        yield Evaluated(server, model, records, folder)


def likeliest(model: Path, question: str, choices: Sequence[str]) -> int:
    """Index of the choice with the highest log-likelihood, by transformers."""
    by_transformers: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    scores = []
    for choice in choices:
        start, whole = tokenizer.encode(question), tokenizer.encode(question + choice)
        with torch.no_grad():
            logprobs = by_transformers(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
        scores.append(float(own[len(start) - 1 :].sum()))
    return scores.index(max(scores))


def test_lm_eval_scores_choices_as_transformers_does(evaluated: Evaluated) -> None:
    found = evaluated.lm_eval("choices", "local-completions", "completions")
    right = [
        likeliest(evaluated.model, record["question"], record["choices"]) == record["answer"]
        for record in evaluated.records
    ]
    assert found["acc,none"] == sum(right) / len(right)
    if evaluated.model == REAL_MODEL:
        assert found["acc,none"] == 1.0


def test_lm_eval_reads_chat_completions(evaluated: Evaluated) -> None:
    found = evaluated.lm_eval("answers", "local-chat-completions", "chat/completions", "--apply_chat_template")
    assert found["exact_match,none"] == 1 / len(evaluated.records)


def test_inspect_reads_chat_completions(evaluated: Evaluated) -> None:
    (evaluated.folder / "answers.py").write_text(INSPECT)
    words = ["--model", f"openai-api/served/{NAME}", "--max-tokens", "6", "--temperature", "0", "--display", "plain"]
    words += ["--stop-seqs", "never"]
    words += ["--log-dir", "logs", "--log-format", "json"]
    evaluated.run(sys.executable, "-m", "inspect_ai", "eval", "answers.py", *words)
    [log] = (evaluated.folder / "logs").glob("*.json")
    shown = json.loads(log.read_text())
    assert shown["status"] == "success", shown.get("error")
    [score] = shown["results"]["scores"]
    assert shown["results"]["completed_samples"] == len(evaluated.records)
    assert score["metrics"]["mean"]["value"] == 1 / len(evaluated.records)
