# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that train a reward model: metrics, checkpoints, and a final folder that transformers reads and GRPO uses."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.functional import dpo_runs, grpo_runs, rm_runs, sft_runs, shared_ray
from tests.support.loggers import MetricHistory, read_jsonl

pytestmark = pytest.mark.shared_ray

NUM_TRAIN, NUM_VALIDATION = 40, 11  # neither the batch nor the ranks divide the held-out pairs
LOSS_KEYS = {"loss", "preference_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "reward_margin"}
WITHOUT_BALANCING = {"policy__megatron_cfg__moe_aux_loss_coeff": 0.0}
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"policy__sequence_packing__enabled": True, "policy__sequence_packing__train_mb_tokens": 128},
    "tensor_parallel": {
        "policy__megatron_cfg__tensor_model_parallel_size": 2,
        "policy__megatron_cfg__sequence_parallel": True,
    },
    "stages": {"policy__megatron_cfg__pipeline_model_parallel_size": 2},
    "experts": {"policy__megatron_cfg__expert_model_parallel_size": 2},
}
LORA = {
    "policy__lora": {
        "rank": 4,
        "alpha": 8.0,
        "use_rslora": False,
        "targets": ["all-linear"],
        "dropout": 0.0,
        "experts": "per_expert",
        "init": "kaiming",
        "path": None,
    }
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dpo_runs.make_pairs(tmp_path_factory.mktemp("pairs"), NUM_TRAIN, NUM_VALIDATION)


def history_of(folder: Path) -> MetricHistory:
    return read_jsonl(sft_runs.only_run_folder(folder) / "metrics.jsonl")


def train(folder: Path, data: Path, **changes: Any) -> MetricHistory:
    """Everything that one run logs. Its checkpoints are in `folder / "checkpoints"`."""
    saving = {"checkpointing__checkpoint_dir": folder / "checkpoints", "checkpointing__save_period": 2}
    given = {**WITHOUT_BALANCING, **saving, "policy__megatron_cfg__optimizer__lr": 1e-3, **changes}
    rm_runs.run_here(rm_runs.settings(folder, data, **given), folder)
    return history_of(folder)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MetricHistory]:
    folder = tmp_path_factory.mktemp("rm") / "plain"
    return folder, train(folder, data)


def test_every_metric_is_logged_and_means_what_it_says(trained: tuple[Path, MetricHistory]) -> None:
    _, history = trained
    keys = history.keys()
    assert {f"train/{name}" for name in LOSS_KEYS | {"grad_norm", "lr", "num_valid_pairs", "num_valid_tokens"}} <= keys
    assert {key for key in keys if key.startswith("val/")} == {f"val/{name}" for name in LOSS_KEYS}
    assert {"train/moe/cv_mean", "timing/train/seconds"} <= keys
    assert [step for step, _ in history["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in history["val/loss"]] == [0, 2, 4]
    assert {value for _, value in history["train/num_valid_pairs"]} == {8.0}
    assert history["val/loss"][-1][1] < history["val/loss"][0][1]
    for split in ("train", "val"):
        columns = {name: [value for _, value in history[f"{split}/{name}"]] for name in LOSS_KEYS}
        both = zip(columns["rewards_chosen_mean"], columns["rewards_rejected_mean"], strict=True)
        assert columns["reward_margin"] == pytest.approx([chosen - rejected for chosen, rejected in both], abs=1e-6)
        assert columns["loss"] == pytest.approx(columns["preference_loss"])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def scores_in_transformers(folder: Path, data: Path) -> torch.Tensor:
    """Scores of the held-out pairs, `[pairs, 2]`, of which each sequence has a pass of its own."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (data / "validation_preferences.jsonl").read_text().splitlines()
    found = []
    for record in map(json.loads, lines):
        for response in (record["chosen"], record["rejected"]):
            ids = tokenizer(record["prompt"] + response + tokenizer.eos_token, return_tensors="pt").input_ids
            with torch.no_grad():
                found.append(model(ids).logits[0, 0])
    return torch.stack(found).view(-1, 2).double()


def check_validation(history: MetricHistory, scores: torch.Tensor) -> None:
    """Compare the run's last validation with transformers' scores."""
    chosen, rejected = scores.T
    last = {key.removeprefix("val/"): values[-1][1] for key, values in history.items() if key.startswith("val/")}
    assert last["rewards_chosen_mean"] == pytest.approx(float(chosen.mean()), abs=1e-4)
    assert last["rewards_rejected_mean"] == pytest.approx(float(rejected.mean()), abs=1e-4)
    assert last["accuracy"] == pytest.approx(float((chosen > rejected).double().mean()))
    assert last["loss"] == pytest.approx(float(torch.nn.functional.softplus(rejected - chosen).mean()), abs=1e-4)


def test_transformers_scores_the_final_folder_alike(trained: tuple[Path, MetricHistory], data: Path) -> None:
    folder, history = trained
    scores = scores_in_transformers(folder / "checkpoints" / "final", data)
    assert float(scores.std()) > 0.01
    check_validation(history, scores)


def test_the_trained_model_scores_the_responses_of_grpo(trained: tuple[Path, MetricHistory], tmp_path: Path) -> None:
    final = trained[0] / "checkpoints" / "final"
    exemplar = grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_reward_model.yaml")
    overrides = grpo_runs.settings(
        tmp_path,
        grpo_runs.make_prompts(tmp_path / "data", 12),
        reward_model__model_name=final,
        reward_model__logprob_batch_size=4,
        grpo__max_num_steps=1,
        cluster__cpu_workers_per_node=1,
        **sft_runs.only_jsonl(),
    )
    done = shared_ray.run_here(["grpo", "--config", str(exemplar), *overrides], tmp_path)
    assert "the chat templates of" not in done.stdout + done.stderr
    model = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(final)
    found, expected = [], []
    for sample in sft_runs.samples_of(sft_runs.only_run_folder(tmp_path)):
        end = "" if sample["is_truncated"] else tokenizer.eos_token
        response = tokenizer.encode(sample["response"] + end, add_special_tokens=False)
        if len(response) != sample["num_tokens"]:
            continue  # a text that does not say which tokens it was
        ids = tokenizer.encode(sample["prompt"], add_special_tokens=False) + response
        with torch.no_grad():
            expected.append(model(torch.tensor([ids])).logits.item())
        found.append(sample["rewards"]["reward_model"])
    assert len(found) > 8
    assert np.std(expected) > 0.001
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_an_evaluation_scores_the_held_out_pairs(
    trained: tuple[Path, MetricHistory], data: Path, tmp_path: Path
) -> None:
    folder, history = trained
    final = folder / "checkpoints" / "final"

    def evaluate(model: Path, exit_code: int = 0) -> Any:
        changes = {"policy__model_name": model, "policy__init": "pretrained"}
        words = ["evaluate", "--config", str(rm_runs.EXEMPLAR), "--output", str(tmp_path / "out")]
        words += rm_runs.settings(tmp_path, data, **changes)
        return shared_ray.run_here(words, tmp_path, exit_code=exit_code)

    done = evaluate(final)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["model"], results["num_pairs"]) == (str(final), NUM_VALIDATION)
    for name in ("accuracy", "reward_margin", "rewards_chosen_mean", "rewards_rejected_mean"):
        assert results[name]["mean"] == pytest.approx(history[f"val/{name}"][-1][1], abs=1e-5)
        assert f"{results[name]['mean']:.4f} ± {results[name]['standard_error']:.4f}" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]
    path = data / "validation_preferences.jsonl"
    assert [line["sample_id"] for line in lines] == [f"{path}:{number + 1}" for number in range(NUM_VALIDATION)]
    scores = torch.tensor([[line["chosen"], line["rejected"]] for line in lines], dtype=torch.float64)
    torch.testing.assert_close(scores, scores_in_transformers(final, data), rtol=1e-4, atol=1e-4)
    shutil.rmtree(tmp_path / "out")
    policy = tmp_path / "policy"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sft_runs.MODEL)).save_pretrained(policy)
    AutoTokenizer.from_pretrained(sft_runs.MODEL).save_pretrained(policy)
    (line,) = evaluate(policy, exit_code=2).stderr.splitlines()
    expected = "Qwen3MoeForCausalLM, expected a ForSequenceClassification with one label"
    assert line == f"error: policy.model_name: got {policy}, {expected}"


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_batch_and_to_divide_trains_alike(
    trained: tuple[Path, MetricHistory], data: Path, tmp_path: Path, way: str
) -> None:
    found = train(tmp_path / "run", data, **WAYS[way])
    for name in LOSS_KEYS - {"accuracy"}:
        for split in ("train", "val"):
            wanted = [value for _, value in trained[1][f"{split}/{name}"]]
            assert [value for _, value in found[f"{split}/{name}"]] == pytest.approx(wanted, rel=1e-4, abs=1e-4), name


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, LORA], ids=["all weights", "adapters"])
def test_a_resumed_run_goes_on_to_the_last_bit(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    def untimed(history: MetricHistory) -> dict[str, Any]:
        return {key: values for key, values in history.items() if not key.startswith("timing/")}

    whole = untimed(train(tmp_path, data, **changes))
    final = tmp_path / "checkpoints" / "final"
    first = weights_of(final)
    assert "score.weight" in first
    scores = scores_in_transformers(final, data)
    check_validation(history_of(tmp_path), scores)
    for name in ("step_4", "final"):
        shutil.rmtree(tmp_path / "checkpoints" / name)
    assert untimed(train(tmp_path, data, **changes)) == whole
    again = weights_of(final)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


@pytest.mark.full
def test_a_checkpoint_is_converted_and_trained_on(
    trained: tuple[Path, MetricHistory], data: Path, tmp_path: Path
) -> None:
    checkpoints = trained[0] / "checkpoints"
    words = ["convert", "--from", "megatron", "--to", "hf", "--input", str(checkpoints / "step_4")]
    done = shared_ray.run_here([*words, "--output", str(tmp_path / "hf")], tmp_path)
    assert "AutoModelForSequenceClassification.from_pretrained" in done.stdout
    assert "is left out" not in done.stdout + done.stderr
    converted, final = weights_of(tmp_path / "hf"), weights_of(checkpoints / "final")
    assert converted.keys() == final.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in final.items())
    for number, folder in enumerate((tmp_path / "hf", checkpoints / "step_4")):
        start = {"policy__model_name": folder, "policy__init": "pretrained", "rm__max_num_steps": 1}
        further = train(tmp_path / str(number), data, **start)
        assert further["val/loss"][0][1] == pytest.approx(trained[1]["val/loss"][-1][1], abs=1e-5)


def test_margins_and_the_centre_are_in_the_loss(data: Path, tmp_path: Path) -> None:
    for name in ("preferences", "validation_preferences"):
        records = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        given = [{**record, "gap": 50.0} for record in records]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in given))
    settings = {"rm__center_rewards_coefficient": 0.5, "data__margin_key": "gap", "rm__max_num_steps": 1}
    history = train(tmp_path / "run", tmp_path, **settings)
    (_, first), *_ = history["val/preference_loss"]
    (_, margin), *_ = history["val/reward_margin"]
    assert first == pytest.approx(50.0 - margin, abs=1e-4), "-log sigmoid(x) is -x for a large negative x"
    (_, center), (_, loss) = history["val/center_loss"][0], history["val/loss"][0]
    assert loss == pytest.approx(first + 0.5 * center, rel=1e-5)
    assert center > 0


def test_a_model_that_can_be_no_classifier_is_refused_before_ray(data: Path, tmp_path: Path) -> None:
    model = sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_vl_moe"
    done = rm_runs.run_here(rm_runs.settings(tmp_path, data, policy__model_name=model), tmp_path, exit_code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: policy.model_name: got {model} of model_type 'qwen3_vl_moe', expected a model of")
    assert "starting 2 workers" not in done.stdout


def test_models_of_other_forms_are_refused_before_ray(
    trained: tuple[Path, MetricHistory], data: Path, tmp_path: Path
) -> None:
    checkpoints = trained[0] / "checkpoints"
    # A checkpoint still has the output layer of the initial model, which the reward model does not train.
    for name in ("step_4", "final"):
        changes = {"policy__model_name": checkpoints / name, "policy__init": "pretrained"}
        words = ["dpo", "--config", str(dpo_runs.EXEMPLAR), *dpo_runs.settings(tmp_path, data, **changes)]
        done = shared_ray.run_here(words, tmp_path, exit_code=2)
        (line,) = done.stderr.splitlines()
        expected = "Qwen3MoeForSequenceClassification, expected a model that predicts tokens; "
        assert line.startswith(f"error: policy.model_name: got {checkpoints / name}, {expected}")
        assert "starting 2 workers" not in done.stdout
    several = tmp_path / "several"
    shutil.copytree(checkpoints / "final", several, ignore=shutil.ignore_patterns("files.json"))
    content = json.loads((several / "config.json").read_text())
    content["id2label"] = {str(number): f"LABEL_{number}" for number in range(3)}
    (several / "config.json").write_text(json.dumps(content))
    changes = {"policy__model_name": several, "policy__init": "pretrained"}
    done = rm_runs.run_here(rm_runs.settings(tmp_path, data, **changes), tmp_path, exit_code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: policy.model_name: got {several}, Qwen3MoeForSequenceClassification with 3 labels")


@pytest.mark.parametrize("name", ["step_2", pytest.param("final/adapter", marks=pytest.mark.full)])
def test_an_adapter_brings_its_head(data: Path, tmp_path: Path, name: str) -> None:
    """To `convert`, `evaluate`, further training and the rewards of GRPO; a model that predicts tokens refuses it."""
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sft_runs.MODEL)).save_pretrained(base)
    AutoTokenizer.from_pretrained(sft_runs.MODEL).save_pretrained(base)
    start = {"policy__model_name": base, "policy__init": "pretrained", "rm__max_num_steps": 2}
    train(tmp_path / "run", data, **LORA, **start)
    checkpoints = tmp_path / "run" / "checkpoints"
    words = ["convert", "--from", "hf", "--input", str(base), "--adapter", str(checkpoints / name)]
    done = shared_ray.run_here([*words, "--to", "hf", "--output", str(tmp_path / "merged")], tmp_path)
    assert "AutoModelForSequenceClassification.from_pretrained" in done.stdout
    found, final = weights_of(tmp_path / "merged"), weights_of(checkpoints / "final")
    assert found.keys() == final.keys()
    assert "score.weight" in found
    for tensor, expected in final.items():
        torch.testing.assert_close(found[tensor], expected, rtol=0, atol=1e-6, msg=tensor)
    shared_ray.run_here([*words, "--to", "adapter", "--output", str(tmp_path / "adapter")], tmp_path)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(written["base_model.model.score.weight"], final["score.weight"])
    changes = {**start, "policy__lora": LORA["policy__lora"] | {"path": str(checkpoints / name)}}
    before = history_of(tmp_path / "run")
    results, printed = evaluated(tmp_path / "evaluation", data, changes)
    assert (results["model"], results["adapter"]) == (str(base), str(checkpoints / name))
    assert f"{base} with the adapter {checkpoints / name}: {NUM_VALIDATION} pairs" in printed
    for metric in ("accuracy", "reward_margin", "rewards_chosen_mean", "rewards_rejected_mean"):
        assert results[metric]["mean"] == pytest.approx(before[f"val/{metric}"][-1][1], abs=1e-5)
    further = train(tmp_path / "further", data, **changes)
    assert further["val/rewards_chosen_mean"][0][1] == pytest.approx(before["val/rewards_chosen_mean"][-1][1], abs=1e-5)
    of_adapter = rewards_of(tmp_path / "adapted", base, str(checkpoints / name))
    assert of_adapter == pytest.approx(rewards_of(tmp_path / "merged_run", checkpoints / "final", None), abs=1e-5)
    assert np.std(of_adapter) > 0.001
    del changes["rm__max_num_steps"]
    words = ["dpo", "--config", str(dpo_runs.EXEMPLAR), *dpo_runs.settings(tmp_path, data, **changes)]
    (line,) = shared_ray.run_here(words, tmp_path, exit_code=2).stderr.splitlines()
    refusal = "an adapter of a reward model with its head, expected one of a model that predicts tokens"
    assert line == f"error: policy.lora.path: got {checkpoints / name}, {refusal}"


def evaluated(folder: Path, data: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The results of an evaluation of a reward model, and what it prints."""
    words = ["evaluate", "--config", str(rm_runs.EXEMPLAR), "--output", str(folder / "out")]
    done = shared_ray.run_here([*words, *rm_runs.settings(folder, data, **changes)], folder)
    return json.loads((folder / "out" / "results.json").read_text()), done.stdout


def rewards_of(folder: Path, model: Path, adapter: str | None) -> list[float]:
    """The rewards of one step of GRPO, by a reward model with an adapter."""
    exemplar = grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_reward_model.yaml")
    overrides = grpo_runs.settings(
        folder,
        grpo_runs.make_prompts(folder / "data", 12),
        reward_model__model_name=model,
        reward_model__adapter=adapter,
        reward_model__logprob_batch_size=4,
        grpo__max_num_steps=1,
        cluster__cpu_workers_per_node=1,
        **sft_runs.only_jsonl(),
    )
    shared_ray.run_here(["grpo", "--config", str(exemplar), *overrides], folder)
    return [sample["rewards"]["reward_model"] for sample in sft_runs.samples_of(sft_runs.only_run_folder(folder))]
