# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 with images: training steps beside transformers, faults that a comparison has to show, and what is refused.

transformers differs from itself with another chunk size of the gated delta rule; that floor is measured in the run.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.vllm.releases import check_model
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model import vision_model
from nemo_rl_moe.models.megatron.training import microbatch
from tests.support.family_reference import other_chunks, trainer_of
from tests.support.family_training import NUM_STEPS, SETTINGS, TrainingRun, steps_of_trainer, steps_of_transformers
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, logprobs_by_sequence, parallel_job, shard_of_rank, tiny_policy
from tests.support.vision_models import (
    PATCH,
    mixed_batch,
    random_image,
    tiny_vision_config,
    transformers_inputs,
    vision_batch,
    write_vision_model,
)
from tests.unit.models.megatron.tiny_trainers import PACKED

MODEL, DENSE = "qwen3_5_moe", "qwen3_5"
MICROBATCHES = ((0, 2), (3, 6), (7, 4), (1, 5))
LEAST = 1e-5
"""Of losses and gradient norms, relative, and of log-probabilities; twice the rounding of the rule is allowed, too."""


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def logprobs_of(model: Any, batch: TokenBatch | None = None) -> torch.Tensor:
    """Return transformers' log-probabilities of every token but the first."""
    batch = mixed_batch(MODEL) if batch is None else batch
    logits = model(**transformers_inputs(MODEL, batch), use_cache=False).logits[:, :-1].log_softmax(-1)
    found: torch.Tensor = logits.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return found


def loss_of(model: Any, batch: TokenBatch) -> torch.Tensor:
    return -logprobs_of(model, batch)[batch.token_mask[:, 1:]].mean()


def write_and_train(name: str, folder: str) -> tuple[TrainingRun, TrainingRun, np.ndarray]:
    """Run on one rank: transformers' steps, those with other chunks, and its log-probabilities before."""
    write_vision_model(name, Path(folder))
    with torch.no_grad():
        before = logprobs_of(model_of(Path(folder))).numpy()
    model, other, policy = model_of(Path(folder)), model_of(Path(folder)), tiny_policy(1, **SETTINGS)
    found = steps_of_transformers(model, policy, mixed_batch(MODEL), loss_of)
    with other_chunks(other, chunk_size=4):
        return found, steps_of_transformers(other, policy, mixed_batch(MODEL), loss_of), before


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the folder of a model, by its name, and what `write_and_train` found with it."""

    @cache
    def found(name: str) -> Any:
        folder = tmp_path_factory.mktemp(name) / "model"
        return folder, *run_ranks(write_and_train, 1, name, str(folder))[0]

    return found


def steps(folder: str, policy: PolicyConfig) -> TrainingRun:
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=NUM_STEPS)
        return steps_of_trainer(trainer, mixed_batch(MODEL), MICROBATCHES)


@pytest.mark.parametrize(
    ("name", "world_size", "changes"),
    [
        (MODEL, 1, {}),
        (MODEL, 2, PACKED | layout(tp=2)),
        full(MODEL, 1, PACKED),
        *(full(MODEL, 2, changes) for changes in (layout(pp=2), PACKED | layout(ep=2))),
        *(slow(MODEL, 2, changes) for changes in (layout(tp=2), PACKED | layout(pp=2), layout(ep=2), {}, PACKED)),
        full(DENSE, 2, PACKED | layout(tp=2)),
        slow(DENSE, 1, {}),
        *(slow(DENSE, 2, changes) for changes in (layout(pp=2), PACKED)),
    ],
)
def test_steps_are_those_of_transformers(
    name: str, world_size: int, changes: dict[str, Any], reference: Callable[[str], Any]
) -> None:
    folder, expected, other, _ = reference(name)
    found = run_ranks(steps, world_size, str(folder), tiny_policy(world_size, **SETTINGS, **changes))[0]
    num_steps = found.num_same_loads(expected)
    assert num_steps >= 2
    for values in ("losses", "grad_norms"):
        ours, theirs, others = (np.array(getattr(run, values))[:num_steps] for run in (found, expected, other))
        floor, difference = np.abs(others / theirs - 1).max(), np.abs(ours / theirs - 1).max()
        print(f"{name}, {changes}: {values} {difference:.1e}, transformers from itself {floor:.1e}")
        assert difference < max(LEAST, 2 * floor), values
    assert expected.losses[-1] < 0.9 * expected.losses[0], "the steps are large enough to show differences"


def compare_long_rows(folder: Path) -> tuple[float, float]:
    """Run on one rank: differences from transformers over several chunks, and of transformers from itself."""
    write_vision_model(MODEL, folder, rms_norm_eps=1e-6)
    batch = vision_batch([[50, random_image(3, 2, 1), 80, random_image(1, 4, 2), 5], [70, random_image(4, 4, 3), 60]])
    policy, model = tiny_policy(1, max_total_sequence_length=192), model_of(folder)
    with parallel_job(policy):
        shard = shard_of_rank(batch, microbatches=((0, 1),))
        ours = logprobs_by_sequence(trainer_of(folder, policy), shard, batch, ((0, 1),))
    with torch.no_grad():
        theirs = logprobs_of(model, batch).numpy()
        with other_chunks(model):
            others = logprobs_of(model, batch).numpy()
    rows = [(row[1:], theirs[at, : len(row) - 1], others[at, : len(row) - 1]) for at, row in ours.items()]
    differences = [(np.abs(mine - right).max(), np.abs(other - right).max()) for mine, right, other in rows]
    return float(max(each[0] for each in differences)), float(max(each[1] for each in differences))


def test_long_rows_with_images_are_those_of_transformers_within_its_own_rounding(tmp_path: Path) -> None:
    ((difference, floor),) = run_ranks(compare_long_rows, 1, tmp_path / "model")
    print(f"{difference:.1e}, transformers from itself {floor:.1e}")
    assert 0 < floor < 1e-2
    # As test_recurrent_models.py allows it: processors differ.
    assert difference < 6 * max(floor, 1e-6)


def positions_of_text(is_image: torch.Tensor, grids: Any) -> torch.Tensor:
    """Return positions as if image tokens were words."""
    return torch.arange(is_image.shape[1]).expand(3, *is_image.shape).clone()


def placed_one_later(hidden: torch.Tensor, is_image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return PLACED(hidden, is_image.roll(1, 1), features)


class InSections(vision_model.MultimodalRotary):
    def __init__(self, *arguments: Any, interleaved: bool):
        super().__init__(*arguments, interleaved=False)


PLACED = vision_model.placed
FAULTS: dict[str, Any] = {
    "none": mock.patch.dict({}),
    "positions of text": mock.patch.object(microbatch, "image_positions", positions_of_text),
    "features one token later": mock.patch.object(vision_model, "placed", placed_one_later),
    "sections in place of turns": mock.patch.object(vision_model, "MultimodalRotary", InSections),
}


def largest_difference(folder: str, fault: str, expected: np.ndarray) -> float:
    """Return the largest difference of log-probabilities from transformers."""
    policy = tiny_policy(1)
    with parallel_job(policy), FAULTS[fault]:
        batch = mixed_batch(MODEL)
        shard = shard_of_rank(batch, microbatches=MICROBATCHES)
        found = logprobs_by_sequence(trainer_of(Path(folder), policy), shard, batch, MICROBATCHES)
        return max(float(np.abs(row[1:] - expected[at, : len(row) - 1]).max()) for at, row in found.items())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_images_shows_beside_transformers(fault: str, reference: Callable[[str], Any]) -> None:
    folder, _, _, expected = reference(MODEL)
    (difference,) = run_ranks(largest_difference, 1, str(folder), fault, expected)
    print(f"{fault}: {difference:.1e}")
    assert difference < LEAST if fault == "none" else difference > 1e-2


def read(folder: Path, section: str, changes: dict[str, Any]) -> Any:
    config = tiny_vision_config(MODEL).to_dict()
    (config[section] if section else config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return load_hf_config(str(folder))


ROPE = tiny_vision_config(MODEL).to_dict()["text_config"]["rope_parameters"]


@pytest.mark.parametrize(
    ("section", "changes", "reported"),
    [
        ("vision_config", {"deepstack_visual_indexes": [0]}, r"got \[0\], supported for Qwen3.5-MoE: \[\] or None"),
        ("vision_config", {"num_position_embeddings": 15}, "got 15, expected the square of a whole number"),
        (
            "text_config",
            {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}},
            r"got \[4, 2, 2\], expected three whole numbers that add up to 4, half of a head's rotated entries",
        ),
        *(
            (
                "text_config",
                {"rope_parameters": ROPE | {"partial_rotary_factor": factor}},
                rf"rope_parameters\.partial_rotary_factor: got {factor!r}, expected a number above 0 and up to 1",
            )
            for factor in (None, "half", 3.0)
        ),
        (
            "text_config",
            {"rope_parameters": ROPE | {"mrope_interleaved": False}},
            "got False, supported for Qwen3.5-MoE: True",
        ),
    ],
)
def test_what_the_model_cannot_do_is_reported(
    section: str, changes: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=reported):
        read(tmp_path, section, changes)


def test_vllm_is_refused(tmp_path: Path) -> None:
    hf_config = read(tmp_path, "", {})
    for on_gpus in (True, False):
        with pytest.raises(ConfigurationError, match=r"backend: got 'vllm', .*, and this one is qwen3_5_moe"):
            check_model(hf_config, "my/model", on_gpus=on_gpus)
