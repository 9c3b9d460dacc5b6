# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL's own: angles that take turns, experts that lie either way, deep layers, and fields of its configuration."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.model.vision_model import MultimodalRotary
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.family_reference import tensors_in
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_policy
from tests.support.vision_models import (
    PATCH,
    random_image,
    tiny_vision_config,
    transformers_inputs,
    vision_batch,
    write_vision_model,
)

MODEL = "qwen3_vl_moe"
TINY = Path(__file__).parents[4] / "examples/assets/tiny_qwen3_vl_moe"


@pytest.mark.parametrize(
    ("section", "interleaved", "axes"),
    [([4, 2, 2], True, "THWTHWTT"), ([3, 3, 2], True, "THWTHWTH"), ([4, 2, 2], False, "TTTTHHWW")],
)
def test_angles_of_the_three_axes(section: list[int], interleaved: bool, axes: str) -> None:
    positions = {"T": 2, "H": 5, "W": 11}
    rotary = MultimodalRotary(16, 10000.0, section, interleaved=interleaved)
    found = rotary(torch.tensor(list(positions.values()))[:, None, None])
    half = [positions[axis] * 10000.0 ** (-2 * number / 16) for number, axis in enumerate(axes)]
    assert found.shape == (1, 1, 1, 16)
    assert found.flatten().tolist() == pytest.approx([*half, *half], rel=1e-6)


def read(folder: Path, change: dict[str, Any], model_type: str = MODEL) -> Any:
    """The configuration of a tiny model with some fields changed, by their names with the section's before a dot."""
    config = tiny_vision_config(model_type).to_dict()
    for name, value in change.items():
        *sections, last = name.split(".")
        where = config
        for section in sections:
            where = where[section]
        where[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return load_hf_config(str(folder))


@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False)])
def test_the_outer_field_says_whether_the_output_layer_is_the_embedding(
    outer: bool, inner: bool, tmp_path: Path
) -> None:
    found = read(tmp_path, {"tie_word_embeddings": outer, "text_config.tie_word_embeddings": inner})
    assert found.tie_word_embeddings is outer


def test_released_files_say_that_the_weights_of_chosen_experts_add_up_to_one(tmp_path: Path) -> None:
    found = read(tmp_path, {"text_config.norm_topk_prob": True})
    assert build_transformer_config(tiny_policy(1), found).moe_router_pre_softmax is False
    assert not hasattr(read(tmp_path, {}), "norm_topk_prob")


REFUSED = {
    "text_config.norm_topk_prob": (False, "got False, supported for Qwen3-MoE: True"),
    "text_config.rope_parameters.mrope_interleaved": (False, "got False, supported for Qwen3-VL-MoE: True"),
    "text_config.rope_parameters.mrope_section": (
        [2, 1],
        r"got \[2, 1\], expected three whole numbers that add up to 4",
    ),
    "vision_config.deepstack_visual_indexes": ([0, 3], "expected rising numbers of the tower's blocks, from 0 to 2"),
    "vision_config.num_position_embeddings": (15, "got 15, expected the square of a whole number"),
    "vision_config.temporal_patch_size": (1, "got 1, supported for Qwen3-VL-MoE: 2"),
    "vision_config.some_other_field": (1, "a field that is not known for Qwen3-VL-MoE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_model_cannot_do_is_reported(name: str, tmp_path: Path) -> None:
    value, reported = REFUSED[name]
    with pytest.raises(ConfigurationError, match=rf"{name.removeprefix('text_config.')}: .*{reported}"):
        read(tmp_path, {name: value})


def test_blocks_in_another_order_or_more_of_them_than_layers_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"deepstack_visual_indexes: got \[1, 0\], expected rising"):
        read(tmp_path, {"vision_config.deepstack_visual_indexes": [1, 0]})
    with pytest.raises(ConfigurationError, match="got 3 blocks, expected at most 2, one for each layer"):
        read(tmp_path, {"vision_config.deepstack_visual_indexes": [0, 1, 2], "text_config.num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        (layout(pp=4), "pipeline_model_parallel_size: got 4, which leaves 1 of the model's 4 layers"),
        (layout(pp=2, vpp=2), "virtual_pipeline_model_parallel_size: got 2 on 2 stages, which leaves 1 "),
        (
            {**layout(pp=2), "num_layers_in_first_pipeline_stage": 1},
            "num_layers_in_first_pipeline_stage: got 1, which leaves 1 ",
        ),
    ],
)
def test_all_layers_that_the_tower_adds_to_are_beside_it(
    changes: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    hf_config = read(tmp_path, {})
    with pytest.raises(ConfigurationError, match=rf"^policy\.megatron_cfg\.{reported}.*, expected 2 or more"):
        build_transformer_config(tiny_policy(4, **changes), hf_config)


def experts_either_way(folder: Path, width: int) -> dict[str, Any]:
    """Chosen experts here and in transformers, and the tensors of a folder whose experts are turned, as exported."""
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank

    write_vision_model(MODEL, folder, moe_intermediate_size=width)
    tensors = tensors_in(folder)
    turned = folder.with_name("turned")
    turned.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (turned / name).write_bytes((folder / name).read_bytes())
    save_file(
        {
            name: tensor.transpose(1, 2).contiguous() if "experts" in name else tensor
            for name, tensor in tensors.items()
        },
        turned / "model.safetensors",
        metadata={"format": "pt"},
    )
    batch = vision_batch([[2, random_image(3, 2, 1), 3, random_image(1, 4, 2), 5]])
    theirs: list[Any] = []
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, inputs, output: theirs.append(output[2].sort(-1)[0].tolist()))
    with torch.no_grad():
        model(**transformers_inputs(MODEL, batch))
    policy = tiny_policy(1)
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, plain_config(load_hf_config(str(turned))), turned, num_steps=1)
        ours: list[Any] = []
        for module in trainer.chunks[0].modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda module, inputs, output: ours.append(as_numbers(output[1])))
        trainer.logprobs([batch])
        exported = dict(tensors_of_this_rank(trainer.chunks, trainer.config, trainer.hf_config))
        same = {name: torch.equal(exported[name], tensor) for name, tensor in tensors.items()}
    return {"ours": ours, "theirs": theirs, "same": same, "names": exported.keys() == tensors.keys()}


def as_numbers(chosen: torch.Tensor) -> list[list[int]]:
    """Numbers of the experts of each token, rising, out of these or of a mask."""
    if chosen.dtype is torch.bool:
        chosen = chosen.nonzero()[:, 1].reshape(len(chosen), -1)
    found: list[list[int]] = chosen.sort(-1)[0].tolist()
    return found


# Of 32 and of 16 one of the two tensors is square: it lies as the other does.
@pytest.mark.full
@pytest.mark.parametrize("width", [24, *(pytest.param(width, marks=pytest.mark.slow) for width in (32, 16))])
def test_experts_are_those_of_transformers_whichever_way_they_lie(width: int, tmp_path: Path) -> None:
    (found,) = run_ranks(experts_either_way, 1, tmp_path / "model", width)
    assert found["names"]
    assert all(found["same"].values()), [name for name, is_same in found["same"].items() if not is_same]
    assert len(found["theirs"]) == 4
    num_tokens = len(found["theirs"][0])
    assert [layer[:num_tokens] for layer in found["ours"]] == found["theirs"]


def steps_of_the_example() -> list[float]:
    policy = tiny_policy(1)
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, plain_config(load_hf_config(str(TINY))), None, num_steps=2)
        before = {name: parameter.detach().clone() for name, parameter in trainer.chunks[0].named_parameters()}
        batch = vision_batch([[2, random_image(4, 4, seed), 6] for seed in range(4)])
        losses = [trainer.train([shard_of_rank(batch, microbatches=((0, 1), (2, 3)))], sft_loss) for _ in range(2)]
        left = [
            name for name, parameter in trainer.chunks[0].named_parameters() if torch.equal(parameter, before[name])
        ]
        assert not left, left
        return [step.global_loss for step in losses]


@pytest.mark.full
def test_the_example_takes_steps_from_random_weights() -> None:
    (losses,) = run_ranks(steps_of_the_example, 1)
    assert all(map(math.isfinite, losses))
    assert losses[1] < losses[0]
