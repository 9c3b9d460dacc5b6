# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit of RouterReplay where a rank sees a part: virtual stages, stages without tokens, sequence parallelism."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.routing.hooks.router_replay import RouterReplayAudit
from tests.support.cpu_layers import build, layout, make_config, megatron_causal_mask, process_groups
from tests.support.gloo_ranks import run_ranks
from tests.unit.models.megatron.test_router_replay_hook import (
    BATCH,
    EXPERTS,
    LAYERS,
    MICROBATCHES,
    SEQUENCE,
    loss_of,
    microbatches,
)

# isort: split
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "virtual stages": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **RECOMPUTED},
    "a stage without tokens": {"pipeline_model_parallel_size": 2, **RECOMPUTED},
    "a stage without routers": {"pipeline_model_parallel_size": 2, "moe_layer_freq": [1, 1, 0, 0]},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, **RECOMPUTED},
}
WITHOUT_TOKENS = ("a stage without tokens", "a stage without routers")
FAULTS = ("none", "layer", "token", "sequence")
Capture = dict[tuple[int, int], torch.Tensor]


def run_schedule(chunks: list[Any], forward: Any, *, forward_only: bool) -> None:
    numbered = [batch | {"number": number} for number, batch in enumerate(microbatches())]
    iterators = [iter([dict(batch) for batch in numbered]) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


def instances_of(chunk: Any) -> list[int]:
    """Places of a chunk's routers among all of the rank."""
    replays = [layer.mlp.router.router_replay for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    return [RouterReplay.global_router_replay_instances.index(replay) for replay in replays]


def given(batch: dict[str, Any], chunk: Any, name: str) -> dict[str, Any]:
    if name in WITHOUT_TOKENS and not chunk.pre_process:
        batch["input_ids"] = batch["position_ids"] = None
    return batch


def recorded(chunks: list[Any], name: str) -> Capture:
    """The routers' own experts, by microbatch and router."""
    capture: Capture = {}

    def forward(batches: Any, chunk: Any) -> Any:
        batch = next(batches)
        number = batch.pop("number")
        output = chunk(**given(batch, chunk, name), attention_mask=megatron_causal_mask(SEQUENCE))
        for place in instances_of(chunk):
            capture[number, place] = RouterReplay.global_router_replay_instances[place].recorded_topk_idx.clone()
        return output, loss_of

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    run_schedule(chunks, forward, forward_only=True)
    RouterReplay.clear_global_indices()
    return capture


def spoiled(capture: Capture, fault: str, first: list[int]) -> Capture:
    """The capture with a fault; layers change places on the first stage."""
    if fault == "layer":
        one, other = first
        swapped = {one: other, other: one}
        return {(number, place): capture[number, swapped.get(place, place)] for number, place in capture}
    if fault == "token":
        return {key: routes.roll(BATCH, 0) for key, routes in capture.items()}
    if fault == "sequence":
        return {key: routes.view(-1, BATCH, 2).flip(1).reshape(-1, 2) for key, routes in capture.items()}
    return capture


def replay(chunks: list[Any], capture: Capture, name: str) -> None:
    def forward(batches: Any, chunk: Any) -> Any:
        batch = next(batches)
        number = batch.pop("number")
        for place in instances_of(chunk):
            RouterReplay.global_router_replay_instances[place].set_target_indices(capture[number, place])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = chunk(**given(batch, chunk, name), attention_mask=megatron_causal_mask(SEQUENCE))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return output, loss_of

    run_schedule(chunks, forward, forward_only=False)
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()


def audit_on_both(store: str, name: str) -> dict[str, dict[str, Any]]:
    """Runs on both ranks: what the audit says of each fault."""
    found = {}
    changes = LAYOUTS[name]
    virtual = changes.get("virtual_pipeline_model_parallel_size")
    of_layout = {
        "tensor": changes.get("tensor_model_parallel_size", 1),
        "pipeline": changes.get("pipeline_model_parallel_size", 1),
        "virtual": virtual,
    }
    rank = int(os.environ["RANK"])
    with process_groups(Path(store), rank, 2), layout(**of_layout):
        config = make_config(num_layers=LAYERS, num_moe_experts=EXPERTS, moe_enable_routing_replay=True, **changes)
        RouterReplay.clear_global_router_replay_instances()
        chunks = [
            build(config, fast=False, vp_stage=stage).train() for stage in (range(virtual) if virtual else [None])
        ]
        capture = recorded(chunks, name)
        places = sorted({place for _, place in capture})
        first = places[:2] if rank == 0 or of_layout["tensor"] > 1 else []
        for fault in FAULTS:
            changed = spoiled(capture, fault, first) if fault != "layer" or first else capture
            audit = RouterReplayAudit(chunks)
            replay(chunks, changed, name)
            audited = audit.end_step(1)
            audit.close()
            assert audited.report is not None
            texts = [anomaly.text for anomaly in audited.report.anomalies]
            found[fault] = {"metrics": dict(audited.metrics), "texts": texts, "tokens": audited.num_tokens}
        RouterReplay.clear_global_router_replay_instances()
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "virtual stages" else pytest.mark.full) for name in LAYOUTS],
)
def audits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Layout, and of both ranks what was found, by fault."""
    store = str(tmp_path_factory.mktemp("store") / "rendezvous")
    return request.param, run_ranks(audit_on_both, 2, store, request.param)


def test_a_right_replay_counts_every_token_once(audits: Any) -> None:
    name, (first, second) = audits
    rows = MICROBATCHES * BATCH * SEQUENCE
    layers = 2 if name == "a stage without routers" else LAYERS
    assert first["none"] == second["none"]
    assert (first["none"]["texts"], first["none"]["tokens"]) == ([], rows)
    assert first["none"]["metrics"]["moe/routing/rows_expected"] == rows * layers
    assert (
        first["none"]["metrics"]["moe/routing/agreement"] == first["none"]["metrics"]["moe/routing/live_agreement"] == 1
    )


def test_faults_are_named_on_both_ranks(audits: Any) -> None:
    name, (first, second) = audits
    assert first == second
    # A rank of two virtual stages has layers 0 and 2.
    one, other = (0, 2) if name == "virtual stages" else (0, 1)
    assert [text.partition(":")[0] for text in first["layer"]["texts"]] == [
        f"layer {one} carries layer {other}'s routes",
        f"layer {other} carries layer {one}'s routes",
    ]
    assert first["token"]["texts"][0].startswith("routes are one token late")
    # Of parts of a sequence too.
    texts = first["sequence"]["texts"]
    assert any("carries the routes of sequence" in text for text in texts)
    assert not any("late" in text for text in texts)
