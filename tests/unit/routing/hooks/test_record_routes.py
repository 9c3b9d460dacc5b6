# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Recorded routes of models of transformers, against their own router logits."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
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


def deepseek_v2() -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    of_groups = {"topk_method": "group_limited_greedy", "n_routed_experts": EXPERTS}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**COMMON, **sizes, **ranks, **of_groups))


def glm4_moe() -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "head_dim": 8}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**COMMON, **sizes, n_routed_experts=EXPERTS))


def minimax_m2() -> PreTrainedModel:
    """The bias is the block's, which gives it to its router."""
    return MiniMaxM2ForCausalLM(MiniMaxM2Config(**COMMON, head_dim=8, num_local_experts=EXPERTS))


BIASED = (deepseek_v2, deepseek_v3, glm4_moe, minimax_m2)
"""Models whose routers choose by groups, by a bias, or by both."""


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


def one_by_one(logits: Tensor, bias: Tensor | None, num_groups: int, best_of_group: int) -> tuple[set[int], float]:
    """Return the experts of a token, and the nearest cut; of groups the better half is usable."""
    scores = (logits.softmax(-1) if bias is None else logits.sigmoid() + bias).tolist()
    size = EXPERTS // num_groups
    members = [range(first, first + size) for first in range(0, EXPERTS, size)]
    sums = [sum(sorted((scores[expert] for expert in group), reverse=True)[:best_of_group]) for group in members]
    order = sorted(range(num_groups), key=lambda group: -sums[group])
    num_usable = max(1, num_groups // 2)
    usable = sorted((expert for group in order[:num_usable] for expert in members[group]), key=lambda e: -scores[e])
    cuts = [scores[usable[TOPK - 1]] - scores[usable[TOPK]]]
    if num_usable < num_groups:
        cuts.append(sums[order[num_usable - 1]] - sums[order[num_usable]])
    return set(usable[:TOPK]), min(cuts)


@pytest.mark.parametrize("bias_size", [0.0, 0.3])
@pytest.mark.parametrize("make", BIASED)
def test_margins_are_those_of_the_scores_that_experts_are_chosen_by(make: Any, bias_size: float) -> None:
    model = build(make)
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    biases = [tensor for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for tensor in biases:
        nn.init.normal_(tensor, std=bias_size)
    enable_load_balance_tracking(model)
    logits: list[Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda router, args, outputs: logits.append(outputs[0].detach().float()))
    with record_routes(model) as routes:
        model(tokens(1, rows=4))
    counted = [load["expert_load"].tolist() for load in collect_expert_loads(model).values()]
    assert routes.expert_load().counts.tolist() == counted
    (found,) = routes.passes
    assert found.margins is not None
    num_groups = getattr(routers[0], "num_group", 1)
    for layer, of_layer in enumerate(logits):
        bias = biases[layer] if biases else None
        for token, of_token in enumerate(of_layer):
            experts, margin = one_by_one(of_token, bias, num_groups, 1 if bias is None else 2)
            assert set(found.experts[token, layer].tolist()) == experts
            assert found.margins[token, layer].item() == pytest.approx(margin, abs=1e-6)


def test_a_router_that_chooses_by_other_scores_has_no_margins() -> None:
    model = build(deepseek_v3)
    for router in (module for module in model.modules() if type(module).__name__ == "DeepseekV3TopkRouter"):
        router.forward = partial(_choosing_the_last, router)
    with record_routes(model) as routes:
        model(tokens(1))
    assert routes.passes[0].margins is None


def _choosing_the_last(router: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    experts = torch.tensor([EXPERTS - 2, EXPERTS - 1]).expand(len(rows), -1)
    return rows @ router.weight.T, torch.ones_like(experts, dtype=torch.float32), experts


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
    for step in (3, 4):
        training.write_capture(tmp_path, step, rollout)
    assert len(writers_of(tmp_path)) == 1, "the writer is the same at every step"
    description = read_description(tmp_path)
    (rows,) = read_step(description, 3, steps_of(tmp_path)[3])
    assert set(rows.columns) == {"token_ids", "rollout_experts", "training_experts", "margins"}
    expected = np.concatenate([sequence.columns["training_experts"] for sequence in training.capture(rollout)])
    assert np.array_equal(rows.columns["training_experts"], expected)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no MoE layer"), record_routes(nn.Linear(2, 2)):
        pass
