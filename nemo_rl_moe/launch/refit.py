# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The refit check of a run: the sequences whose scores are compared, how a refit is repeated, and how a failure is
explained."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.batch import ModelInput, TokenBatch
from nemo_rl_moe.generation.diagnosis import disagreement
from nemo_rl_moe.generation.interface import GenerationEngine, Scores
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.refit_check import (
    FLOAT32_BOUND,
    RefitCheck,
    gap_between,
    probe_sequences,
)
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.images import ModelImage, image_inputs
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.weight_sync.fingerprints import common_format

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

PROBE_OF_TEXT = 16
"""Number of tokens of a sequence without images. Its scores show whether vision tower or decoder have wrong weights."""


def make_refit_check(
    config: GRPOMasterConfig, policy: "MegatronPolicy", engine: GenerationEngine, hf_config: Any, console: ConsoleLogger
) -> RefitCheck | None:
    """Return the check of an engine's weights, or None if the check is off or the engine shares the trainer's
    weights."""
    generation = config.policy.generation
    chosen = generation.refit_check
    if engine.shares_weights or not chosen.enabled:
        return None
    if not engine.can_score:
        console.warn(f"refits are not checked: the engine {generation.backend} cannot score given tokens")
        return None
    longest = config.policy.max_total_sequence_length - 1  # an engine samples one more token
    sequences = probe_sequences(chosen.num_sequences, chosen.num_tokens, hf_config.vocab_size)
    probes = [image_probe(sequence, hf_config, longest, n) for n, sequence in enumerate(sequences)]
    sequences, inputs = [list(ids) for ids, _ in probes], [found for _, found in probes if found]
    engines_format = engine.number_format or config.policy.precision
    in_float32 = {config.policy.precision, engines_format} == {"float32"}

    def explain(copy: int) -> str:
        if not engine.gives_module_outputs or config.cluster.num_nodes > 1:  # others cannot read its folders
            return ""
        if inputs and not in_float32:  # rounding would hide the difference
            return ""
        try:
            if inputs:
                return explain_by_text(policy, engine, copy, generation.temperature, chosen.num_sequences, hf_config)
            with console.phase("comparing the engine's modules with those of transformers"):
                return disagreement(
                    partial(engine.module_outputs, copy),
                    policy.save_weights,
                    sequences,
                    in_float32=in_float32,
                    topk=getattr(hf_config, "num_experts_per_tok", None),
                )
        except Exception as error:  # the user must still see the check's own error
            return (
                f"The module that differs could not be found: {type(error).__name__}:"
                f" {' '.join(str(error).split())[:300]}"
            )

    return RefitCheck(
        sequences,
        generation.temperature,
        partial(start_scores, policy, model_inputs=inputs),
        lambda altered: refit(engine, policy, altered=altered),
        explain,
        in_float32=in_float32,
        bound_nats=chosen.max_logprob_gap,
        refits_again=chosen.on_failure == "refit",
        model_inputs=inputs,
        start_fingerprints=policy.start_fingerprints if engine.gives_fingerprints else None,
        number_format=common_format(config.policy.precision, engines_format),
        probe_adapters=policy.probe_adapters if config.policy.lora is not None else None,
        repeats_bits=engine.repeats_bits,
        refit_whole=lambda: refit(engine, policy, whole=True),
    )


def image_probe(
    sequence: Sequence[int], hf_config: Any, longest: int, seed: int
) -> tuple[Sequence[int], dict[str, ModelInput]]:
    """Return a sequence with an image of noise inserted, and the image as model input, so that vision tower and
    projector are checked too.

    Args:
        hf_config: The model's configuration. For a text-only model, the sequence is returned unchanged.
        longest: Maximum number of tokens. A longer sequence is cut.
    """
    vision = family_of(hf_config).vision
    if vision is None:
        return sequence, {}
    tile = getattr(hf_config.vision_config, "image_size", None)
    side = vision.pixels_per_token(hf_config)
    height, width = (tile if isinstance(tile, list | tuple) else (tile, tile)) if tile else (2 * side, 3 * side)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    count = vision.num_image_tokens(hf_config, height, width)
    ids = [*sequence[:1], *[hf_config.image_token_id] * count, *sequence[1:]][:longest]
    if len(ids) < count + 2:  # the image does not fit, and it would fit into no prompt either
        return sequence, image_inputs([], np.zeros(len(sequence), dtype=np.bool_))
    positions = np.arange(len(ids))
    return ids, image_inputs([ModelImage(pixels)], (positions > 0) & (positions <= count))


def explain_by_text(
    policy: "MegatronPolicy", engine: GenerationEngine, copy: int, temperature: float, count: int, hf_config: Any
) -> str:
    """Return a sentence that states whether the vision part or the decoder has differing weights.

    It compares the scores of sequences without images, which only the decoder computes.
    """
    sequences = probe_sequences(count, PROBE_OF_TEXT, hf_config.vocab_size)
    none = image_inputs([], np.zeros(PROBE_OF_TEXT, dtype=np.bool_))
    expected = start_scores(policy, sequences, model_inputs=[none] * count)()
    gap = gap_between(engine.score(sequences, temperature)[copy], expected)
    if gap.largest <= FLOAT32_BOUND:
        return "Without images, log-probs agree: weights of the vision tower or of its projector are not the trainer's."
    return (
        f"Without images, log-probs differ too ({gap.largest:.2g} nats): weights of the decoder are not the trainer's."
    )


def start_scores(
    policy: "MegatronPolicy",
    sequences: Sequence[Sequence[int]],
    *,
    model_inputs: Sequence[Mapping[str, ModelInput]] = (),
) -> Callable[[], Scores]:
    """Start to compute log-probabilities of sequences of equal length with the trainer. Return a function that waits
    for them. The first token of a sequence has no score."""
    logprobs = policy.start_logprobs(batch_of(sequences, model_inputs), by_one_copy=True)
    return lambda: [row[1:].numpy() for row in logprobs()]


def batch_of(sequences: Sequence[Sequence[int]], model_inputs: Sequence[Mapping[str, ModelInput]] = ()) -> TokenBatch:
    """Return sequences of equal length as a batch for the trainer, with their images."""
    input_ids = torch.tensor(sequences)
    batch = TokenBatch(
        input_ids=input_ids,
        lengths=torch.full((len(sequences),), input_ids.shape[1]),
        token_mask=torch.ones_like(input_ids, dtype=torch.bool),
        sample_ids=("refit check",) * len(sequences),
    )
    return batch.with_inputs(model_inputs) if model_inputs else batch
