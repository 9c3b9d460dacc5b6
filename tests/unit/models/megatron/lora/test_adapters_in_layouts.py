# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters train in every layout as on one rank, are saved and read in any, and are all that trains and is saved."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import (
    LoraRun,
    assert_same_run,
    lora,
    resume_adapters,
    save_adapters,
    train_adapters,
    whole_factors,
)
from tests.support.quick_list import some_of
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings
from tests.unit.models.megatron.tiny_trainers import OVERLAP, PACKED, ZERO_1

MLA = "deepseek_v3"
SHARED_EXPERT = "qwen2_moe"
DELTA_NETS = "qwen3_5_moe_text"
BY_KEY_HEAD = "qwen3_next"
"""Behind its delta rule stands a norm of numbers near 0, which makes rounding large; see test_recurrent_models.py."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_pp2_ep2_zero1": (4, layout(tp=2, pp=2, ep=2) | ZERO_1),
    "tp2": (2, layout(tp=2)),
    "dp2_zero1_overlap": (2, ZERO_1 | OVERLAP),
    "ep2": (2, layout(ep=2)),
    "pp2": (2, layout(pp=2)),
    "pp2_vpp2": (2, layout(pp=2, vpp=2)),
    "tp2_etp2": (2, layout(tp=2, etp=2)),
    "tp2_ep2": (2, layout(tp=2, ep=2)),
    "tp2_ep2_dp2_zero1": (4, layout(tp=2, ep=2) | ZERO_1),
    "tp2_etp2_ep2": (4, layout(tp=2, etp=2, ep=2)),
}


def settings(model: Any, world_size: int, experts: str, changes: dict[str, Any]) -> RunSettings:
    targets = ("all-linear", "router")
    return RunSettings(tiny_policy(world_size, **{"layer_spec": "auto", **lora(experts, targets), **changes}), model)


@cache
def on_one_rank(model: str, experts: str, layer_spec: str = "auto") -> LoraRun:
    found = run_ranks(train_adapters, 1, settings(model or {}, 1, experts, {"layer_spec": layer_spec}))[0]
    assert isinstance(found, LoraRun)
    return found


CASES = [
    *((name, "", experts) for name in LAYOUTS for experts in ("per_expert", "shared")),
    ("tp2_ep2", MLA, "per_expert"),
    ("pp2_vpp2", MLA, "per_expert"),
    ("tp2_ep2", SHARED_EXPERT, "per_expert"),
    *((name, DELTA_NETS, "per_expert") for name in ("tp2", "pp2", "ep2", "tp2_pp2_ep2_zero1")),
    *((name, BY_KEY_HEAD, "shared") for name in ("tp2", "tp2_pp2_ep2_zero1")),
]


@pytest.mark.parametrize(("name", "model", "experts"), some_of(CASES, 3))
def test_layout_trains_as_one_rank_does(name: str, model: str, experts: str) -> None:
    world_size, changes = LAYOUTS[name]
    runs = run_ranks(train_adapters, world_size, settings(model or {}, world_size, experts, changes))
    # The second step enlarges rounding: packed rows on one rank differ by up to 4e-5 from padded ones.
    assert_same_run(runs, on_one_rank(model, experts), 2e-4 if model == BY_KEY_HEAD else 5e-6)


@pytest.mark.parametrize(
    ("model", "world_size", "changes"),
    some_of(
        [
            ("", 1, {"activation_checkpointing": "full"}),
            ("", 1, {"activation_checkpointing": "moe"}),
            ("", 1, PACKED),
            ("", 1, {"layer_spec": "local"}),
            ("", 2, {"activation_checkpointing": "full", **layout(tp=2)}),
            ("", 2, {**PACKED, **layout(ep=2)}),
            ("", 2, {"layer_spec": "local", **layout(tp=2, ep=2)}),
            (DELTA_NETS, 1, {"activation_checkpointing": "full"}),
            (DELTA_NETS, 2, {**PACKED, **layout(tp=2)}),
            (DELTA_NETS, 2, {"layer_spec": "local", "activation_checkpointing": "full", **layout(tp=2)}),
        ],
        3,
    ),
    ids=str,
)
def test_recomputed_packed_and_plain_train_alike(model: str, world_size: int, changes: dict[str, Any]) -> None:
    runs = run_ranks(train_adapters, world_size, settings(model or {}, world_size, "per_expert", changes))
    assert_same_run(runs, on_one_rank(model, "per_expert"))


def test_adapters_alone_train() -> None:
    run = on_one_rank("", "per_expert")
    assert run.num_trained == sum(values.size for values in whole_factors([run.factors]).values())


@pytest.mark.parametrize(
    ("writer", "reader", "model"),
    some_of(
        [
            ("tp2_pp2_ep2_zero1", "one", ""),
            ("one", "tp2_ep2_dp2_zero1", ""),
            ("ep2", "pp2_vpp2", ""),
            ("tp2_etp2", "ep2", ""),
            ("one", "tp2", DELTA_NETS),
            ("tp2_pp2_ep2_zero1", "one", DELTA_NETS),
        ],
        2,
    ),
)
def test_checkpoint_of_adapters_in_other_layouts(writer: str, reader: str, model: str, tmp_path: Path) -> None:
    layouts = {**LAYOUTS, "one": (1, {})}
    (size, changes), (other_size, other_changes) = layouts[writer], layouts[reader]
    saved = run_ranks(save_adapters, size, settings(model or {}, size, "shared", changes), str(tmp_path))
    chosen = settings(model or {}, other_size, "shared", other_changes)
    read = run_ranks(resume_adapters, other_size, chosen, str(tmp_path))
    everything = [piece for run in saved for piece in run.factors]
    assert_same_run(read, replace(saved[0], factors=everything))


def test_checkpoint_resumes_to_the_bit_and_holds_adapters_alone(tmp_path: Path) -> None:
    chosen = settings({}, 2, "per_expert", layout(ep=2) | ZERO_1)
    saved = run_ranks(save_adapters, 2, chosen, str(tmp_path))
    read = run_ranks(resume_adapters, 2, chosen, str(tmp_path))
    assert [(run.losses, run.grad_norms) for run in read] == [(run.losses, run.grad_norms) for run in saved]
    found, wanted = (whole_factors([run.factors for run in runs]) for runs in (read, saved))
    assert all((found[name] == wanted[name]).all() for name in wanted)
    names = run_ranks(names_of_checkpoint, 1, str(tmp_path))[0]
    tensors = [name for name in names if not name.startswith(("optimizer.", "trainer.", "random."))]
    assert tensors
    assert all(name.startswith("base_model.model.") and ".lora_" in name for name in tensors)
    assert all(".lora_" in name for name in names if name.startswith("optimizer.state."))


def names_of_checkpoint(folder: str) -> list[str]:
    from nemo_rl_moe.models.megatron.checkpoint.index import check_folder

    return list(check_folder(Path(folder))[0].state_dict_metadata)
