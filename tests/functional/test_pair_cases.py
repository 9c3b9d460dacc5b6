# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The cases of combined features have all pairs but the refused ones, which the product refuses in the listed words."""

from collections import Counter
from pathlib import Path

import pytest

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.loading import load_config_as
from nemo_rl_moe.errors import ConfigurationError
from tests.functional.pairs.__main__ import Result, table
from tests.functional.pairs.cases import (
    OF_EACH_CHANGE,
    TRIPLES,
    WITH_VLLM,
    all_cases,
    covering_array,
    pairs_of,
    possible_pairs,
)
from tests.functional.pairs.refusals import REFUSALS, Refusal, refused
from tests.functional.pairs.settings import PARAMETERS, SIMPLEST, Inputs, Setting, words

SEED = 0


def problems_of(setting: Setting) -> list[str]:
    """Return what the product says of a configuration; its files are not looked for."""
    algorithm, _, exemplar, *overrides = words(setting, Inputs(Path("inputs")), Path("runs"), 3)
    try:
        load_config_as(ALGORITHMS[algorithm].config_class, exemplar, overrides, check_paths=False)
    except ConfigurationError as error:
        return error.problems
    return []


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: "-".join(refusal.values.values()))
def test_a_refused_combination_is_refused_in_these_words(refusal: Refusal) -> None:
    setting = {**SIMPLEST, **refusal.values}
    # Others where its values, or the simplest, make up another one of the list: each is said, and nothing else.
    expected = {each.error for each in REFUSALS if each.values.items() <= setting.items()}
    assert len(refusal.values) == 2
    assert refusal.error in expected
    assert set(problems_of(setting)) == expected


def test_no_case_is_refused() -> None:
    for case in (*all_cases(SEED), *WITH_VLLM):
        assert problems_of(case.setting) == [], case


@pytest.mark.parametrize("seed", range(4))
def test_the_array_has_every_pair_that_is_not_refused(seed: int) -> None:
    array = covering_array(seed)
    assert pairs_of(case.setting for case in array) == possible_pairs()
    assert all(refused(case.setting) is None for case in array)
    assert all(case.setting.keys() == PARAMETERS.keys() for case in array)
    # The largest two parameters have six and five values.
    assert 30 <= len(array) <= 45
    assert covering_array(seed) == array, "the same from the same seed"
    assert covering_array(seed + 1) != array


def test_possible_are_all_pairs_but_the_refused_ones() -> None:
    sizes = [len(values) for values in PARAMETERS.values()]
    num_pairs = (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
    assert len(possible_pairs()) == num_pairs - len(REFUSALS)


def test_the_six_have_the_triples_and_most_pairs() -> None:
    names = Counter(case.name for case in all_cases(SEED))
    assert set(names.values()) == {1}
    triples = [
        {"environment": "agent", "rollouts": "staleness_1", "validation": "on"},
        {"lora": "on", "layout": "tp2", "engine": "trainer"},
        {"replay": "rollout", "rollouts": "staleness_2"},
        {"environment": "tools", "validation": "on"},
    ]
    for cases in (OF_EACH_CHANGE, TRIPLES):
        for triple in triples:
            assert any(triple.items() <= case.setting.items() for case in cases), triple
    assert len(pairs_of(case.setting for case in OF_EACH_CHANGE)) > 0.59 * len(possible_pairs())


def test_the_table_says_what_has_failed() -> None:
    results = [Result("0-1", "ppo, tp2", (), 12.4), Result("tools", "", ("a", "b"), 100.0)]
    assert table(results).splitlines() == [
        "| case | settings | result | seconds |",
        "| --- | --- | --- | ---: |",
        "| 0-1 | ppo, tp2 | passed | 12 |",
        "| tools |  | failed (2) | 100 |",
    ]
