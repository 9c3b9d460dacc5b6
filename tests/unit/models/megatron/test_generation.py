# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation on one rank: the trainer's log-probabilities, transformers' tokens, ends, limits, and no trace left."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, SamplingParameters
from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, parallel_job, tiny_batch, tiny_policy
from tests.support.training_run import (
    PROMPT_LENGTHS,
    SAMPLING,
    build_trainer,
    evaluated_logprobs,
    generator_of,
    prompts,
    request_of,
    tiny_trainer,
)
from tests.unit.models.megatron.tiny_trainers import shard_for

LAYER_SPECS = ["local", "auto"]
ALL = tuple(range(len(PROMPT_LENGTHS)))
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "dense_layers": {"mlp_only_layers": [0, 2]},
    "softmax_first": {"norm_topk_prob": False},
}


def longest_logprob_difference(policy: PolicyConfig, model: dict[str, Any]) -> float:
    """Between generated tokens and an evaluation forward with the same temperature."""
    with tiny_trainer(policy, model) as trainer:
        sampling = dataclasses.replace(SAMPLING, temperature=1.0, top_k=9, top_p=0.9)
        sequences = generator_of(trainer).generate(request_of(ALL, sampling), weight_version=0)
        differences = [
            np.abs(evaluated_logprobs(trainer, prompt, sequence.token_ids).numpy() - sequence.logprobs).max()
            for prompt, sequence in zip(prompts(), sequences, strict=True)
        ]
        return float(max(differences))


@pytest.mark.parametrize(
    ("model", "layer_spec"),
    [
        # How the model is made does not depend on whose modules it is made of.
        pytest.param(model, spec, marks=pytest.mark.slow if spec == "local" and model != "plain" else ())
        for model in MODELS
        for spec in LAYER_SPECS
    ],
)
def test_logprobs_are_those_of_the_trainer(model: str, layer_spec: str) -> None:
    (difference,) = run_ranks(longest_logprob_difference, 1, tiny_policy(1, layer_spec=layer_spec), MODELS[model])
    # Largest seen: 1.2e-6.
    assert difference < 1e-5


def greedy_tokens(policy: PolicyConfig) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of this engine and of transformers with the exported weights."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with parallel_job(policy), tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(policy)
        request = request_of(ALL, SamplingParameters(max_new_tokens=12, temperature=0.0))
        sequences = generator_of(trainer).generate(request, weight_version=0)
        trainer.hf_config.save_pretrained(folder)
        weights = dict(tensors_of_this_rank(trainer.chunks, trainer.config, trainer.hf_config))
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, Path(folder, "model.safetensors"))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        pairs = []
        for prompt, sequence in zip(request.prompts, sequences, strict=True):
            inputs = torch.tensor([prompt])
            mask, number = torch.ones_like(inputs), {"max_new_tokens": 12, "min_new_tokens": 12}
            expected = model.generate(inputs, attention_mask=mask, do_sample=False, pad_token_id=0, **number)
            pairs.append((sequence.token_ids.tolist(), expected[0, len(prompt) :].tolist()))
        return pairs


@pytest.mark.parametrize("layer_spec", [slow("local"), "auto"])
def test_greedy_is_transformers_greedy(layer_spec: str) -> None:
    (pairs,) = run_ranks(greedy_tokens, 1, tiny_policy(1, layer_spec=layer_spec))
    for found, expected in pairs:
        assert found == expected


def responses_in_batches(policy: PolicyConfig) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Answer the same requests alone, together, in another order, and a few at a time."""
    with parallel_job(policy):
        engine = generator_of(build_trainer(policy))

        def made(sequences: list[GeneratedSequence]) -> list[tuple[list[int], list[float]]]:
            return [(sequence.token_ids.tolist(), sequence.logprobs.tolist()) for sequence in sequences]

        alone = [engine.generate(request_of([index]), weight_version=0)[0] for index in ALL]
        return {
            "together": made(engine.generate(request_of(ALL), weight_version=0)),
            "again": made(engine.generate(request_of(ALL), weight_version=0)),
            "backwards": made(engine.generate(request_of(ALL[::-1]), weight_version=0)[::-1]),
            "alone": made(alone),
            "two at a time": made(engine.generate(request_of(ALL), weight_version=0, max_batch_size=2)),
        }


@pytest.mark.parametrize("layer_spec", [slow("local"), "auto"])
def test_a_response_does_not_depend_on_the_batch(layer_spec: str) -> None:
    (found,) = run_ranks(responses_in_batches, 1, tiny_policy(1, layer_spec=layer_spec))
    together = found["together"]
    # Rows leave one after the other, so that the batch shrinks on its way.
    assert len({len(token_ids) for token_ids, _ in together}) > 2
    assert found["again"] == together
    for name, responses in found.items():
        assert [tokens for tokens, _ in responses] == [tokens for tokens, _ in together], name
        for (_, logprobs), (_, expected) in zip(responses, together, strict=True):
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=5e-6)


class LetterTokenizer:
    """A letter for each token."""

    def decode(self, token_ids: list[int], **_options: Any) -> str:
        return "".join(chr(48 + token) for token in token_ids)


def ended_responses(policy: PolicyConfig, strings: tuple[str, ...]) -> list[tuple[list[int], bool, int]]:
    with parallel_job(policy):
        engine = generator_of(build_trainer(policy), LetterTokenizer())
        sampling = SamplingParameters(max_new_tokens=11, temperature=0.8, stop_strings=strings)
        sequences = engine.generate(request_of(ALL, sampling), weight_version=6)
        return [(each.token_ids.tolist(), each.is_truncated, each.weight_version) for each in sequences]


def test_stop_strings_end_responses() -> None:
    policy = tiny_policy(1, layer_spec="auto")
    (free,) = run_ranks(ended_responses, 1, policy, ())
    assert all(truncated and len(token_ids) == 11 for token_ids, truncated, _ in free)
    decode = LetterTokenizer().decode
    wanted = decode(free[1][0][3:6])
    (ended,) = run_ranks(ended_responses, 1, policy, (wanted,))
    for (token_ids, truncated, version), (whole, _, _) in zip(ended, free, strict=True):
        place = decode(whole).find(wanted)
        assert token_ids == (whole if place < 0 else whole[: place + 3])
        assert truncated == (place < 0)
        assert version == 6
    assert len(ended[1][0]) == 6


FINE = SamplingParameters(max_new_tokens=4)
ONE_PROMPT = GenerationBatch(((1, 2),), (1,), FINE)


def changed_sampling(**changes: Any) -> GenerationBatch:
    return dataclasses.replace(ONE_PROMPT, sampling=dataclasses.replace(FINE, **changes))


REFUSED = [
    (GenerationBatch(((1,) * 29,), (1,), FINE), "33, more than the model's max_total_sequence_length 32"),
    (GenerationBatch(((1, 2), ()), (1, 2), FINE), "prompt 1 is empty"),
    (GenerationBatch(((1, 64),), (1,), FINE), "outside of 0 to 63"),
    (GenerationBatch(((1, 2),), (1, 2), FINE), "1 prompts and 2 seeds"),
    (GenerationBatch(((1, 2),), (-1,), FINE), "seed 0: got -1"),
    (changed_sampling(max_new_tokens=0), "max_new_tokens: got 0"),
    (changed_sampling(temperature=-1.0), "temperature: got -1.0"),
    (changed_sampling(top_k=0), "top_k: got 0"),
    (changed_sampling(top_p=0.0), "top_p: got 0.0"),
    (changed_sampling(top_p=1.1), "top_p: got 1.1"),
    (changed_sampling(stop_strings=("x",)), "need a tokenizer"),
]


def refuse_and_serve(policy: PolicyConfig) -> None:
    with parallel_job(policy):
        engine = generator_of(build_trainer(policy))
        for request, message in REFUSED:
            with pytest.raises(ValueError, match=message):
                engine.generate(request, weight_version=0)
        with pytest.raises(ValueError, match="max_batch_size: got 0"):
            engine.generate(ONE_PROMPT, weight_version=0, max_batch_size=0)
        # What just fits is served, and nothing at all is no error.
        longest = GenerationBatch(((1,) * 28,), (1,), FINE)
        assert len(engine.generate(longest, weight_version=0)[0].token_ids) == 4
        assert engine.generate(GenerationBatch((), (), FINE), weight_version=0) == []


def test_refuses_what_it_cannot_serve() -> None:
    run_ranks(refuse_and_serve, 1, tiny_policy(1, layer_spec="auto", max_total_sequence_length=32))


def trained_with_and_without(policy: PolicyConfig, generates: bool) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Two training steps, with generation and a broken request between them or without."""
    with tiny_trainer(policy) as trainer:
        reports: list[Any] = []
        for step in range(2):
            shard = shard_for(trainer, tiny_batch(100 + step))
            result = trainer.train([shard], sft_loss)
            reports.append((result.global_loss, result.grad_norm, sorted(result.moe_metrics.items())))
            if generates:
                sequence_parallel = trainer.config.sequence_parallel
                # As many slots as the next step's sequences have tokens: its rotary angles are made here.
                request = request_of(ALL, SamplingParameters(max_new_tokens=5))
                generator_of(trainer).generate(request, weight_version=step)
                assert trainer.config.sequence_parallel is sequence_parallel
                assert not any(chunk.returns_hidden_states for chunk in trainer.chunks)
        names = {piece.name: piece.local.numpy().copy() for piece in parameter_pieces(trainer.chunks, trainer.config)}
        return reports, names


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        slow(1, {"layer_spec": "auto"}),
        slow(1, {"layer_spec": "local"}),
        full(1, {"layer_spec": "auto", "moe_input_jitter_eps": 0.1}),
        (2, {"layer_spec": "auto", **layout(tp=2)}),
        slow(2, {"layer_spec": "auto", **layout(pp=2)}),
    ],
    ids=["auto", "local", "jitter", "tp2", "pp2"],
)
def test_training_does_not_notice(world_size: int, changes: dict[str, Any]) -> None:
    policy = tiny_policy(world_size, **changes)
    runs = [run_ranks(trained_with_and_without, world_size, policy, generates) for generates in (True, False)]
    for (with_it, weights), (without, expected) in zip(*runs, strict=True):
        assert with_it == without
        for name, values in expected.items():
            np.testing.assert_array_equal(weights[name], values, err_msg=name)


def leftovers(policy: PolicyConfig) -> None:
    """After an error in the middle of a forward pass the model is as it was, and can generate."""
    with tiny_trainer(policy) as trainer:
        engine = generator_of(trainer)
        expected = engine.generate(request_of(ALL), weight_version=0)
        chunk = trainer.chunks[0]
        before = {name: vars(module).get("sequence_parallel") for name, module in chunk.named_modules()}
        handle = chunk.output_layer.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(request_of(ALL), weight_version=0)
        handle.remove()
        assert {name: vars(module).get("sequence_parallel") for name, module in chunk.named_modules()} == before
        assert trainer.config.sequence_parallel == policy.megatron_cfg.sequence_parallel
        assert not chunk.returns_hidden_states
        assert not torch.is_inference_mode_enabled()
        # Angles that training keeps as well: tensors of inference mode could not be saved for a backward pass.
        assert not chunk.rotary_pos_emb(23, packed_seq=False, cp_group=None).is_inference()
        again = engine.generate(request_of(ALL), weight_version=0)
        assert [each.token_ids.tolist() for each in again] == [each.token_ids.tolist() for each in expected]


@pytest.mark.parametrize(
    ("world_size", "changes"), [full(1, {"layer_spec": "local"}), (1, {"layer_spec": "auto"}), full(2, layout(tp=2))]
)
def test_errors_leave_nothing_behind(world_size: int, changes: dict[str, Any]) -> None:
    run_ranks(leftovers, world_size, tiny_policy(world_size, **changes))
