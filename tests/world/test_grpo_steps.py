# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A step of GRPO with each published tokenizer: a tiny model of the family, its prompts and responses read back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.models.model_files import CONFIG_FILE, GENERATION_CONFIG_FILE
from tests.functional import grpo_runs, sft_runs
from tests.support.family_models import FAMILY_MODELS
from tests.support.loggers import read_jsonl
from tests.world.conftest import Published
from tests.world.conversations import system, user
from tests.world.families import FAMILIES
from tests.world.tokenizers import tokenizer_of

# The family of `families.py`, and the tiny model with its architecture.
_MODELS = {
    "Qwen3-30B-A3B": "qwen3_moe",
    "gpt-oss-120b": "gpt_oss",
    "Qwen3.5-35B-A3B": "qwen3_5_moe_text",
    "Llama-3.1-8B-Instruct": "llama",
    "DeepSeek-V3.1": "deepseek_v3",
}
_MULTIPLE = 128


def write_model(folder: Path, name: str, published: Published) -> Any:
    """Write the files of a tiny model without weights, as the hub has them, and return the tokenizer."""
    family = next(family for family in FAMILIES if family.name == name)
    tokenizer = tokenizer_of(family, published)
    tokenizer.save_pretrained(folder)
    model = FAMILY_MODELS[_MODELS[name]]
    rows = -(-len(tokenizer) // _MULTIPLE) * _MULTIPLE
    ids = [tokenizer.convert_tokens_to_ids(text) for text in family.named]
    config = {**model.config_json(), "vocab_size": rows, "max_position_embeddings": 1024, "eos_token_id": ids[0]}
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return tokenizer


@pytest.mark.parametrize("name", _MODELS)
def test_a_step(name: str, published: Published, tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path / "model", name, published)
    prompts = [[system("SYS0"), user("USR1: 2+2=?")], [user("USR2\n\n你好")]]
    lines = [{"prompt": prompt, "answer": "4"} for prompt in prompts]
    (tmp_path / "grpo.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    run = grpo_runs.run(
        grpo_runs.settings(
            tmp_path,
            tmp_path,
            policy__model_name=tmp_path / "model",
            policy__max_total_sequence_length=256,
            policy__generation__max_new_tokens=8,
            policy__train_global_batch_size=4,
            grpo__num_prompts_per_step=2,
            grpo__num_generations_per_prompt=2,
            grpo__max_num_steps=1,
            grpo__val_period=0,
            data__validation=None,
            env__reward__kind="exact",
            env__score_truncated=True,
            cluster__cpu_workers_per_node=1,
            **sft_runs.only_jsonl(),
        ),
        tmp_path,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    for text in tokenizer_stops(name):
        assert repr(text) in run.stdout
    folder = sft_runs.only_run_folder(tmp_path)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(samples) == 4
    assert {sample["prompt"] for sample in samples} == {"SYS0\n\nUSR1: 2+2=?", "USR2\n\n你好"}
    assert all(len(tokenizer(sample["response"], add_special_tokens=False)["input_ids"]) > 0 for sample in samples)
    ((_, error),) = read_jsonl(folder / "metrics.jsonl")["train/token_mult_prob_error"]
    assert error == pytest.approx(1.0, abs=1e-4)
    shutil.rmtree(tmp_path / "model")  # tokenizers take tens of megabytes each


def tokenizer_stops(name: str) -> tuple[str, ...]:
    """Return the texts of the tokens that end a response."""
    family = next(family for family in FAMILIES if family.name == name)
    return (*family.named, family.eos)
