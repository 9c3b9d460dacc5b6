# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The refit check of a run: what it scores, how the weights are sent again, how a failure is explained."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.vllm.diagnosis import disagreement
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.weight_sync.refit_check import RefitCheck, Scores, ScoringEngine, probe_sequences


def make_refit_check(
    config: GRPOMasterConfig, policy: MegatronPolicy, engine: GenerationEngine, hf_config: Any, console: ConsoleLogger
) -> RefitCheck | None:
    """The check of an engine's weights; None where it shares the trainer's, or is not to be checked or cannot be."""
    generation = config.policy.generation
    chosen = generation.refit_check
    if engine.shares_weights or not chosen.enabled:
        return None
    if not isinstance(engine, ScoringEngine):
        console.warn(f"refits are not checked: the engine {generation.backend} cannot score given tokens")
        return None
    sequences = probe_sequences(chosen.num_sequences, chosen.num_tokens, hf_config.vocab_size)
    in_float32 = {config.policy.precision, getattr(engine, "dtype", config.policy.precision)} == {"float32"}

    def explain(copy: int) -> str:
        # A rank has parts of the outputs, and ranks on other machines write into folders of their own.
        if not isinstance(engine, VllmEngine) or engine.ranks_per_engine > 1 or config.cluster.num_nodes > 1:
            return ""
        try:
            with console.phase("comparing the engine's modules with those of transformers"):
                return disagreement(
                    partial(engine.module_outputs, copy),
                    policy.save_weights,
                    sequences,
                    in_float32=in_float32,
                    topk=getattr(hf_config, "num_experts_per_tok", None),
                )
        except Exception as error:  # the check's own error is what the user is to see
            return f"Which module differs cannot be said: {type(error).__name__}: {' '.join(str(error).split())[:300]}"

    return RefitCheck(
        sequences,
        generation.temperature,
        partial(start_scores, policy),
        lambda altered: refit(engine, policy, altered=altered),
        explain,
        in_float32=in_float32,
        bound_nats=chosen.max_logprob_gap,
        refits_again=chosen.on_failure == "refit",
    )


def start_scores(policy: MegatronPolicy, sequences: Sequence[Sequence[int]]) -> Callable[[], Scores]:
    """Has the trainer begin to score sequences of one length; the log-probs of all tokens but the first, waited for."""
    input_ids = torch.tensor(sequences)
    batch = TokenBatch(
        input_ids=input_ids,
        lengths=torch.full((len(sequences),), input_ids.shape[1]),
        token_mask=torch.ones_like(input_ids, dtype=torch.bool),
        sample_ids=("refit check",) * len(sequences),
    )
    logprobs = policy.start_logprobs(batch, by_one_copy=True)
    return lambda: [row[1:].numpy() for row in logprobs()]
