# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Recorded routes of models of transformers, against their own router logits."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl_moe.routing.hooks.pass_recorder import _seen_by_themselves
from nemo_rl_moe.routing.hooks.routes import Routes, anomalies_of, audit_sequences, record_routes
from nemo_rl_moe.routing.metrics.load_balance_metrics import collect_expert_loads, enable_load_balance_tracking
from nemo_rl_moe.runs.folder.capture_folder import read_description, read_step, steps_of, writers_of

EXPERTS, TOPK, VOCABULARY = 8, 2, 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOPK,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def qwen3_moe() -> PreTrainedModel:
    # The second layer is dense.
    config = Qwen3MoeConfig(**COMMON, head_dim=8, moe_intermediate_size=8, num_experts=EXPERTS, mlp_only_layers=[1])
    return Qwen3MoeForCausalLM(config)


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=EXPERTS))


def olmoe() -> PreTrainedModel:
    return OlmoeForCausalLM(OlmoeConfig(**COMMON, num_experts=EXPERTS))


def gpt_oss() -> PreTrainedModel:
    return GptOssForCausalLM(GptOssConfig(**COMMON, head_dim=8, num_local_experts=EXPERTS))


def deepseek_v3() -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **sizes, **ranks, n_routed_experts=EXPERTS))


def build(make: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make()
    # Weights large enough that routing is not a tie.
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.train()


def tokens(seed: int, rows: int = 2, columns: int = 9) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("make", "layers"),
    [(qwen3_moe, (0, 2, 3)), (mixtral, (0, 1, 2, 3)), (olmoe, (0, 1, 2, 3)), (gpt_oss, (0, 1, 2, 3))],
)
def test_routes_are_those_of_the_router_logits(make: Any, layers: tuple[int, ...]) -> None:
    model, batch = build(make), tokens(1)
    with record_routes(model) as routes:
        logits = torch.stack(model(batch, output_router_logits=True).router_logits, 1).detach()
    (found,) = routes.passes
    assert (routes.description.layers, routes.description.num_experts, routes.description.topk) == (layers, 8, 2)
    best = logits.float().softmax(-1).topk(TOPK + 1, -1)
    assert found.experts.sort(-1).values.tolist() == best.indices[..., :TOPK].sort(-1).values.tolist()
    assert found.margins is not None
    torch.testing.assert_close(found.margins, best.values[..., TOPK - 1] - best.values[..., TOPK])
    assert found.token_ids is not None
    assert found.token_ids.tolist() == batch.flatten().tolist()


def test_routes_of_groups_of_experts_have_no_margin_by_their_logits() -> None:
    model = build(deepseek_v3)
    enable_load_balance_tracking(model)
    with record_routes(model) as routes:
        model(tokens(1, rows=4))
    counted = [load["expert_load"].tolist() for load in collect_expert_loads(model).values()]
    assert routes.description.layers == (1, 2, 3)
    assert routes.expert_load().counts.tolist() == counted
    assert routes.passes[0].margins is None


def test_padding_does_not_count() -> None:
    model, mask = build(qwen3_moe), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = mask[1, 7:] = 0
    with record_routes(model) as routes:
        model(input_ids=tokens(1), attention_mask=mask)
    assert routes.expert_load().counts.sum(1).tolist() == [int(mask.sum()) * TOPK] * 3
    assert [sequence.token_ids.tolist() for sequence in routes.sequences()] == [
        tokens(1)[0, 4:].tolist(),
        tokens(1)[1, :7].tolist(),
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repeated_forward_is_recorded_once_and_nothing_changes(reentrant: bool) -> None:
    def step(model: PreTrainedModel) -> list[Tensor]:
        model.zero_grad()
        model(tokens(1), labels=tokens(1)).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model = build(qwen3_moe)
    with record_routes(model) as plain:
        step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    unwatched = step(model)
    with record_routes(model) as repeated:
        watched = step(model)
    assert [routed.kind.is_training for routed in repeated.passes] == [True]
    assert torch.equal(repeated.passes[0].experts, plain.passes[0].experts)
    assert all(torch.equal(one, other) for one, other in zip(unwatched, watched, strict=True))


def generate_and_train(model: PreTrainedModel, **options: Any) -> tuple[Routes, Routes]:
    """Routes of a generation whose prompts are padded on the left, and of training on its sequences."""
    prompts, mask = tokens(3, rows=6, columns=12), torch.ones(6, 12, dtype=torch.long)
    for row in range(6):
        mask[row, :row] = 0
    prompts = prompts * mask
    with record_routes(model.eval()) as rollout:
        sampled = model.generate(
            prompts,
            attention_mask=mask,
            do_sample=True,
            min_new_tokens=40,
            max_new_tokens=40,
            eos_token_id=None,
            **options,
        )
    # The longest come last here and are cut, and padding is on the other side.
    batch, real = torch.zeros(6, 52, dtype=torch.long), torch.zeros(6, 52, dtype=torch.long)
    for row in range(6):
        sequence = sampled[5 - row, 5 - row : 52 - row]
        batch[row, : len(sequence)], real[row, : len(sequence)] = sequence, 1
    with record_routes(model.train()) as training:
        model(input_ids=batch, attention_mask=real)
    return rollout, training


@pytest.fixture(scope="module")
def generated() -> tuple[Routes, Routes]:
    """Return the routes of one model."""
    return generate_and_train(build(qwen3_moe))


@pytest.mark.parametrize(("make", "attention"), [(qwen3_moe, "sdpa"), (qwen3_moe, "eager"), (gpt_oss, "eager")])
def test_padding_is_known_with_a_cache_of_fixed_size(make: Any, attention: str) -> None:
    """It gets masks of who sees whom: of bools, of numbers that are added, of a kind for each layer."""
    model = build(make)
    model.set_attn_implementation(attention)
    rollout, training = generate_and_train(model, cache_implementation="static")
    assert [len(sequence.token_ids) for sequence in rollout.sequences()] == [51 - row for row in range(6)]
    audited = training.audit(rollout)
    assert (audited.num_sequences, anomalies_of(audited)) == (6, ())
    assert audited.metrics["moe/routing/live_agreement"] > 0.99


def test_a_padded_row_that_may_see_everything_is_padding() -> None:
    """So masks are opened for kernels that cannot have a row that sees nothing."""
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(1)
    mask[:, :, :, 1] = False  # the first of three, behind one key of an earlier pass
    mask[:, :, 0] = True
    assert _seen_by_themselves(mask, (1, 3), 1).tolist() == [[False, True, True]]
    assert _seen_by_themselves(None, (2, 3), 1).all()


def test_generation_and_training_agree(generated: tuple[Routes, Routes]) -> None:
    rollout, training = generated
    audited = training.audit(rollout, step=7)
    assert (audited.step, audited.num_sequences) == (7, 6)
    assert audited.metrics["moe/routing/live_agreement"] > 0.99
    assert audited.metrics["moe/routing/rows_usable_share"] == 1
    # 6 sequences whose last token no engine has fed, in three layers.
    assert audited.metrics["moe/routing/rows_expected"] == (audited.num_tokens - 6) * 3
    assert audited.rollout_load is not None
    assert audited.rollout_load.sum() == (audited.num_tokens - 6) * 3 * TOPK
    assert anomalies_of(audited) == ()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda experts: np.roll(experts, 1, axis=0), "routes are one token late"),
        (lambda experts: experts[:, [1, 0, 2]], "layer 0 carries layer 2's routes"),
        (lambda experts: (experts + 1) % EXPERTS, "are a permutation of the router's (0->7, 1->0, 2->1"),
    ],
)
def test_planted_faults_are_found(generated: tuple[Routes, Routes], fault: Any, text: str) -> None:
    rollout, training = generated
    sequences = [
        dataclasses.replace(
            sequence, columns={**sequence.columns, "rollout_experts": fault(sequence.columns["rollout_experts"])}
        )
        for sequence in training.capture(rollout)
    ]
    found = anomalies_of(audit_sequences(training.description, 1, sequences))
    assert any(text in anomaly.text for anomaly in found), found


def test_a_capture_is_written(generated: tuple[Routes, Routes], tmp_path: Path) -> None:
    rollout, training = generated
    training.write_capture(tmp_path, 3, rollout)
    description = read_description(tmp_path)
    (rows,) = read_step(description, 3, steps_of(tmp_path)[3])
    assert set(rows.columns) == {"token_ids", "rollout_experts", "training_experts", "margins"}
    expected = np.concatenate([sequence.columns["training_experts"] for sequence in training.capture(rollout)])
    assert np.array_equal(rows.columns["training_experts"], expected)


def test_the_writer_of_a_capture_is_the_same_at_every_step(generated: tuple[Routes, Routes], tmp_path: Path) -> None:
    rollout, training = generated
    for step in (1, 2):
        training.write_capture(tmp_path, step, rollout)
    assert len(writers_of(tmp_path)) == 1


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no MoE layer"), record_routes(nn.Linear(2, 2)):
        pass
