# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Vision-language models against transformers, and one optimizer step of every layout against that of one rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.microbatches import DynamicBatching, PackedBatching, plan_microbatches
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import VISION_FAMILIES, decoder_type_of, num_patches_of
from nemo_rl_moe.models.families.internvl import INTERNVL
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.images import image_patches
from nemo_rl_moe.models.megatron.model.router_settings import setting_sources
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.family_reference import assert_same_tensors, files_beside, tensors_in
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import listed, slow
from tests.support.tiny_model import (
    layout,
    logprobs_by_sequence,
    parallel_job,
    shard_of_rank,
    tiny_hf_config,
    tiny_policy,
)
from tests.support.vision_models import (
    MERGE,
    MODELS,
    PATCH,
    SIDE,
    mixed_batch,
    tiny_vision_config,
    transformers_inputs,
    write_vision_model,
)
from tests.unit.models.megatron.tiny_trainers import EXPERT_BIAS, PACKED, shard_for

# The last microbatch has no image.
MICROBATCHES = ((0, 2), (3, 6), (7, 4), (1, 5))
# One before a checkpoint and two behind it: the last loss follows the optimizer's state, too.
STEPS, STEPS_BEFORE = 3, 1
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Trained:
    """One rank's log-probabilities before training, then losses, gradient norms and weights of the tower."""

    logprobs: dict[int, np.ndarray]
    losses: list[float]
    norms: list[float]
    tower: dict[str, np.ndarray]


def policy_of(world_size: int, **changes: Any) -> PolicyConfig:
    """With gradients that are reduced while others are computed."""
    overlap = {"distributed_data_parallel_config__overlap_grad_reduce": True}
    return tiny_policy(world_size, **{"moe_aux_loss_coeff": 0.0, **overlap, **changes})


def trainer_of(folder: str, policy: PolicyConfig) -> MegatronTrainer:
    return MegatronTrainer(policy, plain_config(load_hf_config(folder)), Path(folder), num_steps=STEPS)


def train(
    folder: str, model_type: str, policy: PolicyConfig, export: str = "", microbatches: Any = MICROBATCHES
) -> Trained:
    with parallel_job(policy):
        trainer = trainer_of(folder, policy)
        if export:
            trainer.save_weights(Path(export), files_beside(Path(folder)))
        batch, place = mixed_batch(model_type), trainer.coordinates
        shard = shard_for(trainer, batch, microbatches)
        assert trainer.has_tower == (place.pipeline_rank == 0)
        # As a worker hands them on: pixels where there is a tower, and nowhere else.
        fetched = (each.fetched(list, with_shared=trainer.has_tower) for each in shard.microbatches)
        shard = replace(shard, microbatches=tuple(fetched))
        logprobs = logprobs_by_sequence(trainer, shard, batch, microbatches)
        results = [trainer.train([shard], sft_loss) for _ in range(STEPS)]
        tower = {
            name: parameter.detach().numpy().copy()
            for chunk in trainer.chunks
            for name, parameter in chunk.named_parameters()
            if name.startswith("vision.")
        }
        return Trained(
            logprobs, [result.global_loss for result in results], [result.grad_norm for result in results], tower
        )


def write_and_compute(model_type: str, folder: str) -> np.ndarray:
    """Writes the model; log-probabilities of every token given those before, by transformers."""
    from transformers import AutoModelForImageTextToText

    write_vision_model(model_type, Path(folder))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    batch = mixed_batch(model_type)
    with torch.no_grad():
        logits = model.eval()(**transformers_inputs(model_type, batch)).logits[:, :-1].log_softmax(-1)
    found: np.ndarray = logits.gather(-1, batch.input_ids[:, 1:, None])[..., 0].numpy()
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Of a model type, once: type, folder, transformers' log-probabilities, and training on one rank; exports beside
    the folder."""

    @cache
    def made(model_type: str) -> Any:
        folder = tmp_path_factory.mktemp(model_type) / "model"
        (logprobs,) = run_ranks(write_and_compute, 1, model_type, str(folder))
        (one,) = run_ranks(train, 1, str(folder), model_type, policy_of(1), str(folder.parent / "exported"))
        return model_type, folder, logprobs, one

    return made


@pytest.fixture(params=listed([*MODELS, "qwen3_vl", "qwen3_5"], quick=["qwen3_vl_moe"], in_full=MODELS))
def reference(request: pytest.FixtureRequest, references: Callable[[str], Any]) -> Any:
    """Return what `references` has of one model."""
    return references(request.param)


def test_logprobs_are_those_of_transformers_and_an_export_is_what_was_read(reference: Any) -> None:
    _, folder, expected, one = reference
    for row, found in one.logprobs.items():
        np.testing.assert_allclose(found[1:], expected[row, : len(found) - 1], atol=TOLERANCE)
    assert len({name.split(".")[1] for name in one.tower}) > 1
    assert_same_tensors(folder.parent / "exported", folder)


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, PACKED),
    (2, PACKED | layout(tp=2)),
    (2, layout(pp=2)),
    (2, {}),
    (1, {"activation_checkpointing": "none"}),
    (2, layout(tp=2)),
    (2, PACKED | layout(pp=2)),
    (2, layout(pp=2, vpp=2)),
    (2, PACKED | layout(ep=2)),
]
WITHOUT = {
    "qwen2_5_vl": "expert_model_parallel_size",  # it has no experts
    "qwen3_vl_moe": "virtual_pipeline_model_parallel_size",  # its tower adds to two layers
}


# Each kind of layout once, with the model that it is hardest for: packing and tensor parallelism with positions in
# three axes, stages with features behind the first layers, and ranks that have other images with experts.
@pytest.mark.parametrize(
    ("reference", "world_size", "changes"),
    listed(
        (
            (model_type, *case)
            for model_type in MODELS
            for case in LAYOUTS
            if not case[1].get(WITHOUT.get(model_type, ""))
        ),
        quick=[("qwen3_vl_moe", 2, layout(pp=2))],
        in_full=[
            ("qwen2_5_vl", 2, PACKED | layout(tp=2)),
            ("qwen3_5_moe", 2, PACKED | layout(tp=2)),
            ("internvl", 1, PACKED),
            ("internvl", 2, {}),
        ],
    ),
    indirect=["reference"],
)
def test_steps_do_not_depend_on_the_layout(reference: Any, world_size: int, changes: dict[str, Any]) -> None:
    model_type, folder, _, one = reference
    ranks = run_ranks(train, world_size, str(folder), model_type, policy_of(world_size, **changes))
    for rank in ranks:
        assert rank.losses == pytest.approx(one.losses, rel=1e-5)
        assert rank.norms == pytest.approx(one.norms, rel=1e-4)
        for row, found in rank.logprobs.items():
            np.testing.assert_allclose(found, one.logprobs[row], atol=TOLERANCE)
    with_tower = [rank for rank in ranks if rank.tower]
    assert with_tower
    for rank in with_tower:
        for name, weights in rank.tower.items():
            np.testing.assert_allclose(weights, one.tower[name], atol=1e-4, err_msg=name)
            np.testing.assert_array_equal(weights, with_tower[0].tower[name], err_msg=f"replicas of {name}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("reference", "world_size", "packed"), [("qwen2_5_vl", 1, False), ("internvl", 2, True)], indirect=["reference"]
)
def test_a_limit_of_patches_changes_no_step(reference: Any, world_size: int, packed: bool) -> None:
    """Each rank has as many microbatches, whose towers run no more than the limit; losses and weights stay."""
    model_type, folder, _, one = reference
    batch = mixed_batch(model_type)
    images = image_patches(batch, num_patches_of(load_hf_config(str(folder))))
    largest = max(patches for own in images for patches in own.values())
    batching: Any = PackedBatching(300) if packed else DynamicBatching(300, overhead_tokens=1000)
    plans = [
        plan_microbatches(
            batch.lengths.tolist(),
            num_data_parallel_ranks=world_size,
            global_batch_size=len(batch),
            batching=replace(batching, max_patches=most),
            images=images,
        )
        for most in (None, largest)
    ]
    assert plans[0].num_microbatches < plans[1].num_microbatches
    microbatches = [indices for of_rank in plans[1].global_batches[0] for indices in of_rank]
    policy = policy_of(world_size, **(PACKED if packed else {}))
    for rank in run_ranks(train, world_size, str(folder), model_type, policy, "", microbatches):
        assert rank.losses == pytest.approx(one.losses, rel=1e-5)
        assert rank.norms == pytest.approx(one.norms, rel=1e-4)
        for name, weights in rank.tower.items():
            np.testing.assert_allclose(weights, one.tower[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("model_type", MODELS)
def test_patches_are_those_that_the_tower_gets(model_type: str) -> None:
    family, config = VISION_FAMILIES[model_type], tiny_vision_config(model_type)
    flat = family.flattened(config, decoder_type_of(config.to_dict()))
    # PATCH pixels a side, and MERGE by MERGE of them a token.
    assert family.num_patches(flat, 4 * SIDE, 4 * SIDE) == (4 * SIDE // PATCH) ** 2
    assert family.num_patches(flat, 4 * SIDE, 4 * SIDE) == MERGE**2 * family.num_image_tokens(flat, 4 * SIDE, 4 * SIDE)


def begin_and_save(folder: str, model_type: str, policy: PolicyConfig, directory: str) -> list[float]:
    """A step, and a checkpoint; the losses."""
    with parallel_job(policy):
        trainer = trainer_of(folder, policy)
        found = losses_of(trainer, model_type, STEPS_BEFORE)
        trainer.start_checkpoint(Path(directory), with_optimizer=True)
        problem = trainer.finish_checkpoint()
        assert problem is None, problem
        return found


def load_and_go_on(folder: str, model_type: str, policy: PolicyConfig, directory: str) -> list[float]:
    with parallel_job(policy):
        trainer = trainer_of(folder, policy)
        trainer.load_checkpoint(Path(directory), with_optimizer=True)
        return losses_of(trainer, model_type, STEPS - STEPS_BEFORE)


def losses_of(trainer: MegatronTrainer, model_type: str, num_steps: int) -> list[float]:
    batch = mixed_batch(model_type)
    shard = shard_for(trainer, batch, MICROBATCHES)
    return [trainer.train([shard], sft_loss).global_loss for _ in range(num_steps)]


@pytest.mark.full
@pytest.mark.parametrize(
    "reference", [*(slow(model_type) for model_type in ("qwen2_5_vl", "qwen3_vl_moe")), "internvl"], indirect=True
)
@pytest.mark.parametrize(
    ("first", "then", "is_exact"),
    [(layout(tp=2), layout(pp=2), False), slow(layout(pp=2), {}, False), slow({}, {}, True)],
)
def test_training_goes_on_from_a_checkpoint_of_another_layout(
    reference: Any, first: dict[str, Any], then: dict[str, Any], is_exact: bool, tmp_path: Path
) -> None:
    model_type, folder, _, one = reference
    before = run_ranks(begin_and_save, 2, str(folder), model_type, policy_of(2, **first), str(tmp_path))
    after = run_ranks(load_and_go_on, 2, str(folder), model_type, policy_of(2, **then), str(tmp_path))
    assert [*before[0], *after[0]] == pytest.approx(one.losses, rel=1e-5)
    if is_exact:
        whole = run_ranks(train, 2, str(folder), model_type, policy_of(2, **first))
        assert [*before[0], *after[0]] == whole[0].losses


def gradients(folder: str, model_type: str, policy: PolicyConfig) -> dict[str, np.ndarray]:
    """Gradients of one rank before an optimizer step, under transformers' names."""
    from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank

    with parallel_job(policy):
        trainer = trainer_of(folder, policy)
        shard = shard_of_rank(mixed_batch(model_type), microbatches=MICROBATCHES)
        for observer in trainer.observers:
            observer.start_step(1, [shard])
        trainer._forward_backward.train(trainer.ddp_chunks, shard, sft_loss)
        with torch.no_grad():
            for chunk in trainer.chunks:
                for parameter in chunk.parameters():
                    parameter.copy_(parameter.main_grad)
        found = tensors_of_this_rank(trainer.chunks, trainer.config, trainer.hf_config)
        return {name: tensor.numpy() for name, tensor in found}


def transformers_gradients(folder: str, model_type: str) -> dict[str, np.ndarray]:
    """Return the gradients of transformers, in files' names: written and read again."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    batch = mixed_batch(model_type)
    logits = model(**transformers_inputs(model_type, batch)).logits[:, :-1].log_softmax(-1)
    chosen = logits.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    mask = batch.token_mask[:, 1:]
    (-(chosen * mask).sum() / mask.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(f"{folder}_gradients")
    return {name: tensor.numpy() for name, tensor in tensors_in(Path(f"{folder}_gradients")).items()}


def test_gradients_of_decoder_projector_and_tower_are_those_of_transformers(reference: Any) -> None:
    model_type, folder, _, _ = reference
    policy = policy_of(1, distributed_data_parallel_config__overlap_grad_reduce=False)
    (ours,) = run_ranks(gradients, 1, str(folder), model_type, policy)
    (theirs,) = run_ranks(transformers_gradients, 1, str(folder), model_type)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        # A share of the mean over four microbatches, which the schedule divides.
        difference = np.abs(ours[name] - expected).max()
        assert difference <= 1e-5 * max(np.abs(expected).max(), 1e-2), name
    assert all(np.abs(theirs[name]).max() > 0 for name in theirs if "vision" in name or "visual" in name)


def test_random_weights_follow_the_seed_and_the_names_alone() -> None:
    (found,) = run_ranks(random_towers, 1)
    first, again, other = found
    assert first.keys() == again.keys() == other.keys()
    for name, weights in first.items():
        np.testing.assert_array_equal(weights, again[name], err_msg=name)
        if "norm" in name or name.endswith("ln_q.weight"):
            assert set(weights.tolist()) == ({0.0} if name.endswith("bias") else {1.0}), name
        elif weights.ndim > 1 and "token" not in name and "position" not in name:
            assert np.abs(weights - other[name]).max() > 0.01, name
            assert 0.05 < weights.std() < 0.15, name


def random_towers() -> list[dict[str, np.ndarray]]:
    """Weights of both families' towers by seed 1, once more, and by seed 2."""
    from nemo_rl_moe.models.megatron.model.vision_model import draw_weights

    found = []
    for seed in (1, 1, 2):
        weights = {}
        for model_type in MODELS:
            config, family = tiny_vision_config(model_type), VISION_FAMILIES[model_type]
            flat = family.flattened(config, decoder_type_of(config.to_dict()))
            tower = family.build(flat)
            draw_weights(tower, flat, seed)
            weights |= {f"{model_type}.{name}": each.detach().numpy() for name, each in tower.named_parameters()}
        found.append(weights)
    return found


@dataclass(frozen=True)
class Frozen:
    """Names of weights, and of routers' expert bias, that a step has changed, and that it has left."""

    changed: set[str]
    left: set[str]


def step_with_frozen_parts(folder: str, model_type: str, parts: tuple[str, ...]) -> Frozen:
    bias = {} if model_type == "qwen2_5_vl" else EXPERT_BIAS
    policy = policy_of(1, **{f"freeze__{part}": True for part in parts}, **bias)
    with parallel_job(policy):
        trainer = trainer_of(folder, policy)
        (chunk,) = trainer.chunks

        def weights() -> dict[str, torch.Tensor]:
            buffers = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")}
            return {name: tensor.detach().clone() for name, tensor in (*chunk.named_parameters(), *buffers.items())}

        before = weights()
        assert any(name.endswith(".expert_bias") for name in before) == bool(bias)
        trainer.train([shard_of_rank(mixed_batch(model_type), microbatches=MICROBATCHES)], sft_loss)
        is_same = {name: torch.equal(tensor, before[name]) for name, tensor in weights().items()}
        return Frozen({name for name in is_same if not is_same[name]}, {name for name in is_same if is_same[name]})


# The rate is Megatron-Core's own.
FROZEN = [("vision_tower",), ("vision_tower", "language_model"), ("projector",)]


# What is the projector differs by model; the rest is the same for all.
@pytest.mark.parametrize(
    ("reference", "parts"),
    listed(
        product(MODELS, FROZEN),
        quick=[("qwen3_vl_moe", FROZEN[-1])],
        in_full=[*product(["internvl"], FROZEN), *product(MODELS, FROZEN[-1:])],
    ),
    indirect=["reference"],
)
def test_frozen_parts_stay_as_they_are_and_all_others_train(reference: Any, parts: tuple[str, ...]) -> None:
    model_type, folder, _, _ = reference
    (found,) = run_ranks(step_with_frozen_parts, 1, str(folder), model_type, parts)
    projector = {
        "qwen2_5_vl": "vision.merger.",
        "qwen3_vl_moe": ("vision.merger.", "vision.deepstack_merger_list."),
        "qwen3_5_moe": "vision.merger.",
        "internvl": "vision.multi_modal_projector.",
    }[model_type]

    def part_of(name: str) -> str:
        if not name.startswith("vision."):
            return "language_model"
        return "projector" if name.startswith(projector) else "vision_tower"

    assert {part_of(name) for name in found.left} == set(parts)
    assert {part_of(name) for name in found.changed} == {"vision_tower", "projector", "language_model"} - set(parts)


@pytest.mark.parametrize(
    ("parts", "changes", "reported"),
    [
        (("vision_tower", "projector", "language_model"), {}, "which leaves nothing to train"),
        (("language_model",), layout(pp=2), "pipeline_model_parallel_size 2: nothing would train on the stages"),
        (
            ("language_model",),
            {**EXPERT_BIAS, "moe_router_bias_update_rate": 0.01},
            r"moe_router_bias_update_rate: got 0\.01, expected 0\.0 .*language_model true",
        ),
    ],
)
def test_parts_that_cannot_be_frozen_so_are_reported(
    parts: tuple[str, ...], changes: dict[str, Any], reported: str
) -> None:
    config = tiny_vision_config("internvl")
    flat = INTERNVL.flattened(config, "qwen3_moe")
    policy = policy_of(2, **changes, **{f"freeze__{part}": True for part in parts})
    with pytest.raises(ConfigurationError, match=reported):
        build_transformer_config(policy, flat)


def test_a_text_model_has_no_vision_tower_to_freeze() -> None:
    limited = tiny_policy(1, sequence_packing__train_mb_patches=64)
    message = r"policy\.sequence_packing\.train_mb_patches: got 64, expected null: the model takes no images"
    with pytest.raises(ConfigurationError, match=message):
        build_transformer_config(limited, tiny_hf_config())
    with pytest.raises(ConfigurationError, match="got true, expected false: the model takes no images"):
        build_transformer_config(policy_of(1, freeze__vision_tower=True), tiny_hf_config())


def test_the_rate_of_a_frozen_expert_bias_says_where_it_comes_from() -> None:
    flat = INTERNVL.flattened(tiny_vision_config("internvl"), "qwen3_moe")
    for is_frozen, rate, source in ((True, 0.0, "follows from policy.freeze.language_model"), (False, 1e-3, None)):
        policy = policy_of(1, freeze__language_model=is_frozen, **EXPERT_BIAS)
        config = build_transformer_config(policy, flat)
        assert config.moe_router_bias_update_rate == rate
        assert setting_sources(policy, flat, {}, config).get("moe_router_bias_update_rate") == source
