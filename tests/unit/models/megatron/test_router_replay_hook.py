# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit of RouterReplay in a plain loop of Megatron-Core's own schedule, where each rank sees a part."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.routing.hooks.router_replay import RouterReplayAudit
from tests.conftest import REPOSITORY_ROOT
from tests.support.cpu_layers import build, gradients, layout, make_config, megatron_causal_mask, process_groups
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import listed

# isort: split
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

LAYERS, EXPERTS, MICROBATCHES, BATCH, SEQUENCE = 4, 8, 4, 2, 24
ROWS = MICROBATCHES * BATCH * SEQUENCE
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline_model_parallel_size": 2, **RECOMPUTED},
    "virtual stages": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **RECOMPUTED},
    "a stage without tokens": {"pipeline_model_parallel_size": 2, **RECOMPUTED},
    "a stage without routers": {"pipeline_model_parallel_size": 2, "moe_layer_freq": [1, 1, 0, 0]},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, **RECOMPUTED},
}
WITHOUT_TOKENS = ("a stage without tokens", "a stage without routers")
FAULTS = ("none", "layer", "token", "sequence", "queue", "ignored")
Capture = dict[tuple[int, int], Tensor]
in_every_layout = pytest.mark.parametrize(
    "name", listed(LAYOUTS, quick=("two stages", "virtual stages"), in_full=LAYOUTS)
)


def run_schedule(
    name: str, chunks: list[Any], before: Any, after: Any, *, forward_only: bool, number: int = MICROBATCHES
) -> None:
    """Microbatches through the chunks, with a call before and behind each forward, of its number and its routers."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 45, (MICROBATCHES, BATCH, SEQUENCE), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)

    def forward(batches: Any, chunk: Any) -> Any:
        index, ids = next(batches)
        inputs = {"input_ids": ids, "position_ids": positions}
        if name in WITHOUT_TOKENS and not chunk.pre_process:
            inputs = dict.fromkeys(inputs)
        replays = [layer.mlp.router.router_replay for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
        places = [RouterReplay.global_router_replay_instances.index(each) for each in replays]
        before(index, places)
        output = chunk(**inputs, labels=ids.roll(-1, 1), attention_mask=megatron_causal_mask(SEQUENCE))
        after(index, places)
        return output, lambda output: (output.mean(), {"loss": output.detach().mean()})

    iterators = [enumerate(tokens) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=number,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


def recorded(name: str, chunks: list[Any]) -> Capture:
    """The routers' own experts, by microbatch and router: a rollout's."""
    capture: Capture = {}

    def keep(number: int, places: list[int]) -> None:
        for place in places:
            capture[number, place] = RouterReplay.global_router_replay_instances[place].recorded_topk_idx.clone()

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    run_schedule(name, chunks, lambda *_: None, keep, forward_only=True)
    RouterReplay.clear_global_indices()
    return capture


def spoiled(capture: Capture, fault: str, swapped: dict[int, int]) -> Capture:
    """The capture with a fault; these layers change places."""
    if fault == "layer":
        return {(number, place): capture[number, swapped.get(place, place)] for number, place in capture}
    changes: dict[str, Any] = {
        "token": lambda routes: routes.roll(BATCH, 0),
        "sequence": lambda routes: routes.view(-1, BATCH, 2).flip(1).reshape(-1, 2),
        "ignored": lambda routes: (routes + (torch.arange(len(routes)) % 5 == 0)[:, None]) % EXPERTS,
    }
    return {key: changes.get(fault, lambda routes: routes)(routes) for key, routes in capture.items()}


def replayed(name: str, chunks: list[Any], capture: Capture, fault: str = "none") -> dict[str, Tensor]:
    """Gradients of a step that replays the capture, in the passes that checkpointing repeats too."""

    def put(number: int, places: list[int]) -> None:
        for place in places:
            RouterReplay.global_router_replay_instances[place].set_target_indices(capture[number, place])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def turn(number: int, places: list[int]) -> None:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    if fault == "queue":  # log-probabilities first, of a microbatch whose targets nobody clears
        with torch.no_grad():
            run_schedule(name, chunks, put, turn, forward_only=True, number=1)
    run_schedule(name, chunks, put, turn, forward_only=False)
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    return {f"{index} {key}": grad for index, chunk in enumerate(chunks) for key, grad in gradients(chunk).items()}


@contextmanager
def routers_that_do_not_ask(model: Any) -> Iterator[None]:
    """Routers that choose without a look at their RouterReplay, as fused ones do."""

    def routing(router: Any, choose: Any, *args: Any, **kwargs: Any) -> Any:
        kept, router.router_replay = router.router_replay, None
        try:
            return choose(*args, **kwargs)
        finally:
            router.router_replay = kept

    routers = [layer.mlp.router for layer in model.decoder.layers]
    for router in routers:
        router.routing = partial(routing, router, router.routing)
    yield
    for router in routers:
        del router.routing


def audit_on_both(store: str, name: str) -> dict[str, dict[str, Any]]:
    """Runs on both ranks: what the audit says of each fault, and whether gradients are those without it."""
    found, rank, changes = {}, int(os.environ["RANK"]), LAYOUTS[name]
    sizes = {
        "tensor": changes.get("tensor_model_parallel_size", 1),
        "pipeline": changes.get("pipeline_model_parallel_size", 1),
        "virtual": changes.get("virtual_pipeline_model_parallel_size"),
    }
    with process_groups(Path(store), rank, 2), layout(**sizes):
        config = make_config(num_layers=LAYERS, num_moe_experts=EXPERTS, moe_enable_routing_replay=True, **changes)
        RouterReplay.clear_global_router_replay_instances()
        stages = range(sizes["virtual"]) if sizes["virtual"] else [None]
        chunks = [build(config, fast=False, vp_stage=stage).train() for stage in stages]
        capture = recorded(name, chunks)
        # On the first stage.
        one, other = sorted({place for _, place in capture} or {0, 1})[:2]
        swapped = {one: other, other: one} if rank == 0 or sizes["tensor"] > 1 else {}
        for fault in FAULTS if name == "two stages" else FAULTS[:4]:
            targets = spoiled(capture, fault, swapped)
            with routers_that_do_not_ask(chunks[0]) if fault == "ignored" else nullcontext():
                expected = replayed(name, chunks, targets, fault)
                audit = RouterReplayAudit(chunks)
                actual = replayed(name, chunks, targets, fault)
                audited = audit.end_step(1)
                audit.close()
            assert audited.report is not None
            assert all(torch.equal(actual[key], expected[key]) for key in expected)
            found[fault] = {
                "metrics": dict(audited.metrics),
                "texts": [anomaly.text for anomaly in audited.report.anomalies],
                "tokens": audited.num_tokens,
                "load": audited.training_load.sum(1).tolist(),
            }
        assert not any("get_replay_topk" in vars(replay) for replay in RouterReplay.global_router_replay_instances)
        if name == "two stages":
            names: dict[str, Any] = {}
            exec(documented_loop(), names)
            with redirect_stdout(StringIO()) as shown:
                names["train"](chunks, 1, lambda: replayed(name, chunks, spoiled(capture, "layer", swapped)))
            found["documented"] = {"texts": shown.getvalue().splitlines()}
            with pytest.raises(ValueError) as refused:  # noqa: PT011  (its text is compared)
                RouterReplayAudit([build(replace(config, moe_enable_routing_replay=False), fast=False)])
            found["refused"] = {"texts": [str(refused.value)]}
        RouterReplay.clear_global_router_replay_instances()
    return found


def documented_loop() -> str:
    """The lines of the documentation."""
    page = (REPOSITORY_ROOT / "docs" / "hooks.md").read_text()
    (block,) = re.findall(r"```python\n(# replay_audit.*?)```", page, re.DOTALL)
    return str(block)


@cache
def audits(name: str = "two stages") -> list[dict[str, dict[str, Any]]]:
    """Return what both ranks found in a layout, by fault."""
    with TemporaryDirectory() as folder:
        return run_ranks(audit_on_both, 2, f"{folder}/rendezvous", name)


@in_every_layout
def test_a_right_replay_counts_every_token_once(name: str) -> None:
    found = audits(name)[0]["none"]
    layers = 2 if name == "a stage without routers" else LAYERS
    assert (found["texts"], found["tokens"]) == ([], ROWS)
    assert found["metrics"]["moe/routing/rows_expected"] == ROWS * layers
    assert found["metrics"]["moe/routing/agreement"] == found["metrics"]["moe/routing/live_agreement"] == 1
    # Repeated passes do not count.
    assert found["load"] == [ROWS * 2] * layers


@in_every_layout
def test_faults_are_named_on_both_ranks(name: str) -> None:
    first, second = audits(name)
    for fault in set(FAULTS) & set(first):
        assert first[fault] == second[fault]
    # A rank of two virtual stages has layers 0 and 2.
    one, other = (0, 2) if name == "virtual stages" else (0, 1)
    assert [text.partition(":")[0] for text in first["layer"]["texts"]] == [
        f"layer {one} carries layer {other}'s routes",
        f"layer {other} carries layer {one}'s routes",
    ]
    (text,) = first["token"]["texts"]
    assert text.startswith("routes are one token late")
    # Of parts of a sequence too.
    texts = first["sequence"]["texts"]
    assert any("carries the routes of sequence" in text for text in texts)
    assert not any("late" in text for text in texts)


def test_targets_that_nobody_cleared_are_found() -> None:
    texts = audits()[0]["queue"]["texts"]
    assert len(texts) == LAYERS
    assert all(text.startswith(f"the repeated forward of layer {layer} took") for layer, text in enumerate(texts))


def test_targets_that_no_router_takes_are_found() -> None:
    # Ten of the 48 tokens of each microbatch.
    expected = [f"40 rows of targets were set but not taken in layer {layer}" for layer in range(LAYERS)]
    assert audits()[0]["ignored"]["texts"] == expected


def test_the_documented_loop_prints_agreement_and_findings() -> None:
    lines = audits()[0]["documented"]["texts"]
    assert lines[0].startswith("step 0: agreement 0.")
    assert [line.partition(": they")[0] for line in lines[1:]] == [
        "step 0: layer 0 carries layer 1's routes",
        "step 0: layer 1 carries layer 0's routes",
    ]
    page = (REPOSITORY_ROOT / "docs" / "hooks.md").read_text()
    assert all(line in page for line in lines)


def test_routers_without_replay_are_refused() -> None:
    (text,) = audits()[0]["refused"]["texts"]
    assert text == "layer 0 has no RouterReplay: the model must be built with moe_enable_routing_replay"
