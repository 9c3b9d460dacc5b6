# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Four training steps against transformers and torch's Adam: losses, gradients, weights and expert loads, packed,
padded and recomputed.
"""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.schema_policy import PolicyConfig
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_parity import LAYOUTS, Layout
from tests.support.family_training import (
    NUM_STEPS,
    SETTINGS,
    Rounding,
    TrainingRun,
    difference_of_changes,
    train_families,
    write_and_train_references,
)
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import listed
from tests.support.tiny_model import layout, tiny_policy

MODELS = [
    name
    for name, model in FAMILY_MODELS.items()
    if "moe_router_enable_expert_bias" in model.router_fields or name.startswith(("qwen3_next", "qwen3_5"))
]
# Relative. Largest seen: 1e-6, 3.5e-5 and 2.7e-5, all of DeepSeek-V3, whose rounding grows with each step.
LOSS, GRAD_NORM, CHANGE = 1e-5, 1e-4, 1e-4
ROUNDINGS = 8
"""With another chunk size transformers differs from itself, for gated delta nets or Mamba-2: so many times that is let
pass. One such difference is a sample of what grows from step to step: 4 times was seen on another processor."""
# One job trains all models of a layout.
FULL = {
    (name, "tp2_ep2_pp2", "packed")
    for name in (
        "deepseek_v3",
        "glm4_moe_norms_groups",
        "glm4_moe_lite",
        "minimax_m2",
        "glm_moe_dsa",
        "qwen3_next",
        "qwen3_5_moe_text",
        "nemotron_h",
        "deepseek_v32_sparse",
    )
} | {("glm_moe_dsa_sparse", "tp2_ep2_pp2", "recomputed")}


class TrainingJobs:
    """Runs each layout once, for all the models whose tests are selected."""

    def __init__(self, wanted: set[tuple[str, str, str]], root: Path):
        self._wanted, self._root = wanted, root
        self._names = sorted({name for name, _, _ in wanted})
        self._found: dict[tuple[str, str], dict[str, Any]] = {}

    def folder(self, name: str) -> Path:
        return self._root / "references" / name

    def exported(self, name: str, where: str, how: str) -> Path:
        return self._root / f"{where}_{how}" / name

    def reference(self, name: str) -> TrainingRun:
        if ("", "") not in self._found:
            arguments = self._names, str(self._root / "references"), tiny_policy(**SETTINGS)
            (self._found["", ""],) = run_ranks(write_and_train_references, 1, *arguments)
        return self._checked(self._found["", ""][name])

    def run(self, name: str, where: str, how: str) -> TrainingRun:
        self.reference(name)
        if (where, how) not in self._found:
            names = [other for other in self._names if (other, where, how) in self._wanted]
            folders = str(self._root / "references"), str(self._root / f"{where}_{how}")
            chosen = LAYOUTS[where]
            arguments = names, folders[0], policy_of(chosen, how), folders[1]
            self._found[where, how] = run_ranks(train_families, chosen.world_size, *arguments, timeout_s=240)[0]
        return self._checked(self._found[where, how][name])

    @staticmethod
    def _checked(found: Any) -> TrainingRun:
        assert isinstance(found, TrainingRun), found
        return found


def policy_of(chosen: Layout, how: str) -> PolicyConfig:
    changes = {**SETTINGS, **layout(**chosen.sizes), "sequence_packing__enabled": how == "packed"}
    if how == "recomputed":
        changes["activation_checkpointing"] = "full"
    return tiny_policy(chosen.world_size, layer_spec=chosen.layer_spec, **changes)


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainingJobs:
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = [chosen for chosen in parameters if chosen.keys() >= {"name", "where", "how"}]
    wanted = {(case["name"], case["where"], case["how"]) for case in cases}
    return TrainingJobs(wanted, tmp_path_factory.mktemp("training"))


@pytest.mark.parametrize(
    ("name", "where", "how"),
    listed(
        (
            (name, where, how)
            for where, chosen in LAYOUTS.items()
            for name in MODELS
            for how in ("padded", "packed", "recomputed")
            # Megatron-Core's own attention knows no packed sequences.
            if chosen.holds(FAMILY_MODELS[name]) and (how != "packed" or chosen.layer_spec != "local")
            # A choice of tokens passes from layer to layer.
            if how != "recomputed" or name.endswith("_sparse")
            if FAMILY_MODELS[name].has_experts or "ep" not in chosen.sizes
        ),
        quick=[("glm4_moe", "one_rank", "packed")],
        in_full=FULL,
    ),
)
def test_training_is_that_of_transformers(name: str, where: str, how: str, jobs: TrainingJobs) -> None:
    found, expected = jobs.run(name, where, how), jobs.reference(name)
    changed = difference_of_changes(jobs.exported(name, where, how), jobs.folder(name))
    floor, num_same = expected.rounding, found.num_same_loads(expected)
    print(f"{name}, {where}, {how}: largest difference of two changes {changed:.1e}; {found}, {expected}")
    # Rounding of gated delta nets turns a close choice in some runs.
    assert num_same >= (NUM_STEPS if floor == Rounding() else 2)
    losses, grad_norms = max(LOSS, ROUNDINGS * floor.loss), max(GRAD_NORM, ROUNDINGS * floor.grad_norm)
    assert found.losses[:num_same] == pytest.approx(expected.losses[:num_same], rel=losses)
    assert found.grad_norms[:num_same] == pytest.approx(expected.grad_norms[:num_same], rel=grad_norms)
    if num_same == NUM_STEPS:
        assert changed < max(CHANGE, ROUNDINGS * floor.change)
    assert expected.losses[-1] < 0.9 * expected.losses[0], "the steps are large enough to show differences"
