# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The coefficient that a balancing loss trains with, read from gradients in a loop of transformers' models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from nemo_rl_moe.routing.hooks.router_loss_gradient import RouterLossGradient
from nemo_rl_moe.routing.hooks.trainer import RoutingCallback

COEFFICIENT = 0.02
FIELDS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": COEFFICIENT,
}


def qwen(**changes: Any) -> Any:
    torch.manual_seed(0)
    own = {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**FIELDS, **own, **changes})).train()


def mixtral() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**FIELDS, num_local_experts=8)).train()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (3, 20), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(20) < torch.tensor([20, 11, 5])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


@pytest.mark.parametrize("make", [qwen, mixtral])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_coefficient_of_each_pass_adds_up(make: Callable[[], Any], factor: float) -> None:
    model = make()
    reader = RouterLossGradient(model)
    for seed in range(3):
        (model(**batch(seed)).loss * factor / 3).backward()
    found = reader.take()
    assert found is not None
    assert found.coefficient == pytest.approx(COEFFICIENT * factor, rel=1e-3)
    assert found.error < 1e-3
    assert found.is_exact
    assert reader.take() is None


def test_padding_that_counts_shows_in_the_error() -> None:
    model = qwen()
    reader = RouterLossGradient(model)
    outputs = model(**batch(), output_router_logits=True)
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    without_mask = load_balancing_loss_func(outputs.router_logits, 8, 2, None)
    (outputs.loss - COEFFICIENT * outputs.aux_loss + COEFFICIENT * without_mask).backward()
    found = reader.take()
    assert found is not None
    assert max(abs(found.coefficient / COEFFICIENT - 1), found.error) > 0.05


def test_a_z_loss_of_the_user_is_told_apart() -> None:
    model = qwen()
    reader = RouterLossGradient(model)
    outputs = model(**batch(), output_router_logits=True)
    mask = batch()["attention_mask"].flatten().bool()
    z_loss = sum(logits[mask].logsumexp(-1).square().mean() for logits in outputs.router_logits)
    (outputs.loss + 0.003 * z_loss).backward()
    found = reader.take()
    assert found is not None
    assert found.coefficient == pytest.approx(COEFFICIENT, rel=1e-3)
    assert found.error < 1e-3


def test_bfloat16_is_read_and_said_to_be_inexact() -> None:
    model = qwen().to(torch.bfloat16)
    reader = RouterLossGradient(model)
    model(**batch()).loss.backward()
    found = reader.take()
    assert found is not None
    assert not found.is_exact
    assert 2 / 3 < found.coefficient / COEFFICIENT < 3 / 2


def test_two_passes_before_one_backward_and_layers_without_gradients() -> None:
    model = qwen()
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    reader = RouterLossGradient(model)
    (model(**batch(0)).loss / 2 + model(**batch(1)).loss / 2).backward()
    found = reader.take()
    assert found is not None
    assert found.coefficient == pytest.approx(COEFFICIENT, rel=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing(reentrant: bool) -> None:
    model = qwen()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    reader = RouterLossGradient(model)
    model(**batch()).loss.backward()
    found = reader.take()
    assert found is not None
    # A reentrant first pass has no gradients, so that transformers trains without the loss that it logs.
    assert found.coefficient == pytest.approx(0.0 if reentrant else COEFFICIENT, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: qwen(norm_topk_prob=False), id="weights that do not add up to one"),
        pytest.param(lambda: qwen().eval(), id="evaluation"),
    ],
)
def test_what_is_not_read(make: Callable[[], Any]) -> None:
    model = make()
    reader = RouterLossGradient(model)
    model(**batch()).loss.backward()
    assert reader.take() is None


@pytest.mark.parametrize(("accumulated", "wanted"), [(1, None), (2, None), (2, 2 * COEFFICIENT)])
def test_transformers_trainer_does_not_divide_the_loss_by_accumulated_passes(
    accumulated: int, wanted: float | None, tmp_path: Path
) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=4,
        logging_steps=2,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=accumulated,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = [{name: values[row] for name, values in batch(seed).items()} for seed in range(8) for row in range(3)]
    callback = RoutingCallback(router_loss_coefficient=wanted)
    trainer = Trainer(qwen(), args=arguments, train_dataset=data)
    callback.attach(trainer)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    trained, scale = accumulated * COEFFICIENT, accumulated * COEFFICIENT / (wanted or COEFFICIENT)
    assert [entry["moe/router_gradient/coefficient_aux"] for entry in entries] == pytest.approx([trained] * 2, rel=1e-2)
    assert [entry["moe/router_gradient/scale_aux"] for entry in entries] == pytest.approx([scale] * 2, rel=1e-2)
    found = [finding.text for finding in callback.findings if finding.kind == "router_loss_gradient"]
    assert len(found) == int(scale > 1.5)
    assert all(text.startswith("the load balancing loss trains with 2.00 times its coefficient") for text in found)
