# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Suggestions: near spellings alone, and the counterparts of other frameworks' names."""

import pytest

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.loading import load_config, load_dpo_config, load_grpo_config
from nemo_rl_moe.config.other_frameworks import counterparts
from nemo_rl_moe.config.suggestions import edits, nearest
from nemo_rl_moe.config.validation import known_keys
from tests.unit.config.conftest import about_keys, problems_with


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


OF_OTHERS = {
    ("grpo", "+grpo.beta=0.04"): "unknown key; TRL's beta is loss_fn.reference_policy_kl_penalty here",
    ("dpo", "dpo.beta=0.04"): "unknown key; TRL's beta is dpo.reference_policy_kl_penalty here",
    ("sft", "+sft.learning_rate=1"): "unknown key; TRL's learning_rate is policy.megatron_cfg.optimizer.lr here",
    ("sft", "+policy.megatron_cfg.router_aux_loss_coef=0.1"): "unknown key; TRL's router_aux_loss_coef is"
    " policy.megatron_cfg.moe_aux_loss_coeff here",
    ("grpo", "actor_rollout_ref.rollout.n=8"): "unknown key; verl's actor_rollout_ref.rollout.n is"
    " grpo.num_generations_per_prompt here",
}
LOADERS = {"sft": load_config, "dpo": load_dpo_config, "grpo": load_grpo_config}


def problems(algorithm: str, override: str) -> list[str]:
    return problems_with(LOADERS[algorithm], f"{algorithm}_tiny_moe.yaml")(override)


@pytest.mark.parametrize(("algorithm", "override"), OF_OTHERS)
def test_names_of_other_frameworks(algorithm: str, override: str) -> None:
    ((_, line),) = about_keys({override: OF_OTHERS[algorithm, override]})
    assert line in problems(algorithm, override)


@pytest.mark.parametrize(
    ("algorithm", "override", "refused"),
    [
        ("grpo", "loss_fn.objective=vespo", "cispo?"),
        ("dpo", "dpo.preference_loss_type=simpo", "ipo?"),
        ("sft", "+policy.megatron_cfg.optimizer.name=muon", "tokenizer"),
    ],
)
def test_another_algorithm_is_no_typing_error(algorithm: str, override: str, refused: str) -> None:
    (problem,) = problems(algorithm, override)
    assert "did you mean" not in problem
    assert refused not in problem


def test_the_counterparts_are_there() -> None:
    known = {key for algorithm in ALGORITHMS.values() for key in known_keys(algorithm.config_class)}
    rows = [row for tables in counterparts().values() for table in tables for row in table.items()]
    assert {ours for _, ours in rows} <= known
    assert not {theirs for theirs, _ in rows} & known
