# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Six runs of combined features, with most of the pairs that `make test-pairs` has in forty."""

from pathlib import Path

import pytest

from nemo_rl_moe.generation.vllm.releases import installed_release
from tests.functional.pairs.cases import OF_EACH_CHANGE, WITH_VLLM, Case
from tests.functional.pairs.runs import faults_of
from tests.functional.pairs.settings import Inputs

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs.made(tmp_path_factory.mktemp("pairs") / "inputs")


LONG = {"agent", "mixture", "several-sequences"}
CASES = [pytest.param(each, marks=[pytest.mark.slow] * (each.name in LONG), id=each.name) for each in OF_EACH_CHANGE]


@pytest.mark.parametrize("case", CASES)
def test_combined_features_train_validate_and_go_on(case: Case, inputs: Inputs, tmp_path: Path) -> None:
    assert faults_of(case, inputs, tmp_path) == []


@pytest.mark.vllm
@pytest.mark.skipif(installed_release() is None, reason="vLLM is not installed: make vllm")
@pytest.mark.parametrize("case", WITH_VLLM, ids=lambda case: case.name)
def test_adapters_train_validate_and_go_on_with_vllm(case: Case, inputs: Inputs, tmp_path: Path) -> None:
    assert faults_of(case, inputs, tmp_path) == []
