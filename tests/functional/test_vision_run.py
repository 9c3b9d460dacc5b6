# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs with images: what they log, that they resume to the last bit, and that transformers loads the result."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.runs.folder.expert_load import read_expert_load
from nemo_rl_moe.runs.folder.metrics import read_metrics
from nemo_rl_moe.runs.folder.saved_samples import named_thumbnails
from tests.functional import dpo_runs, grpo_runs, sft_runs, vision_runs
from tests.functional.test_resume import (
    CHECKPOINTING,
    NUM_STEPS,
    STOP_AFTER,
    Algorithm,
    run_and_stop,
    run_to_its_end,
    untimed,
    weights_of,
)
from tests.support.tiny_model import layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODELS = sft_runs.REPOSITORY_ROOT / "examples/assets"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_runs.make_shapes(tmp_path_factory.mktemp("shapes"))


def grpo(folder: Path, shapes: Path) -> Algorithm:
    changes = vision_runs.grpo_changes(shapes) | CHECKPOINTING | sft_runs.only_jsonl()
    settings = grpo_runs.settings(
        folder,
        shapes,
        grpo__max_num_steps=NUM_STEPS,
        policy__megatron_cfg__routing_replay="rollout",
        checkpointing__checkpoint_dir=folder / "checkpoints",
        **changes,
    )
    return Algorithm("grpo", vision_runs.GRPO_EXEMPLAR, settings)


def test_a_stopped_run_with_images_goes_on_to_the_last_bit(shapes: Path, tmp_path: Path) -> None:
    whole, stopped = (grpo(tmp_path / name, shapes) for name in ("whole", "stopped"))
    run_to_its_end(whole, tmp_path)
    run_and_stop(stopped, tmp_path)
    assert f"\nstep {STOP_AFTER}/" not in run_to_its_end(stopped, tmp_path)
    finals = [tmp_path / name / "checkpoints" / "final" for name in ("whole", "stopped")]
    assert weights_of(finals[0]) == weights_of(finals[1])
    logs = [tmp_path / name / "logs" / "exp_001" for name in ("whole", "stopped")]
    assert untimed(logs[0] / "metrics.jsonl") == untimed(logs[1] / "metrics.jsonl")

    record = read_metrics(logs[0] / "metrics.jsonl")[-1]
    metrics = record.metrics
    assert metrics["train/moe/routing/rows_usable_share"] == 1.0
    assert metrics["train/moe/routing/agreement"] == 1.0
    assert 0.5 < metrics["train/moe/image/token_share"] < 0.8
    history = read_expert_load(logs[0])
    assert history.image_counts is not None
    thumbnails = [{path.stem: path.read_bytes() for path in (log / "thumbnails").iterdir()} for log in logs]
    assert thumbnails[0] == thumbnails[1]
    assert thumbnails[0].keys() == named_thumbnails(logs[1] / "samples.jsonl")
    assert thumbnails[0]
    _answers_as_the_run_did(finals[0], logs[0])


def _answers_as_the_run_did(final: Path, run_folder: Path) -> None:
    """transformers loads what the run has exported, tower and all."""
    from transformers import AutoModelForImageTextToText

    model, reported = AutoModelForImageTextToText.from_pretrained(final, dtype=torch.float32, output_loading_info=True)
    assert not reported["missing_keys"]
    assert not reported["unexpected_keys"]
    assert json.loads((final / "preprocessor_config.json").read_text())
    pixels = torch.rand(1, 3, 32, 32)
    image = model.config.image_token_id
    ids = torch.tensor([[5, *[image] * 16, 6]])
    found = model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=3, do_sample=False)
    assert found.shape[1] > ids.shape[1]
    assert (run_folder / "samples.jsonl").stat().st_size > 0


def with_delta_nets(folder: Path) -> Path:
    """Write the tiny model of Qwen3-VL as one of Qwen3.5: gated delta nets, and half of each head rotated."""
    shutil.copytree(MODELS / "tiny_qwen3_vl_moe", folder)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    for name in ("decoder_sparse_step", "intermediate_size", "mlp_only_layers"):
        del text[name]
    del vision["deepstack_visual_indexes"]
    text |= {
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 64,
    }
    text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
    vision["model_type"] = "qwen3_5_moe_vision"
    config |= {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("sizes", "backend"), [({"ep": 2}, "megatron"), ({"tp": 2}, "megatron_separate")])
def test_gated_delta_nets_with_images_take_ten_steps_with_the_rollouts_routes(
    sizes: dict[str, int], backend: str, shapes: Path, tmp_path: Path
) -> None:
    changes = vision_runs.grpo_changes(shapes) | {
        "policy__model_name": with_delta_nets(tmp_path / "model"),
        "policy__generation__backend": backend,
        "policy__train_global_batch_size": 8,
        "cluster__cpu_workers_per_node": 2,
        **{f"policy__megatron_cfg__{key}": value for key, value in layout(**sizes).items()},
    }
    settings = grpo_runs.settings(
        tmp_path,
        shapes,
        grpo__max_num_steps=10,
        policy__megatron_cfg__routing_replay="rollout",
        **changes,
        **sft_runs.only_jsonl(),
    )
    if backend != "megatron":
        settings.append(f"+cluster.roles.{GENERATION_ROLE}={{cpu_workers_per_node: 1}}")
    assert "10 steps done" in run_to_its_end(Algorithm("grpo", vision_runs.GRPO_EXEMPLAR, settings), tmp_path)
    records = [record.metrics for record in read_metrics(tmp_path / "logs" / "exp_001" / "metrics.jsonl")]
    steps = [metrics for metrics in records if "train/loss" in metrics]
    assert len(steps) == 10
    for metrics in steps:
        assert metrics["train/moe/routing/rows_usable_share"] == 1.0
        assert metrics["train/moe/routing/anomalies"] == 0
        assert metrics["train/token_mult_prob_error"] < 1 + 1e-4
        assert 0.5 < metrics["train/moe/image/token_share"] < 0.8
    assert len({metrics["train/moe/shared_expert_gate/mean"] for metrics in steps}) == 10


def test_preferences_and_demonstrations_with_images_train(shapes: Path, tmp_path: Path) -> None:
    """SFT in two processes, then DPO on what it leaves."""
    sft = Algorithm(
        "sft",
        vision_runs.SFT_EXEMPLAR,
        sft_runs.settings(
            tmp_path / "sft",
            shapes,
            vision_runs.MODEL,
            sft__max_num_steps=2,
            sft__val_batches=1,
            policy__train_global_batch_size=32,
            policy__train_micro_batch_size=16,
            checkpointing__checkpoint_dir=tmp_path / "sft" / "checkpoints",
            **sft_runs.only_jsonl(),
        ),
    )
    assert "2 steps done" in run_to_its_end(sft, tmp_path)
    lines = [json.loads(line) for line in (shapes / "grpo_train.jsonl").read_text().splitlines()[:32]]
    pairs = [
        {"prompt": line["question"], "images": line["images"], "chosen": line["answer"], "rejected": "purple"}
        for line in lines
        if line["answer"] != "purple"
    ]
    (shapes / "preferences.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    settings = dpo_runs.settings(
        tmp_path / "dpo",
        shapes,
        policy__model_name=tmp_path / "sft" / "checkpoints" / "final",
        policy__init="pretrained",
        policy__max_total_sequence_length=40,
        data__train__path=shapes / "preferences.jsonl",
        data__validation=None,
        dpo__max_num_steps=3,
        **sft_runs.only_jsonl(),
    )
    assert "3 steps done" in run_to_its_end(Algorithm("dpo", dpo_runs.EXEMPLAR, settings), tmp_path)
    metrics = read_metrics(tmp_path / "dpo" / "logs" / "exp_001" / "metrics.jsonl")[-1].metrics
    assert metrics["train/moe/image/token_share"] > 0.5
