# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json shows is reported in one line by the driver, before Ray and workers are started."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_moe import cli
from nemo_rl_moe.config.loading import load_any_config, load_config
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.roles import prepare_role
from nemo_rl_moe.launch.setup import prepare_model
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

pytestmark = pytest.mark.megatron

MODEL = Path(__file__).resolve().parents[3] / "examples/assets/tiny_qwen3_moe"
TOO_LONG = "policy.max_total_sequence_length=513"
TOO_MANY = "policy.megatron_cfg.moe_router_topk=9"
LINES = {
    TOO_LONG: f"policy.max_total_sequence_length: got 513, expected at most 512, the positions of {MODEL} by its"
    " config.json",
    TOO_MANY: "policy.megatron_cfg.moe_router_topk: got 9, expected at most the model's 8 experts",
}


@pytest.mark.parametrize("override", LINES)
def test_a_run_and_a_plan_are_refused(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"policy.model_name={MODEL}", override]
    policy = load_config("sft_tiny_moe.yaml", overrides, check_paths=False).policy
    with pytest.raises(ConfigurationError) as caught:
        prepare_model(policy, ConsoleLogger(total_steps=0, live="never"))
    assert caught.value.problems == [LINES[override]]
    assert cli.main(["plan", "--config", "sft_tiny_moe.yaml", *overrides]) == 2
    assert capsys.readouterr().err == f"error: {LINES[override]}\n"


def test_as_long_and_as_many_as_the_model_has_is_right() -> None:
    most = (f"policy.model_name={MODEL}", TOO_LONG.replace("513", "512"), TOO_MANY.replace("9", "8"))
    policy = load_config("sft_tiny_moe.yaml", most, check_paths=False).policy
    assert prepare_model(policy, ConsoleLogger(total_steps=0, live="never")).hf_config.num_experts == 8


def test_the_start_of_a_run_says_how_its_model_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 0], "top_p": 0.95}')
    policy = load_config("sft_tiny_moe.yaml", [f"policy.model_name={model}"], check_paths=False).policy
    speech = prepare_model(policy, ConsoleLogger(total_steps=0, live="never")).speech
    assert speech.stop_token_ids == (1, 0)
    printed = capsys.readouterr().out.splitlines()
    expected = [
        "stop tokens: '<eos>' 1 (tokenizer, generation_config.json, config.json), '<pad>' 0 (generation_config.json)",
        "the assistant's turns end with '<eos>'",
        "the model's own sampling, not applied: top_p 0.95",
    ]
    assert [line for line in printed if line in expected] == expected
    (model / "generation_config.json").write_text('{"eos_token_id": "<eos>"}')
    with pytest.raises(
        ConfigurationError, match=r"generation_config\.json: eos_token_id: got '<eos>', expected a token id"
    ):
        prepare_model(policy, ConsoleLogger(total_steps=0, live="never"))


def test_a_teacher_is_not_warned_about_as_if_it_were_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).save_pretrained(tmp_path)
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    shutil.copy(MODEL / "tokenizer_config.json", tmp_path)
    keys = ("policy.model_name", "policy.tokenizer.name", "distillation.teachers.teacher.model_name")
    models = [f"{key}={tmp_path}" for key in keys]
    config = load_any_config("distillation_tiny_moe.yaml", models, check_paths=False)
    console = ConsoleLogger(total_steps=0, live="never")
    policy = prepare_model(config.policy, console)
    capsys.readouterr()
    prepare_role(config, "teacher", policy, console)
    printed = "".join(capsys.readouterr())
    assert "checking the model of the teacher" in printed
    assert "warning" not in printed  # of the balancing loss in its config.json, say, which trains nothing


def test_a_model_that_the_engine_cannot_build_is_refused_without_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    model = MODEL.parent / "model_configs/NVIDIA-Nemotron-3-Nano-30B-A3B"
    arguments = ["--config", "grpo_qwen3_30b_a3b_vllm.yaml", f"policy.model_name={model}"]
    expected = (
        f"policy.generation.backend: got 'vllm', expected 'megatron' or 'megatron_separate' with {model}: refits of"
        " models with Mamba-2 layers have not been tried in vLLM"
    )
    assert cli.main(["plan", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {expected}\n"
    assert cli.main(["config", *arguments]) == 2
    assert expected in capsys.readouterr().err
