# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every metric of the first five steps is what it was: `tests/golden_curves.json` holds what earlier code gave.

A change that is meant to give other numbers writes the file anew with `tests/make_golden_curves.py`, in a commit that
says why. On one machine the numbers are equal to the bit; the tolerance is for the rounding of other processors.
"""

import json
from pathlib import Path

import pytest

from tests.functional import shared_ray
from tests.support.golden_runs import ALGORITHMS, REWARD, curves_of, golden_words

pytestmark = pytest.mark.shared_ray


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_five_steps_give_the_kept_metrics(algorithm: str, tmp_path: Path, repository_root: Path) -> None:
    golden = json.loads((repository_root / "tests/golden_curves.json").read_text())[algorithm]
    words = golden_words(algorithm, tmp_path, repository_root)
    if algorithm == "grpo":
        words.append(f"env.callable.function={REWARD}")
    done = shared_ray.run_here(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = curves_of(tmp_path)
    assert found.keys() == golden.keys()
    for step, metrics in golden.items():
        assert found[step].keys() == metrics.keys(), f"step {step}"
        # A loss of GRPO is a difference of nearly equal sums: its absolute error is what rounding bounds.
        assert found[step] == pytest.approx(metrics, rel=1e-6, abs=1e-8), f"step {step}"
    changed = [name for step in golden for name, value in golden[step].items() if found[step][name] != value]
    print(f"{algorithm}: {len(changed)} of {sum(map(len, golden.values()))} values differ in their last bits")
