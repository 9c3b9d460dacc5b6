# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's keys for images, by the names that its files of vision-language GRPO have: carried over, or reported."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.loading import problems_of_translation
from nemo_rl_moe.config.nemo_rl import translate
from nemo_rl_moe.config.nemo_rl_translation import Translation
from tests.unit.config.test_nemo_rl import COMMON, GENERATION, GRPO, write

IMAGES = """
grpo: {deduplicate_multimodal_data: false, debug_payload_metrics: false}
policy:
  sequence_packing: {enabled: false}
  dynamic_batching: {enabled: true, train_mb_tokens: 512}
  generation: {vllm_cfg: {skip_tokenizer_init: false}, vllm_kwargs: {mm_processor_cache_gb: 0}}
data:
  train: {dataset_name: clevr-cogent, split: train}
  validation: {dataset_name: clevr-cogent, split: valA}
  default: {prompt_file: prompts/cot.txt, processor: vlm_hf_data_processor, env_name: clevr-cogent}
env:
  clevr-cogent:
    num_workers: 6
    reward_functions: [{name: format, weight: 0.2}, {name: exact_alnum, weight: 0.8}]
  geometry3k:
    num_workers: 8
    reward_functions: [{name: format, weight: 0.1}, {name: math_expr, weight: 0.9}]
  refcoco:
    num_workers: 8
    reward_functions: [{name: bbox_giou, weight: 0.9, kwargs: {giou_penalty_thres: 0.5}}]
"""


def images(folder: Path, **changes: Any) -> Translation:
    return translate(write(folder, COMMON, GRPO, GENERATION, IMAGES, **changes))


def test_a_file_of_images_is_carried_over_and_its_result_is_valid(tmp_path: Path) -> None:
    translation = images(tmp_path)
    answer = "its `solution` has the answer between <answer> and </answer>: write it alone"
    assert problems_of_translation(translation) == [
        f"data.train.dataset_name: clevr-cogent: MMInstruction/Clevr_CoGenT_TrainA_70K_Complex; {answer}",
        f"data.validation.dataset_name: clevr-cogent: MMInstruction/Clevr_CoGenT_TrainA_70K_Complex; {answer}",
    ]
    wanted = {
        "data.train.path": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        "data.train.split": "train",
        "data.validation.path": "MMInstruction/Clevr_CoGenT_ValA",
        "data.validation.split": "train",
        "data.prompt_key": "problem",
        "data.answer_key": "solution",
        "data.image_key": "image",
        "env.reward.kind": "exact",
        "env.reward.answer_after": "<answer>",
        "env.reward.num_workers": 6,
        "policy.generation.backend": "vllm",
        "policy.dynamic_batching.train_mb_tokens": 512,
    }
    assert {key: translation.values.get(key) for key in wanted} == wanted
    reported = [
        "env.clevr-cogent.reward_functions: format: 0.2: no such reward; a function of yours that returns a dict of"
        " rewards: env.reward.kind: callable, env.reward_weights: {format: 0.2, exact_alnum: 0.8}",
        "data.default.processor: vlm_hf_data_processor: records are read by their form: docs/data.md",
    ]
    assert [line for line in reported if line not in translation.without] == []
    for name in ("geometry3k", "refcoco"):
        assert f"env.{name}.*: switched off, or not read" in translation.idle
    for key in ("grpo.deduplicate_multimodal_data: false", "grpo.debug_payload_metrics: false"):
        assert key in translation.idle
    assert any(line.startswith("env.clevr-cogent.reward_functions: exact_alnum: ") for line in translation.changed)
    everything = [*translation.without, *translation.idle, *translation.changed]
    assert not [line for line in everything if "not a key that this translator knows" in line or "text alone" in line]


@pytest.mark.parametrize(
    ("name", "wanted", "reported"),
    [
        (
            "geometry3k",
            {"env.reward.kind": "math", "data.train.path": "hiyouga/geometry3k", "data.image_key": "images"},
            "env.geometry3k.reward_functions: format: 0.1",
        ),
        ("refcoco", {"env.reward.num_workers": 8}, "env.refcoco.reward_functions: bbox_giou: 0.9"),
    ],
)
def test_the_environment_is_that_of_the_data(tmp_path: Path, name: str, wanted: dict[str, Any], reported: str) -> None:
    translation = images(
        tmp_path,
        data__train={"dataset_name": name, "split": "train"},
        data__validation=None,
        data__default={"env_name": name},
    )
    problems = [problem.partition(":")[0] for problem in problems_of_translation(translation)]
    assert problems == (["data.train.dataset_name", "env.reward.kind"] if name == "refcoco" else [])
    assert {key: translation.values.get(key) for key in wanted} == wanted
    assert any(line.startswith(reported) for line in translation.without)
    assert "env.clevr-cogent.*: switched off, or not read" in translation.idle


def test_parts_that_stay_as_they_are_are_carried_over_from_either_engine(tmp_path: Path) -> None:
    freeze = {"freeze_vision_model": True, "freeze_vision_projection": False, "freeze_language_model": False}
    samples: dict[str, Any] = {"data__train": {"dataset_name": "geometry3k"}, "data__validation": None}
    megatron = images(tmp_path, policy__megatron_cfg__freeze_config=freeze, **samples)
    parts = ("vision_tower", "projector", "language_model")
    assert [megatron.values[f"policy.freeze.{part}"] for part in parts] == [True, False, False]
    assert problems_of_translation(megatron) == []
    theirs = {"freeze_vision_tower": True, "freeze_audio_tower": True, "freeze_language_model": False}
    torch_engine = images(
        tmp_path,
        policy__megatron_cfg__enabled=False,
        policy__dtensor_cfg={"enabled": True, "automodel_kwargs": {"freeze_config": theirs}},
        policy__optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 5.0e-7}},
    )
    assert torch_engine.values["policy.freeze.vision_tower"] is True
    assert "policy.freeze.projector" not in torch_engine.values
    (line,) = (line for line in torch_engine.without if "freeze_audio_tower" in line)
    assert line.endswith("true: no sound")


def test_of_two_rewards_none_is_carried_over(tmp_path: Path) -> None:
    functions = [{"name": "exact_alnum", "weight": 0.8}, {"name": "math_expr", "weight": 0.2}]
    translation = images(tmp_path, env={"clevr-cogent": {"num_workers": 6, "reward_functions": functions}})
    reported = [line for line in translation.without if "reward_functions" in line]
    assert [": one such reward a run; " in line for line in reported] == [True, True]
    assert all("{exact_alnum: 0.8, math_expr: 0.2}" in line for line in reported)
    assert not any("reward_functions" in line for line in translation.changed)


def test_a_model_with_images_keeps_its_engine(tmp_path: Path) -> None:
    seeing = translate(write(tmp_path, COMMON, GRPO, GENERATION, policy__is_vlm=True))
    assert seeing.values["policy.generation.backend"] == "vllm"
    assert seeing.values["env.reward.kind"] == "math"
    assert not [line for line in seeing.without if "is_vlm" in line]
