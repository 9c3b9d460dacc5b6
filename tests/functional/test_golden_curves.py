# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every metric of the first steps is what it was: `tests/golden_curves.json` holds what earlier code gave.

A change that is meant to give other numbers writes the file anew with `tests/make_golden_curves.py`, in a commit that
says why. On one machine the numbers are equal to the bit; the tolerances are for the rounding of other processors. Adam
makes it larger: where a gradient is nearly 0, its first updates are as large as anywhere.
"""

import json
from pathlib import Path

import pytest

from tests.functional import shared_ray
from tests.support.golden_runs import RUNS, curves_of, golden_words

pytestmark = pytest.mark.shared_ray

BEFORE_UPDATES, AFTER_UPDATES = 1e-6, 3e-4
"""Relative. Seen between two kinds of processors: 1.5e-7 up to the first update, 6.4e-5 behind it."""
ABSOLUTE = {
    "sampling_logp_difference": 2e-6,
    "kl_error": 1e-12,
    "js_divergence_error": 1e-12,
    "clipped_fraction": 0.01,
    "": 5e-6,
}
"""By parts of names, of differences of nearly equal numbers, GRPO's loss say: their rounding is that of the numbers.
One token in a hundred may cross a clipping bound."""
TIE = 1e-6
"""A reward margin below this is rounding, and so is which response counts as preferred."""


def absolute_of(name: str) -> float:
    """Tolerance of a metric."""
    return next(tolerance for part, tolerance in ABSOLUTE.items() if part in name)


SHARED_PREFIXES = ["policy.shared_prefix=true"]
"""Computes common prefixes once, which must change nothing but rounding."""


@pytest.mark.parametrize("changes", [pytest.param([], id=""), pytest.param(SHARED_PREFIXES, id="shared_prefixes")])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "grpo" else pytest.mark.full) for name in RUNS]
)
def test_each_step_gives_the_kept_metrics(name: str, changes: list[str], tmp_path: Path, repository_root: Path) -> None:
    golden = json.loads((repository_root / "tests/golden_curves.json").read_text())[name]
    words = golden_words(name, tmp_path, repository_root) + changes
    shared_ray.run_here(words, tmp_path)
    found = curves_of(tmp_path)
    assert found.keys() == golden.keys()
    for step, metrics in golden.items():
        assert found[step].keys() == metrics.keys(), f"step {step}"
        # A step of rollouts is several updates, and its metrics are of all of them.
        relative = BEFORE_UPDATES if int(step) < (2 if name in ("sft", "dpo", "rm") else 1) else AFTER_UPDATES
        tied = {
            f"{split}/accuracy" for split in ("train", "val") if abs(metrics.get(f"{split}/reward_margin", 1)) < TIE
        }
        wrong = {
            metric: (found[step][metric], value)
            for metric, value in metrics.items()
            if metric not in tied and found[step][metric] != pytest.approx(value, rel=relative, abs=absolute_of(metric))
        }
        assert not wrong, f"step {step}"
    changed = [metric for step in golden for metric, value in golden[step].items() if found[step][metric] != value]
    print(f"{name}: {len(changed)} of {sum(map(len, golden.values()))} values differ in their last bits")
