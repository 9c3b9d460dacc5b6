# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe evaluate` and `generate` before anything starts: their words, their messages, their outputs' places."""

import argparse
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from nemo_rl_moe import cli
from nemo_rl_moe.config.loading import load_any_config, load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.vllm.releases import installed_release
from nemo_rl_moe.launch import evaluate_command, generate_command, serve_command
from nemo_rl_moe.launch.generate import _with_positions_of_the_model, generate
from nemo_rl_moe.launch.generate_command import EXAMPLES, OPTIONS
from nemo_rl_moe.launch.output_folder import next_free
from nemo_rl_moe.models.hf_files import MEGATRON_WEIGHTS_FOLDER

MODEL = str(Path(__file__).resolve().parents[3] / "examples/assets/tiny_qwen3_moe")
GENERATE = ["generate", "--model", MODEL, "--prompts", "prompts.txt"]
EVALUATE = ["evaluate", "--config", "grpo_tiny_moe.yaml", f"policy.model_name={MODEL}"]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[GRPOMasterConfig]:
    """Return the configurations that would be run; the working folder holds prompts."""
    started: list[GRPOMasterConfig] = []
    for command in (evaluate_command, generate_command):
        monkeypatch.setattr(command, "run", lambda options, config: started.append(config))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("7+8=\n")
    (tmp_path / "data/addition").mkdir(parents=True)
    for name in ("grpo", "validation_prompts"):
        (tmp_path / f"data/addition/{name}.jsonl").write_text('{"prompt": "7+8=", "answer": "15", "metadata": {}}\n')
    return started


OF_GENERATE = {
    ("--temperature", "-1"): "--temperature: got -1 (int), expected a number from 0 to 100",
    ("--temperature", "hot"): "--temperature: got 'hot' (str), expected a number from 0 to 100",
    ("--top-p", "2"): "--top-p: got 2 (int), expected a number above 0 and up to 1",
    ("--max-new-tokens", "0"): "--max-new-tokens: got 0 (int), expected a whole number above 0",
    ("--max-new-tokens", "4096"): "--max-new-tokens: got 4096, expected less than policy.max_total_sequence_length",
    ("--samples", "2", "--temperature", "0"): "--samples: got 2, expected 1 with --temperature 0",
    ("--seed", "1.5"): "--seed: got 1.5",
    ("--backend", "vlm"): "--backend: got 'vlm'",
    ("--prompts", "promts.txt"): "--prompts: promts.txt not found",
    ("--model", "./nothing"): "--model: nothing not found",
    ("--output", "prompts.txt"): "--output: prompts.txt exists already; name a new file",
    ("--output", "no/such/folder/file"): "--output: got no/such/folder/file, and there is no folder no/such/folder",
    ("policy.generation.max_new_token=3",): "policy.generation.max_new_token: unknown key; did you mean",
}
OF_EVALUATE = {
    ("--output", "data"): "--output: data exists already; name a new or an empty folder",
    ("data.validation=null",): "data.validation: got null, expected the prompts to evaluate with",
    ("grpo.val_temperature=0",): "grpo.val_num_generations: got 4, expected 1 with grpo.val_temperature 0",
    ("grpo.val_num_generation=8",): "grpo.val_num_generation: unknown key; did you mean grpo.val_num_generations?",
}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        *(([*GENERATE, *words], problem) for words, problem in OF_GENERATE.items()),
        *(([*EVALUATE, *words], problem) for words, problem in OF_EVALUATE.items()),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_wrong_words_are_reported_by_the_option(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str], started: list[GRPOMasterConfig]
) -> None:
    assert cli.main(words) == 2
    output, errors = capsys.readouterr()
    assert (output, started) == ("", [])
    assert errors.startswith(f"error: {problem}")
    assert errors.count("\n") == 1


def test_nearest_file_and_engine_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*GENERATE, "--prompts", "promts.txt"])
    assert "did you mean prompts.txt?" in capsys.readouterr().err
    cli.main([*GENERATE, "--backend", "vlm"])
    assert "did you mean vllm?" in capsys.readouterr().err


def test_evaluate_wants_prompts_and_a_reward_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate"]) == 2
    assert "--config FILE is missing (nemo-rl-moe config --help lists" in capsys.readouterr().err
    data = [f"data.{name}.path=prompts.txt" for name in ("train", "validation")]
    assert cli.main(["evaluate", "--config", "sft_tiny_moe.yaml", f"policy.model_name={MODEL}", *data]) == 2
    assert "is for the algorithm sft, expected a configuration of grpo" in capsys.readouterr().err


def test_threshold_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*EVALUATE, "--threshold", "nan"])
    assert caught.value.code == 2
    assert "--threshold: got 'nan', expected a number" in capsys.readouterr().err


@pytest.mark.parametrize("words", [GENERATE, EVALUATE], ids=lambda words: words[0])
def test_what_is_checked_is_what_is_run(words: list[str], started: list[GRPOMasterConfig]) -> None:
    assert cli.main([*words, "grpo.seed=7"]) == 0
    (config,) = started
    assert config.grpo.seed == 7


def test_prompts_may_be_called_anything(tmp_path: Path, started: list[GRPOMasterConfig]) -> None:
    for name in ("2024.txt", "[a].txt", "a: b.txt", "null.txt"):
        (tmp_path / name).write_text("7+8=\n")
        assert cli.main([*GENERATE, "--prompts", name]) == 0, name


def test_help_reports_the_defaults_that_the_configuration_has(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_grpo_config("grpo_generate.yaml", ["policy.model_name=x", "data.train.path=y"], check_paths=False)
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert config.policy.lora is None
    assert OPTIONS["--adapter"].text.endswith("(default: none)")
    for option in (option for name, option in OPTIONS.items() if name != "--adapter"):
        value = config
        for part in option.key.split("."):
            value = getattr(value, part)
        reported = option.text.partition("(default: ")[2].rstrip(")")
        assert reported == {"x": "", "y": "", "None": "all"}.get(str(value), str(value)), option.key
    assert "nemo-rl-moe generate --model results/sft_tiny_moe/final --prompts prompts.txt" in printed
    assert EXAMPLES.count("nemo-rl-moe generate") == 5


def test_an_adapters_rank_and_scale_come_from_its_folder(tmp_path: Path) -> None:
    words = [*GENERATE[1:], "--adapter", str(tmp_path)]
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    factors = {"lora_A": (4, 8), "lora_B": (8, 4)}
    name = "base_model.model.model.layers.0.self_attn.q_proj.{}.weight"
    tensors = {name.format(factor): np.zeros(shape, np.float32) for factor, shape in factors.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    parser = argparse.ArgumentParser()
    generate_command.add_arguments(parser)
    options = parser.parse_args(words)
    lora = generate_command.load(options, ["policy.init=random"]).policy.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.use_rslora, lora.targets) == (4, 6.0, True, ["q_proj"])
    assert (lora.experts, lora.path) == ("none", str(tmp_path))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigurationError) as caught:
        generate_command.load(options, [])
    assert caught.value.problems[0].startswith(f"--adapter: {tmp_path} holds no adapter")


@pytest.mark.parametrize("command", [generate_command, serve_command], ids=["generate", "serve"])
def test_a_checkpoint_trained_with_dropout_samples_without_it(command: ModuleType, tmp_path: Path) -> None:
    trained = load_any_config("sft_tiny_moe_lora.yaml", ["policy.lora.dropout=0.05"], check_paths=False)
    (tmp_path / "step_2" / MEGATRON_WEIGHTS_FOLDER).mkdir(parents=True)
    (tmp_path / "step_2" / "state.json").write_text(json.dumps({"config": trained.model_dump(mode="json")}))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = GENERATE[1:] if command is generate_command else GENERATE[1:3]
    options = parser.parse_args([*words, "--adapter", str(tmp_path / "step_2")])
    lora = command.load(options, ["policy.init=random"]).policy.lora
    assert trained.policy.lora is not None
    assert lora == trained.policy.lora.model_copy(update={"dropout": 0.0, "path": str(tmp_path / "step_2")})


def test_default_output_is_the_next_free_folder(tmp_path: Path) -> None:
    assert next_free(tmp_path / "logs", "eval") == tmp_path / "logs/eval_001"
    (tmp_path / "logs/eval_001/x").mkdir(parents=True)
    assert next_free(tmp_path / "logs", "eval") == tmp_path / "logs/eval_002"


def generate_config(*overrides: str):  # type: ignore[no-untyped-def]
    chosen = [f"policy.model_name={MODEL}", "policy.init=random", "data.train.path=prompts.txt", *overrides]
    return load_grpo_config("grpo_generate.yaml", chosen)


def test_sequences_are_no_longer_than_the_model_has_positions() -> None:
    assert _with_positions_of_the_model(generate_config()).policy.max_total_sequence_length == 512
    with pytest.raises(ConfigurationError, match="max_new_tokens: got 512, expected less than the 512 positions of"):
        _with_positions_of_the_model(generate_config("policy.generation.max_new_tokens=512"))


@pytest.mark.skipif(installed_release() is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="vllm, which is not installed; install it with: make vllm"):
        generate(generate_config("policy.generation.backend=vllm"), None, with_logprobs=False)


def test_a_folder_of_checkpoints_names_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results/a/step_11").mkdir(parents=True)  # without a model
    for name in ("step_9", "step_10", "final"):
        (tmp_path / "results/a" / name).mkdir()
        (tmp_path / "results/a" / name / "config.json").write_text("{}")
        for words, key in (
            (["generate", "--model", "results/a", "--prompts", "prompts.txt"], "--model"),
            (["evaluate", "--config", "grpo_tiny_moe.yaml", "policy.model_name=results/a"], "policy.model_name"),
        ):
            assert cli.main(words) == 2
            hint = f"did you mean results/a/{name}?"
            assert capsys.readouterr().err == f"error: {key}: the folder results/a holds no config.json; {hint}\n"
