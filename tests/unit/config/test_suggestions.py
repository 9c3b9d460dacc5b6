# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Suggestions: near spellings alone, and the counterparts of other frameworks' names."""

from collections.abc import Callable

import pytest

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.loading import load_config, load_dpo_config, load_grpo_config
from nemo_rl_moe.config.other_frameworks import counterparts
from nemo_rl_moe.config.suggestions import edits, nearest
from nemo_rl_moe.config.validation import known_keys
from nemo_rl_moe.errors import ConfigurationError


@pytest.mark.parametrize(
    ("first", "second", "number"),
    [("", "", 0), ("abc", "", 3), ("abc", "acb", 1), ("cispo", "csipo", 1), ("kitten", "sitting", 3), ("ca", "abc", 3)],
)
def test_edits(first: str, second: str, number: int) -> None:
    assert edits(first, second) == edits(second, first) == number


@pytest.mark.parametrize(
    ("wrong", "allowed", "meant"),
    [
        ("cipso", ["clipped", "cispo", "reinforce"], "cispo"),
        ("sapo", ["clipped", "cispo", "reinforce"], None),
        ("simpo", ["sigmoid", "robust", "hinge", "ipo"], None),
        ("kto", ["ipo", "hinge"], None),
        ("gspo", ["grpo", "gae"], None),
        ("gpro", ["grpo", "gae"], "grpo"),
        ("hinged", ["hinge", "ipo"], "hinge"),
        ("max_steps", ["max_num_steps", "val_period"], "max_num_steps"),
        ("constant", ["cosine", "linear"], None),
    ],
)
def test_near_spellings(wrong: str, allowed: list[str], meant: str | None) -> None:
    assert nearest(wrong, allowed) == meant


@pytest.mark.parametrize(
    ("load", "config", "override", "line"),
    [
        (
            load_grpo_config,
            "grpo_tiny_moe.yaml",
            "+grpo.beta=0.04",
            "grpo.beta: unknown key; TRL's beta is loss_fn.reference_policy_kl_penalty here",
        ),
        (
            load_dpo_config,
            "dpo_tiny_moe.yaml",
            "dpo.beta=0.04",
            "dpo.beta: unknown key; TRL's beta is dpo.reference_policy_kl_penalty here",
        ),
        (
            load_config,
            "sft_tiny_moe.yaml",
            "+sft.learning_rate=1",
            "sft.learning_rate: unknown key; TRL's learning_rate is policy.megatron_cfg.optimizer.lr here",
        ),
        (
            load_config,
            "sft_tiny_moe.yaml",
            "+policy.megatron_cfg.router_aux_loss_coef=0.1",
            "policy.megatron_cfg.router_aux_loss_coef: unknown key; TRL's router_aux_loss_coef is"
            " policy.megatron_cfg.moe_aux_loss_coeff here",
        ),
        (
            load_grpo_config,
            "grpo_tiny_moe.yaml",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n: unknown key; verl's actor_rollout_ref.rollout.n is"
            " grpo.num_generations_per_prompt here",
        ),
    ],
)
def test_names_of_other_frameworks(load: Callable[..., object], config: str, override: str, line: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(config, [override], check_paths=False)
    assert line in error.value.problems


@pytest.mark.parametrize(
    ("load", "config", "override", "refused"),
    [
        (load_grpo_config, "grpo_tiny_moe.yaml", "loss_fn.objective=sapo", "cispo?"),
        (load_dpo_config, "dpo_tiny_moe.yaml", "dpo.preference_loss_type=simpo", "ipo?"),
        (load_config, "sft_tiny_moe.yaml", "+policy.megatron_cfg.optimizer.name=muon", "tokenizer"),
    ],
)
def test_another_algorithm_is_no_typing_error(
    load: Callable[..., object], config: str, override: str, refused: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(config, [override], check_paths=False)
    (problem,) = error.value.problems
    assert "did you mean" not in problem
    assert refused not in problem


def test_the_counterparts_are_there() -> None:
    known = {key for algorithm in ALGORITHMS.values() for key in known_keys(algorithm.config_class)}
    rows = [row for tables in counterparts().values() for table in tables for row in table.items()]
    assert {ours for _, ours in rows} <= known
    assert not {theirs for theirs, _ in rows} & known
