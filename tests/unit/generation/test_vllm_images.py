# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images for vLLM: the trainer's tokens and numbers, one line where they do not go together, probes with images."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.vllm.engine import image_settings
from nemo_rl_moe.generation.vllm.images import (
    ImageSettings,
    as_loader_expects,
    image_runs,
    model_inputs,
    stand_in_for_torchvision,
)
from nemo_rl_moe.launch.refit import batch_of, explain_by_text, image_probe
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.images import IS_IMAGE, PIXELS, ModelImage, image_inputs, images_in, sequence_inputs
from tests.support.vision_models import mixed_batch

INTERNVL, QWEN = (f"examples/assets/tiny_{name}_moe" for name in ("internvl", "qwen3_vl"))


def settings_of(folder: str) -> ImageSettings:
    settings = image_settings(load_hf_config(folder))
    assert settings is not None
    return settings


def image(height: int, width: int, seed: int = 0) -> ModelImage:
    return ModelImage(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def prompt(settings: ImageSettings, *parts: int | ModelImage) -> tuple[list[int], dict[str, ModelInput]]:
    """Tokens and images in their order."""
    ids: list[int] = []
    mask: list[bool] = []
    for part in parts:
        count = settings.num_tokens(part) if isinstance(part, ModelImage) else 1
        ids += [settings.token_id if isinstance(part, ModelImage) else part] * count
        mask += [isinstance(part, ModelImage)] * count
    images = [part for part in parts if isinstance(part, ModelImage)]
    return ids, image_inputs(images, np.array(mask))


def test_each_image_stands_where_the_trainer_has_it() -> None:
    settings = settings_of(QWEN)
    side = settings.side
    first, second = image(2 * side, 3 * side), image(side, 2 * side, 1)
    # Two without a token between, and an image token that is text.
    ids, inputs = prompt(settings, 7, first, second, settings.token_id, 8, first)
    found = [(each.digest, start, count) for each, start, count in image_runs(settings, ids, inputs)]
    assert found == [(first.digest, 1, 6), (second.digest, 7, 2), (first.digest, 11, 6)]
    assert image_runs(settings, [7, 8], {}) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda ids, mask: (ids[:-1], mask[:-1]),
            r"^a prompt of 16 tokens has 15 image tokens, expected 16, the number that vLLM computes for its 1 images$",
        ),
        (lambda ids, mask: ([*ids, 9], [*mask, True]), r"^a prompt of 18 tokens has 17 image tokens, expected 16,"),
        (
            lambda ids, mask: ([ids[0], ids[1], 9, *ids[2:]], [mask[0], True, False, *mask[2:]]),
            r"^an image's 16 image tokens from token 1 on are not one run of token 4$",
        ),
        (
            lambda ids, mask: ([ids[0], ids[1], 4, *ids[2:]], [mask[0], True, False, *mask[2:]]),
            r"are not one run of token 4$",
        ),
        (lambda ids, mask: ([*ids[:-1], 9], mask), r"are not one run of token 4$"),
    ],
    ids=["too few", "too many", "apart", "apart by an image token of the text", "another token"],
)
def test_images_and_tokens_that_do_not_go_together_are_one_line(change: object, problem: str) -> None:
    settings = settings_of(INTERNVL)
    one = image(32, 32)
    ids, mask = change([7, *[settings.token_id] * 16], [False, *[True] * 16])  # type: ignore[operator]
    with pytest.raises(GenerationError, match=problem):
        image_runs(settings, ids, image_inputs([one], np.array(mask)))


def test_numbers_of_a_image_are_those_that_the_tower_gets() -> None:
    tile = image(32, 32)
    tensors = model_inputs(settings_of(INTERNVL), tile)
    expected = (tile.pixels.astype(np.float64) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(tensors["pixel_values"][0].permute(1, 2, 0), expected, atol=1e-6)
    assert tensors["image_num_patches"].tolist() == [1]

    settings = settings_of(QWEN)
    tensors = model_inputs(settings, image(2 * settings.side, settings.side))
    merge = settings.rule.merge_size
    assert tensors["image_grid_thw"].tolist() == [[1, 2 * merge, merge]]
    assert tensors["pixel_values"].shape == (2 * merge**2, settings.rule.patch_dim)


def test_experts_are_turned_for_the_family_that_vllm_reads_turned() -> None:
    # Square ones, which no loader can distinguish.
    experts, other = torch.arange(18.0).view(2, 3, 3), torch.arange(9.0).view(3, 3)
    prefix = "model.language_model.layers.1.mlp."
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        turned = as_loader_expects(settings_of(QWEN), prefix + name, experts)
        assert torch.equal(turned, experts.transpose(1, 2))
        assert torch.equal(as_loader_expects(settings_of(INTERNVL), prefix + name, experts), experts)
        assert torch.equal(as_loader_expects(None, prefix + name, experts), experts)
    assert torch.equal(as_loader_expects(settings_of(QWEN), f"{prefix}gate.weight", other), other)


def test_models_of_text_have_no_images() -> None:
    assert image_settings(load_hf_config("examples/assets/tiny_qwen3_moe")) is None


@pytest.mark.skipif("torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None, reason="there")
def test_torchvision_is_stood_in_for_while_a_module_is_imported_and_no_longer() -> None:
    with stand_in_for_torchvision():
        functional = importlib.import_module("torchvision.transforms.v2.functional")
        assert isinstance(functional.InterpolationMode, type)
    assert not [name for name in sys.modules if name.startswith("torchvision")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchvision")


@pytest.mark.parametrize("folder", [INTERNVL, QWEN])
def test_the_refit_check_asks_about_images(folder: str) -> None:
    hf_config = load_hf_config(folder)
    settings = settings_of(folder)
    probes = [image_probe(list(range(10, 42)), hf_config, 39, seed) for seed in range(2)]
    for ids, inputs in probes:
        ((shown, first, count),) = image_runs(settings, ids, inputs)
        assert first == 1
        assert 1 + count < len(ids) <= 39
        assert shown.pixels.std() > 50
    assert len({shown.digest for _, inputs in probes for shown in images_in(inputs)}) == 2
    # Of as many tokens as the image has none fit; text is scored all the same.
    ids, inputs = image_probe([5, 6, 7], hf_config, 4, 0)
    assert list(ids) == [5, 6, 7]
    assert not images_in(inputs)


class RewardFunction:
    """A policy and an engine at once, which score text with these log-probs."""

    def __init__(self, logprob: float):
        self.logprob = logprob

    def start_logprobs(self, batch: Any, **_: Any) -> Any:
        assert not any(arrays for arrays in batch.shared[PIXELS].arrays)
        return lambda: torch.full(batch.input_ids.shape, self.logprob)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Any:
        return [[np.full(len(ids) - 1, of_copy, np.float32) for ids in sequences] for of_copy in (0.0, self.logprob)]


@pytest.mark.parametrize(
    ("logprob", "words"), [(-1.0, "of the vision tower or"), (-1.1, "0.1 nats, too: weights of the dec")]
)
def test_text_says_on_which_side_weights_differ(logprob: float, words: str) -> None:
    policy, engine, hf_config = RewardFunction(-1.0), RewardFunction(logprob), load_hf_config(QWEN)
    assert words in explain_by_text(policy, engine, 1, 1.0, 2, hf_config)  # type: ignore[arg-type]


def test_models_of_text_are_asked_about_text() -> None:
    assert image_probe([5, 6, 7], load_hf_config("examples/assets/tiny_qwen3_moe"), 39, 0) == ([5, 6, 7], {})


def test_inputs_come_out_of_a_batch_as_they_went_in() -> None:
    settings = settings_of(QWEN)
    side = settings.side
    given: Sequence[tuple[list[int], Mapping[str, ModelInput]]] = [
        prompt(settings, 7, image(side, 2 * side), 8, 9),
        prompt(settings, 1, 2, 3, 4, 5),
    ]
    batch = batch_of([ids for ids, _ in given], [inputs for _, inputs in given])
    found = sequence_inputs(batch, [1, 0])
    for inputs, (_, expected) in zip(reversed(found), given, strict=True):
        assert inputs.keys() == expected.keys()
        for name, value in expected.items():
            assert inputs[name].axis is value.axis
            np.testing.assert_array_equal(inputs[name].values, value.values)
    assert found[1][IS_IMAGE].values.sum() == 2
    padded = mixed_batch("qwen3_vl_moe")
    lengths = [len(inputs[IS_IMAGE].values) for inputs in sequence_inputs(padded, range(len(padded)))]
    assert lengths == padded.lengths.tolist()
    assert sequence_inputs(batch_of([[1, 2]]), [0]) == []
