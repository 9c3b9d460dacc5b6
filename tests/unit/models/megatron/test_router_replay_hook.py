# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit of RouterReplay in a plain loop of Megatron-Core's own schedule: two pipeline stages, recomputed layers."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.routing.hooks.router_replay import RouterReplayAudit
from tests.conftest import REPOSITORY_ROOT
from tests.support.cpu_layers import build, gradients, layout, make_config, megatron_causal_mask, process_groups
from tests.support.gloo_ranks import run_ranks

# isort: split
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

LAYERS, EXPERTS, MICROBATCHES, BATCH, SEQUENCE = 4, 8, 4, 2, 24
FAULTS = ("none", "layer", "token", "queue", "ignored")


def microbatches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 45, (MICROBATCHES, BATCH, SEQUENCE), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return [{"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1)} for ids in tokens]


def run_schedule(model: Any, forward: Any, num_microbatches: int, *, forward_only: bool) -> Any:
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(microbatches()),
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return output.mean(), {"loss": output.detach().mean()}


def recorded(model: Any) -> list[list[Tensor]]:
    """The experts of each microbatch, by the layers of this stage: a rollout's."""
    capture: list[list[Tensor]] = []

    def forward(batches: Any, model: Any) -> Any:
        output = model(**next(batches), attention_mask=megatron_causal_mask(SEQUENCE))
        capture.append([indices.clone() for indices in RouterReplay.get_recorded_data()])
        return output, loss_of

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    run_schedule(model, forward, MICROBATCHES, forward_only=True)
    RouterReplay.clear_global_indices()
    return capture


def replayed(model: Any, capture: list[list[Tensor]], fault: str) -> dict[str, Tensor]:
    """Gradients of a step that replays the capture, in the passes that checkpointing repeats too."""
    first_stage = int(os.environ["RANK"]) == 0
    order = iter(capture)

    def forward(batches: Any, model: Any) -> Any:
        targets = next(order)
        if fault == "layer" and first_stage:
            targets = targets[::-1]
        if fault == "token":
            targets = [routes.roll(BATCH, 0) for routes in targets]
        if fault == "ignored":
            changed = (torch.arange(BATCH * SEQUENCE) % 5 == 0)[:, None]
            targets = [torch.where(changed, (routes + 1) % EXPERTS, routes) for routes in targets]
        RouterReplay.set_replay_data(targets)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = model(**next(batches), attention_mask=megatron_causal_mask(SEQUENCE))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return output, loss_of

    model.train().zero_grad(set_to_none=True)
    if fault == "queue":  # log-probabilities first, of a microbatch whose targets nobody clears
        with torch.no_grad():
            run_schedule(model, forward, 1, forward_only=True)
        order = iter(capture)
    run_schedule(model, forward, MICROBATCHES, forward_only=False)
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    return gradients(model)


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


def audit_on_two_stages(store: str) -> dict[str, dict[str, Any]]:
    """Runs on both ranks: what the audit says of each fault, and whether gradients are those without it."""
    found = {}
    with process_groups(Path(store), int(os.environ["RANK"]), 2), layout(pipeline=2):
        config = make_config(
            num_layers=LAYERS,
            num_moe_experts=EXPERTS,
            pipeline_model_parallel_size=2,
            moe_enable_routing_replay=True,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        RouterReplay.clear_global_router_replay_instances()
        model = build(config, fast=False)
        capture = recorded(model)
        for fault in FAULTS:
            with routers_that_do_not_ask(model) if fault == "ignored" else nullcontext():
                expected = replayed(model, capture, fault)
                audit = RouterReplayAudit([model])
                actual = replayed(model, capture, fault)
                audited = audit.end_step(1)
                audit.close()
            assert audited.report is not None
            found[fault] = {
                "metrics": dict(audited.metrics),
                "texts": [anomaly.text for anomaly in audited.report.anomalies],
                "tokens": audited.num_tokens,
                "load": audited.training_load,
                "same": all(torch.equal(actual[name], expected[name]) for name in expected),
            }
        assert not any("get_replay_topk" in vars(replay) for replay in RouterReplay.global_router_replay_instances)
        names: dict[str, Any] = {}
        exec(documented_loop(), names)
        with redirect_stdout(StringIO()) as shown:
            names["train"]([model], 1, lambda: replayed(model, capture, "layer"))
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


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Return what both ranks found, by fault."""
    return run_ranks(audit_on_two_stages, 2, str(tmp_path_factory.mktemp("store") / "rendezvous"))


def test_gradients_are_those_without_the_audit(audits: Any) -> None:
    assert [of_rank[fault]["same"] for of_rank in audits for fault in FAULTS] == [True] * (2 * len(FAULTS))


def test_ranks_say_the_same(audits: Any) -> None:
    for fault in FAULTS:
        first, second = (of_rank[fault] for of_rank in audits)
        assert first["metrics"] == second["metrics"]
        assert first["texts"] == second["texts"]


def test_a_right_replay_has_no_finding(audits: Any) -> None:
    found = audits[0]["none"]
    rows = MICROBATCHES * BATCH * SEQUENCE
    assert found["texts"] == []
    assert found["tokens"] == rows
    assert found["metrics"]["moe/routing/rows_expected"] == rows * LAYERS
    assert found["metrics"]["moe/routing/agreement"] == found["metrics"]["moe/routing/live_agreement"] == 1
    # Repeated passes do not count.
    assert found["load"].sum(1).tolist() == [rows * 2] * LAYERS


def test_another_layer_is_found(audits: Any) -> None:
    texts = audits[0]["layer"]["texts"]
    assert [text.partition(":")[0] for text in texts] == [
        "layer 0 carries layer 1's routes",
        "layer 1 carries layer 0's routes",
    ]


def test_a_shifted_token_is_found(audits: Any) -> None:
    (text,) = audits[0]["token"]["texts"]
    assert text.startswith("routes are one token late")


def test_targets_that_nobody_cleared_are_found(audits: Any) -> None:
    texts = audits[0]["queue"]["texts"]
    assert len(texts) == LAYERS
    assert all(text.startswith(f"the repeated forward of layer {layer} took") for layer, text in enumerate(texts))


def test_targets_that_no_router_takes_are_found(audits: Any) -> None:
    # Ten of the 48 tokens of each microbatch.
    expected = [f"40 rows of targets were set but not taken in layer {layer}" for layer in range(LAYERS)]
    assert audits[0]["ignored"]["texts"] == expected


def test_the_documented_loop_prints_agreement_and_findings(audits: Any) -> None:
    lines = audits[0]["documented"]["texts"]
    assert lines[0].startswith("step 0: agreement 0.")
    assert [line.partition(": they")[0] for line in lines[1:]] == [
        "step 0: layer 0 carries layer 1's routes",
        "step 0: layer 1 carries layer 0's routes",
    ]
    page = (REPOSITORY_ROOT / "docs" / "hooks.md").read_text()
    assert all(line in page for line in lines)


def test_routers_without_replay_are_refused(audits: Any) -> None:
    (text,) = audits[0]["refused"]["texts"]
    assert text == "layer 0 has no RouterReplay: the model must be built with moe_enable_routing_replay"
