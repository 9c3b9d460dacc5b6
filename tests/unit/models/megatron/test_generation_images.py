# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation for prompts with images: transformers' tokens, the trainer's log-probabilities, batches and layouts."""

import dataclasses
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import ModelInput, TokenBatch
from nemo_rl_moe.distributed.shared_arrays import ArrayStore
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, SamplingParameters
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.images import IS_IMAGE
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, listed, slow
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import build_trainer
from tests.support.vision_models import (
    IMAGE,
    MODELS,
    Part,
    inputs_of_row,
    random_image,
    transformers_inputs,
    vision_batch,
    write_vision_model,
)

STOPS = tuple(range(5, 45, 3))
GREEDY = SamplingParameters(max_new_tokens=14, temperature=0.0, stop_token_ids=STOPS)


def rows_of(model_type: str) -> list[list[Part]]:
    """Prompts with no image, one, two, and one that others have as well; of other lengths and sizes."""
    square = model_type == "internvl"  # one size for all of its tiles
    a, b, c = (
        random_image(2, 2, seed) if square else random_image(*size, seed)
        for seed, size in enumerate([(2, 2), (3, 2), (1, 4)])
    )
    return [[3, a, 5], [2, b, 3, a, 9], [11], [1, c, 2], [4, a, 1], [2, c, 20]]


def as_request(batch: TokenBatch, sampling: SamplingParameters = GREEDY) -> GenerationBatch:
    prompts, inputs = [], []
    for row, length in enumerate(batch.lengths.tolist()):
        one = batch.select([row])
        prompts.append(tuple(one.input_ids[0].tolist()))
        inputs.append(inputs_of_row(batch, row))
        assert len(prompts[-1]) == length
    return GenerationBatch(tuple(prompts), tuple(range(len(prompts))), sampling, tuple(inputs))


def trainer_of(policy: PolicyConfig, folder: Path) -> MegatronTrainer:
    return MegatronTrainer(policy, plain_config(load_hf_config(str(folder))), folder, num_steps=2)


def evaluated(trainer: MegatronTrainer, request: GenerationBatch, index: int, response: list[int]) -> np.ndarray:
    """Return the log-probabilities that an evaluation forward gives a response."""
    prompt = request.prompts[index]
    tokens = torch.tensor([[*prompt, *response]])
    batch = TokenBatch(
        tokens, torch.tensor([tokens.shape[1]]), torch.ones_like(tokens, dtype=torch.bool), ("one",)
    ).with_inputs([request.model_inputs[index]])
    return trainer.logprobs([batch])[0][0, len(prompt) :].numpy()


Made = list[tuple[list[int], list[float]]]


def made(sequences: list[GeneratedSequence]) -> Made:
    return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in sequences]


def compared(policy: PolicyConfig, model_type: str, folder: Path) -> dict[str, Any]:
    """Greedy tokens of this engine and of transformers; sampled ones, their log-probabilities, in several batches."""
    from transformers import AutoModelForImageTextToText

    with parallel_job(policy):
        write_vision_model(model_type, folder)
        trainer = trainer_of(policy, folder)
        batch = vision_batch(rows_of(model_type))
        request = as_request(batch)
        greedy = trainer.generate(request, None)
        reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        expected = []
        for row, length in enumerate(batch.lengths.tolist()):
            inputs = transformers_inputs(model_type, batch.select([row]))
            found = reference.generate(
                **inputs, do_sample=False, max_new_tokens=14, eos_token_id=list(STOPS), pad_token_id=0
            )
            expected.append(found[0, length:].tolist())
        sampled_request = as_request(batch, dataclasses.replace(GREEDY, temperature=1.0))
        sampled = trainer.generate(sampled_request, None)
        scored = [evaluated(trainer, sampled_request, row, tokens) for row, (tokens, _) in enumerate(made(sampled))]
        backwards = GenerationBatch(
            sampled_request.prompts[::-1],
            sampled_request.seeds[::-1],
            sampled_request.sampling,
            sampled_request.model_inputs[::-1],
        )
        return {
            "greedy": [tokens for tokens, _ in made(greedy)],
            "expected": expected,
            "sampled": made(sampled),
            "scored": scored,
            "alone": [made(trainer.generate(sampled_request.share(row, 99), None))[0] for row in range(len(batch))],
            "backwards": made(trainer.generate(backwards, None))[::-1],
            "two at a time": made(trainer.generate(sampled_request, 2)),
            # Each prompt twice in a batch, which computes it once.
            "in a group": made(trainer.generate(twice(sampled_request), None))[len(batch) :],
        }


def twice(request: GenerationBatch) -> GenerationBatch:
    """Return the request with a second copy of all prompts. The first copies have other seeds."""
    return GenerationBatch(
        request.prompts * 2,
        (*(seed + 50 for seed in request.seeds), *request.seeds),
        request.sampling,
        request.model_inputs * 2,
    )


@cache
def one_rank(model_type: str, layer_spec: str, folder: Path) -> dict[str, Any]:
    """Made once."""
    return run_ranks(compared, 1, tiny_policy(1, layer_spec=layer_spec), model_type, folder)[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {model_type: tmp_path_factory.mktemp(model_type) for model_type in MODELS}


CASES = listed(
    product(MODELS, ("auto", "local")),
    quick=[("qwen3_vl_moe", "auto")],
    in_full=[("qwen2_5_vl", "local"), *((model_type, "auto") for model_type in MODELS)],
)


@pytest.mark.parametrize(("model_type", "layer_spec"), CASES)
def test_greedy_is_transformers_greedy(model_type: str, layer_spec: str, folders: dict[str, Path]) -> None:
    found = one_rank(model_type, layer_spec, folders[model_type])
    assert found["greedy"] == found["expected"]
    # Rows leave one after the other, so that batches shrink on their way.
    assert len({len(tokens) for tokens, _ in found["sampled"]}) > 1


@pytest.mark.parametrize(("model_type", "layer_spec"), CASES)
def test_logprobs_are_those_of_the_trainer(model_type: str, layer_spec: str, folders: dict[str, Path]) -> None:
    found = one_rank(model_type, layer_spec, folders[model_type])
    for (_, logprobs), scored in zip(found["sampled"], found["scored"], strict=True):
        np.testing.assert_allclose(logprobs, scored, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model_type", "layer_spec"), CASES)
@pytest.mark.parametrize("other", [full("alone"), "backwards", full("two at a time"), "in a group"])
def test_a_response_does_not_depend_on_the_batch(
    model_type: str, layer_spec: str, other: str, folders: dict[str, Path]
) -> None:
    found = one_rank(model_type, layer_spec, folders[model_type])
    assert_same(found[other], found["sampled"])


def assert_same(found: Made, expected: Made) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_allclose(logprobs, others, rtol=0, atol=1e-5)


def sampled_in_layout(policy: PolicyConfig, model_type: str, folder: Path) -> Made:
    with parallel_job(policy):
        trainer = trainer_of(policy, folder)
        place = trainer.coordinates
        request = as_request(vision_batch(rows_of(model_type)), dataclasses.replace(GREEDY, temperature=1.0))
        mine = request.with_shared_in(ArrayStore(lambda array: array)).share(
            place.data_parallel_rank, place.data_parallel_size
        )
        # As a worker does it: pixels stay in the store where there is no tower.
        return made(trainer.generate(mine.fetched(list) if trainer.has_tower else mine, 4))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        full("qwen2_5_vl", "tp2"),
        full("internvl", "ep2"),
        # A state of earlier tokens, on each rank of its heads.
        ("qwen3_5_moe", "tp2"),
        *(slow("qwen3_5_moe", name) for name in ("pp2", "ep2")),
        # Features that go to the first layers, where the second stage has none.
        ("qwen3_vl_moe", "pp2"),
        *(slow(model_type, "pp2") for model_type in ("qwen2_5_vl", "internvl")),
        slow("internvl", "tp2"),
        *(slow("qwen3_vl_moe", name) for name in ("tp2", "ep2")),
    ],
)
def test_layout_generates_as_one_rank_does(model_type: str, name: str, folders: dict[str, Path]) -> None:
    expected = one_rank(model_type, "auto", folders[model_type])["sampled"]
    changes = layout(**{name[:2]: 2})
    by_rank = run_ranks(sampled_in_layout, 2, tiny_policy(2, **changes), model_type, folders[model_type])
    if name == "ep2":
        found = [by_rank[row % 2][row // 2] for row in range(len(expected))]
    else:
        (found,) = [each for each in by_rank if each]
    assert_same(found, expected)


REFUSED = {
    "has 3 image tokens, expected 4": lambda inputs: {**inputs, IS_IMAGE: without_last(inputs[IS_IMAGE])},
    "has the inputs is_image, expected image_ids, image_sizes, is_image, pixels": lambda inputs: {
        IS_IMAGE: inputs[IS_IMAGE]
    },
    "has pixels or image_ids that do not match its 1 image_sizes": lambda inputs: {
        **inputs,
        "pixels": dataclasses.replace(inputs["pixels"], values=(inputs["pixels"].values[0][3:],)),
    },
    "has 13 tokens, but is_image describes 14": lambda inputs: {
        **inputs,
        IS_IMAGE: dataclasses.replace(inputs[IS_IMAGE], values=np.append(inputs[IS_IMAGE].values, False)),
    },
}


def without_last(is_image: ModelInput) -> ModelInput:
    values = is_image.values.copy()
    values[values.nonzero()[0][-1]] = False
    return dataclasses.replace(is_image, values=values)


def refuse(policy: PolicyConfig, folder: Path | None) -> None:
    request = as_request(vision_batch([[2, random_image(2, 2, 0), 5]]))
    assert request.prompts[0].count(IMAGE) == 4
    with parallel_job(policy):
        if folder is None:
            with pytest.raises(ValueError, match=r"prompt 0 has other inputs .* the model takes text alone"):
                build_trainer(policy).generate(request, None)
            return
        trainer = trainer_of(policy, folder)
        for message, change in REFUSED.items():
            with pytest.raises(ValueError, match=f"prompt 0 {message}"):
                trainer.generate(dataclasses.replace(request, model_inputs=(change(request.model_inputs[0]),)), None)
        # The image token itself is a token as any other where no image is meant.
        text = dataclasses.replace(request, model_inputs=())
        assert (
            trainer.generate(text, None)[0].token_ids.tolist() != trainer.generate(request, None)[0].token_ids.tolist()
        )


def test_refuses_what_is_not_there(folders: dict[str, Path]) -> None:
    folder = folders["qwen2_5_vl"]
    one_rank("qwen2_5_vl", "auto", folder)  # writes it
    run_ranks(refuse, 1, tiny_policy(1), folder)
    run_ranks(refuse, 1, tiny_policy(1), None)
