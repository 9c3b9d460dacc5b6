# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that train adapters: what they leave, and what the other commands make of it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from tests.functional import grpo_runs, sft_runs, shared_ray
from tests.support.loggers import MetricHistory, read_jsonl

pytestmark = pytest.mark.shared_ray

LORA = {
    "rank": 4,
    "alpha": 8.0,
    "use_rslora": False,
    "targets": ["all-linear"],
    "dropout": 0.0,
    "experts": "per_expert",
    "init": "kaiming",
    "path": None,
}
REWARD = {"env__reward__kind": "callable", "env__reward__function": "tests.functional.grpo_runs:share_of_digits"}


@dataclass(frozen=True)
class Trained:
    """A run of supervised fine-tuning: the folder of its base, and what it wrote."""

    base: Path
    run_folder: Path

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.run_folder / "checkpoints" / "step_6"

    @property
    def final(self) -> Path:
        """Merged weights."""
        return self.run_folder / "checkpoints" / "final"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("lora")
    base = sft_runs.make_model_folder(folder / "base")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig.from_pretrained(base)).save_pretrained(base)
    data = sft_runs.make_additions(folder / "data", 300, 40)
    changes: dict[str, Any] = {
        "sft__max_num_steps": 6,
        "sft__val_period": 3,
        "sft__val_batches": 1,
        "policy__init": "pretrained",
        "policy__lora": LORA,
        "policy__train_global_batch_size": 32,
        "policy__train_micro_batch_size": 16,
        "policy__megatron_cfg__expert_model_parallel_size": 2,
        "policy__megatron_cfg__optimizer__lr": 0.01,
        "policy__megatron_cfg__scheduler__lr_warmup_iters": 0,
        "checkpointing__save_period": 3,
        **sft_runs.only_jsonl(),
    }
    sft_runs.run_here(sft_runs.settings(folder, data, base, **changes), folder)
    return Trained(base, sft_runs.only_run_folder(folder))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_it_learns_and_saves_adapters_alone(trained: Trained) -> None:
    history = read_jsonl(trained.run_folder / "metrics.jsonl")
    losses = [value for _, value in history["train/loss"]]
    assert losses[-1] < losses[0] - 0.2
    base, policy = (
        sum(path.stat().st_size for path in folder.rglob("*"))
        for folder in (trained.base, trained.checkpoint / "policy")
    )
    assert policy < base, "with two moments beside it"
    adapter = tensors(trained.final / "adapter")
    assert all(".lora_" in name for name in adapter)
    assert any(tensor.abs().max() > 0 for name, tensor in adapter.items() if ".lora_B." in name)


@pytest.fixture(scope="module")
def named(trained: Trained) -> Path:
    """The adapter with names for each expert."""
    folder = trained.base.with_name("named")
    words = ["convert", "--from", "hf", "--to", "adapter", "--experts", "per_expert", "--input", str(trained.base)]
    shared_ray.called_here([*words, "--adapter", str(trained.final), "--output", str(folder)])
    return folder


def test_merged_weights_are_base_and_adapter(trained: Trained, named: Path) -> None:
    base, merged, adapter = tensors(trained.base), tensors(trained.final), tensors(named)
    assert merged.keys() == base.keys()
    changed = 0
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        key = f"base_model.model.{module}.lora_A.weight"
        if key not in adapter:
            assert torch.equal(merged[name], tensor), name
            continue
        product = 2.0 * adapter[key.replace("lora_A", "lora_B")] @ adapter[key]
        torch.testing.assert_close(merged[name], tensor + product, atol=1e-6, rtol=0)
        changed += 1
    assert changed == len(adapter) // 2


def test_a_checkpoint_is_merged_by_convert(trained: Trained, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    words = [
        "convert",
        "--from",
        "hf",
        "--to",
        "hf",
        "--input",
        str(trained.base),
        "--adapter",
        str(trained.checkpoint),
    ]
    shared_ray.called_here([*words, "--output", str(tmp_path / "merged")])
    assert not [str(each.message) for each in recwarn if issubclass(each.category, FutureWarning)]
    found, expected = tensors(tmp_path / "merged"), tensors(trained.final)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


def test_convert_writes_each_form_of_experts(trained: Trained, named: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    words = ["convert", "--from", "hf", "--to", "adapter", "--input", str(trained.base), "--adapter"]
    assert any(".experts.7.down_proj.lora_A" in name for name in tensors(named))
    done = shared_ray.called_here([*words, str(named), "--output", str(tmp_path / "fused")])
    found, expected = tensors(tmp_path / "fused"), tensors(trained.final / "adapter")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    num_parameters = sum(tensor.numel() for tensor in tensors(named).values())
    assert f"{tmp_path / 'fused'}: {num_parameters:,} parameters in float32\n" in done.stdout
    ids = torch.arange(2, 22).view(2, 10)
    merged = AutoModelForCausalLM.from_pretrained(trained.final, dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "fused")).eval()
    with torch.no_grad():
        np.testing.assert_allclose(adapted(ids).logits, merged(ids).logits, atol=1e-5)
    shared_ray.called_here(["verify", str(tmp_path / "fused")])


def test_a_checkpoint_of_adapters_alone_is_no_model(trained: Trained, tmp_path: Path) -> None:
    words = ["convert", "--from", "megatron", "--to", "hf", "--input", str(trained.checkpoint)]
    done = shared_ray.called_here([*words, "--output", str(tmp_path / "merged")], exit_code=2)
    assert "holds adapters alone (policy.lora)" in done.stderr


@pytest.mark.parametrize("adapter", ["final", pytest.param("checkpoint", marks=pytest.mark.full)])
def test_generate_with_an_adapter_is_generate_with_merged_weights(
    trained: Trained, adapter: str, tmp_path: Path
) -> None:
    prompts = grpo_runs.make_prompts(tmp_path / "data", 6) / "validation_prompts.jsonl"

    def responses(name: str, model: Path, *overrides: str) -> list[Any]:
        words = ["generate", "--model", str(model), "--prompts", str(prompts), "--max-new-tokens", "6", "--logprobs"]
        done = shared_ray.run_here([*words, "--temperature", "0", *overrides], tmp_path / name)
        return [json.loads(line) for line in done.stdout.splitlines()]

    found = responses("adapter", trained.base, "--adapter", str(getattr(trained, adapter)))
    expected = responses("merged", trained.final)
    assert [record["token_ids"] for record in found] == [record["token_ids"] for record in expected]
    for record, other in zip(found, expected, strict=True):
        assert record["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


def test_verify_names_damage_in_every_folder_of_a_run(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.run_folder / "checkpoints", run)
    done = shared_ray.called_here(["verify", str(run)])
    folders = ["final", "final/adapter", "step_3", "step_3/policy", "step_6", "step_6/policy"]
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == [str(run / name) for name in folders]
    for file in (
        run / "final" / "adapter" / "adapter_model.safetensors",
        *(run / "step_6" / "policy").glob("*.distcp"),
    ):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        done = shared_ray.called_here(["verify", str(run)], exit_code=1)
        assert str(file) in done.stderr
        content[-1] ^= 1
        file.write_bytes(content)


@pytest.mark.slow
def test_evaluate_with_an_adapter_is_evaluate_with_merged_weights(trained: Trained, tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 8)

    def evaluated(name: str, model: Path, **changes: Any) -> tuple[Any, list[str]]:
        folder = tmp_path / name
        common = {"policy__model_name": model, "policy__init": "pretrained", "grpo__val_temperature": 0.0, **REWARD}
        overrides = grpo_runs.settings(folder, data, **common, grpo__val_num_generations=1, **changes)
        done = shared_ray.run_here(["evaluate", "--config", str(grpo_runs.EXEMPLAR), *overrides], folder)
        assert done.stderr == ""
        (output,) = (folder / "logs").iterdir()
        samples = sft_runs.samples_of(output)
        results = json.loads((output / "results.json").read_text())
        adapter = results["adapter"]
        assert adapter == changes.get("policy__lora", {}).get("path")
        assert f"{model}{f' with the adapter {adapter}' if adapter else ''}: " in done.stdout
        return results["reward"], [each["response"] for each in samples]

    merged = evaluated("merged", trained.final)
    assert evaluated("adapter", trained.base, policy__lora=LORA | {"path": str(trained.checkpoint)}) == merged
    assert evaluated("base", trained.base) != merged


def history_of_checked_refits(tmp_path: Path, changes: dict[str, Any]) -> MetricHistory:
    """Run GRPO with an engine of its own; return its metrics, which say that every refit was compared and right."""
    data = grpo_runs.make_prompts(tmp_path / "data", 40)
    overrides = grpo_runs.settings(tmp_path, data, **changes)
    grpo_runs.run_here([*overrides, f"+cluster.roles.{GENERATION_ROLE}={{}}"], tmp_path)
    history = read_jsonl(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
    assert {value for _, value in history["train/refit/weights_compared"]} == {1.0}
    assert {value for _, value in history["train/refit/checks_failed"]} == {0.0}
    return history


@pytest.mark.parametrize("refit", ["merged", pytest.param("adapter", marks=pytest.mark.full)])
def test_grpo_refits_an_engine_of_its_own(refit: str, tmp_path: Path) -> None:
    """The engine beside the trainer gets merged weights or adapters, which the check compares."""
    changes: dict[str, Any] = {
        "policy__lora": LORA,
        "policy__generation__backend": "megatron_separate",
        "policy__generation__lora_refit": refit,
        "policy__megatron_cfg__optimizer__lr": 0.01,
        "loss_fn__reference_policy_kl_penalty": 0.1,
        **REWARD,
        **sft_runs.only_jsonl(),
    }
    history = history_of_checked_refits(tmp_path, changes)
    assert max(value for _, value in history["train/refit/logprob_gap"]) < 1e-4


@pytest.mark.full
def test_later_refits_leave_out_what_is_frozen(tmp_path: Path) -> None:
    """Adapters on the attention alone: experts and embeddings reach the engine once, and are compared in each step."""
    changes: dict[str, Any] = {
        "policy__lora": LORA | {"targets": ["q_proj", "v_proj"], "experts": "none"},
        "policy__generation__backend": "megatron_separate",
        "policy__megatron_cfg__optimizer__lr": 0.01,
        **REWARD,
        **sft_runs.only_jsonl(),
    }
    history = history_of_checked_refits(tmp_path, changes)
    # Four layers of queries, keys, values and outputs, and the norms of heads.
    attention = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 2 * 32) * 4
    assert {value for _, value in history["train/refit/bytes"]} == {attention}
