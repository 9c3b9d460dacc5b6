# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests on their way to the ranks: who shares a batch, which rank gets what, and images that travel once."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray import cloudpickle

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import make_trainer_engine
from nemo_rl_moe.models.images import ModelImage, image_inputs, images_in
from tests.support.scripted_rollouts import generate_all

SAMPLING = SamplingParameters(max_new_tokens=2)


def random_inputs(seed: int, height: int = 32) -> dict[str, ModelInput]:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, 32, 3), dtype=np.uint8)
    return image_inputs([ModelImage(pixels)], np.array([False, True, True]))


def request(number: int, model_inputs: Mapping[str, ModelInput], max_new_tokens: int = 2) -> GenerationRequest:
    sampling = SamplingParameters(max_new_tokens=max_new_tokens)
    return GenerationRequest((1, 7, 7), number, sampling, dict(model_inputs))


def test_each_prompt_keeps_its_inputs() -> None:
    of_prompts = [random_inputs(0), random_inputs(1), {}]
    batch = GenerationBatch.of([request(number, inputs) for number, inputs in enumerate(of_prompts)])
    shares = [batch.share(rank, 2) for rank in range(2)]
    assert [share.seeds for share in shares] == [(0, 2), (1,)]
    for share in shares:
        for seed, inputs in zip(share.seeds, share.model_inputs, strict=True):
            found, expected = ([image.digest for image in images_in(each)] for each in (inputs, of_prompts[seed]))
            assert found == expected
    assert batch.share(3, 4) == GenerationBatch((), (), SAMPLING)


def test_text_carries_nothing() -> None:
    assert GenerationBatch.of([request(0, {}), request(1, {})]).model_inputs == ()


def test_a_image_travels_once_for_all_responses_to_its_prompt() -> None:
    inputs = random_inputs(0, height=512)
    num_bytes = inputs["pixels"].values[0].nbytes
    batches = [GenerationBatch.of([request(number, inputs) for number in range(count)]) for count in (1, 16)]
    sizes = [len(cloudpickle.dumps(batch)) for batch in batches]
    assert num_bytes < sizes[0] < sizes[1] < num_bytes + 20_000


class RememberingPolicy:
    """Answers with a prompt's seed, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[GenerationBatch] = []

    def generate(self, batch: GenerationBatch) -> Sequence[GeneratedSequence]:
        self.asked.append(batch)
        return [GeneratedSequence(np.array([seed]), np.zeros(1, np.float32), False, 0) for seed in batch.seeds]


def test_the_trainers_engine_hands_inputs_on() -> None:
    policy: Any = RememberingPolicy()
    setup: Any = SimpleNamespace(policy=policy)
    engine = make_trainer_engine(setup)
    requests = [request(0, random_inputs(0)), request(1, {}, max_new_tokens=3), request(2, random_inputs(2))]
    found = dict(generate_all(engine, requests))
    assert {index: sequence.token_ids.tolist() for index, sequence in found.items()} == {0: [0], 1: [1], 2: [2]}
    assert [[len(inputs) for inputs in batch.model_inputs] for batch in policy.asked] == [[4, 4], []]
