# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines of models with gated delta nets, in bfloat16: rollouts, routes, and each refit.

Weights are rounded to bfloat16 in both, so that engine and transformers differ by the engine's activations alone.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from torch import Tensor
from transformers import AutoConfig

from nemo_rl_moe.algorithms.losses.position_sums import QUARTERS
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.refit_check import RefitCheck
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.functional import grpo_runs, sft_runs
from tests.support.delta_net_models import MODELS, OF_THE_TOKENIZER
from tests.support.vllm_adapters import ATTENTION, RoundedAdapterTrainer, adapter_check
from tests.support.vllm_engines import FREE, Trainer, check_of, generated, requests, start_engine, vllm_tests

pytestmark = vllm_tests()


class RoundedTrainer(Trainer):
    """A trainer whose weights are numbers of bfloat16."""

    def _save(self) -> None:
        self.tensors = {name: tensor.bfloat16().float() for name, tensor in self.tensors.items()}
        super()._save()


@pytest.fixture(
    scope="module",
    params=["qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "qwen3_next")],
)
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RoundedTrainer:
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    return RoundedTrainer(tmp_path_factory.mktemp(request.param) / "model", config=config, scale=3.0)


@pytest.fixture(scope="module")
def engine(vllm_cluster: RayCluster, trainer: RoundedTrainer) -> Iterator[VllmEngine]:
    has_experts = any(".experts." in name for name in trainer.tensors)
    engine = start_engine(vllm_cluster, trainer, dtype="bfloat16", captures_routes=has_experts)
    yield engine
    engine.shutdown()


@pytest.fixture
def fitted(engine: VllmEngine, trainer: RoundedTrainer) -> VllmEngine:
    trainer.refit(engine)
    return engine


def check(engine: VllmEngine, trainer: RoundedTrainer) -> RefitCheck:
    of_weights = {"start_fingerprints": trainer.start_fingerprints, "number_format": "bfloat16"}
    return check_of(engine, trainer, in_float32=False, **of_weights)


def test_log_probs_are_those_of_transformers(fitted: VllmEngine, trainer: RoundedTrainer) -> None:
    # Longer than a chunk of 64 tokens, with prompts and responses of several lengths in one batch.
    asked = [
        replace(each, token_ids=(*each.token_ids, *[7 + index] * 9 * index)) for index, each in enumerate(requests(8))
    ]
    gaps = []
    for request, sequence in zip(asked, generated(fitted, asked), strict=True):
        (expected,) = trainer.scores([[*request.token_ids, *sequence.token_ids.tolist()]])
        gaps.append(np.abs(sequence.logprobs - expected[len(request.token_ids) - 1 :]))
    mean = float(np.concatenate(gaps).mean())
    print(f"mean difference of log-probs {mean:.2g}, largest {np.concatenate(gaps).max():.2g}")
    assert mean < 0.02


def test_greedy_tokens_are_the_likeliest_of_transformers(fitted: VllmEngine, trainer: RoundedTrainer) -> None:
    for request, sequence in zip(
        asked := requests(5, replace(FREE, temperature=0.0)), generated(fitted, asked), strict=True
    ):
        whole = [*request.token_ids, *sequence.token_ids.tolist()]
        (expected,) = trainer.scores([whole])
        for place in range(len(request.token_ids), len(whole)):
            others = [[*whole[:place], token] for token in range(64)]
            likeliest = max(float(each[-1]) for each in trainer.scores(others))
            # Within what bfloat16 leaves of a near tie.
            assert expected[place - 1] > likeliest - 0.1


def test_routes_are_those_of_transformers_but_for_near_ties(fitted: VllmEngine, trainer: RoundedTrainer) -> None:
    asked = requests(8)
    same = []
    for request, sequence in zip(asked, generated(fitted, asked), strict=True):
        if sequence.routed_experts is None:
            assert not any(".experts." in name for name in trainer.tensors)
            return
        whole = [*request.token_ids, *sequence.token_ids.tolist()]
        (piece,) = sequence.routed_experts.pieces
        found = ray.get(piece.source)[piece.first : piece.first + piece.num_rows]
        assert found.shape == (len(whole) - 1, 4, 2)
        same.append((np.sort(found, -1) == np.sort(trainer.routes(whole[:-1]), -1)).all(-1))
    agreement = float(np.concatenate(same).mean())
    print(f"share of equal rows {agreement:.3f}")
    assert agreement > 0.95


def test_every_tensor_is_compared_in_each_refit_and_a_changed_one_is_named(
    engine: VllmEngine, trainer: RoundedTrainer
) -> None:
    trainer.refit(engine)
    of_run = check(engine, trainer)
    for _ in range(3):
        of_run.after_refit(engine)
        assert of_run.share_compared == 1
        trainer.move()
        trainer.refit(engine)
    for part in ("linear_attn.conv1d", "linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm", "in_proj_z"):
        name = next((name for name in trainer.tensors if part in name), None)
        if name is None:
            continue  # of Qwen3-Next the output gates are in one tensor with queries, keys and values

        def change(tensors: dict[str, Tensor], name: str = name) -> dict[str, Tensor]:
            return {**tensors, name: tensors[name] * 1.25 + 0.25}

        trainer.refit(engine, change)
        named = f"in copy 0 1 of {len(trainer.tensors)} tensors differ: {name} "
        with pytest.raises(WeightSyncError, match=re.escape(named)):
            of_run.after_refit(engine)


def test_a_convolution_that_stays_packed_is_found(engine: VllmEngine, trainer: RoundedTrainer) -> None:
    """As if a reload packed none anew: the values of the version before are computed with."""
    trainer.refit(engine)
    of_run = check(engine, trainer)
    of_run.after_refit(engine)
    before = {name: tensor for name, tensor in trainer.tensors.items() if "conv1d" in name}
    trainer.move()
    trainer.refit(engine, lambda tensors: {**tensors, **before})
    with pytest.raises(WeightSyncError, match=r"in copy 0 3 of \d+ tensors differ: .*linear_attn\.conv1d\.weight"):
        of_run.after_refit(engine)
    assert torch.isfinite(torch.tensor(generated(engine, requests(1))[0].logprobs)).all()


OUTSIDE_OF_EXPERTS = (*ATTENTION, "out_proj", "gate_proj", "up_proj", "down_proj", "gate")
ADAPTED = {
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", *OUTSIDE_OF_EXPERTS),
    "qwen3_5_moe_text": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", *OUTSIDE_OF_EXPERTS),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_delta_nets_shared_experts_and_routers(vllm_cluster: RayCluster, tmp_path: Path, name: str) -> None:
    config = AutoConfig.for_model(name, **MODELS[name])
    trainer = RoundedAdapterTrainer(tmp_path / "model", ADAPTED[name], config=config, scale=3.0)
    assert {each.split(".")[-3] for each in trainer.factors} == {*ADAPTED[name]}
    engine = start_engine(vllm_cluster, trainer, dtype="bfloat16", captures_routes=True, adapters=trainer.settings)
    try:
        trainer.refit(engine)
        of_run = adapter_check(engine, trainer, in_float32=False, number_format="bfloat16")
        for _ in range(3):
            of_run.after_refit(engine)
            assert of_run.share_compared == 1
            trainer.move()
            trainer.refit(engine)
        asked = requests(8)
        gaps = []
        for request, sequence in zip(asked, generated(engine, asked), strict=True):
            (expected,) = trainer.scores([[*request.token_ids, *sequence.token_ids.tolist()]])
            gaps.append(np.abs(sequence.logprobs - expected[len(request.token_ids) - 1 :]))
            assert sequence.routed_experts is not None
        mean = float(np.concatenate(gaps).mean())
        print(f"mean difference of log-probs {mean:.2g}")
        assert mean < 0.05
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_a_run_with_the_rollouts_routes_checks_every_refit(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 40)
    model = tmp_path / "model"
    shutil.copytree(sft_runs.MODEL, model)
    config = AutoConfig.for_model("qwen3_next", **{**MODELS["qwen3_next"], **OF_THE_TOKENIZER})
    fields = config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    (model / "config.json").write_text(json.dumps(fields))
    settings = grpo_runs.settings(
        tmp_path,
        data,
        policy__model_name=model,
        policy__generation__vllm__dtype="bfloat16",
        policy__megatron_cfg__routing_replay="rollout",
        grpo__max_num_steps=3,
        **sft_runs.only_jsonl(),
    )
    command = grpo_runs.command(settings, grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_vllm.yaml"))
    sft_runs.run_command(command, tmp_path)
    steps = [each.metrics for each in read_metrics(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")][1:]
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["train/refit/weights_compared"] == 1
        assert metrics["train/refit/checks_failed"] == 0
        assert metrics["train/moe/routing/rows_usable_share"] == 1
        assert metrics["train/token_mult_prob_error"] < 1.05
        assert all(f"train/by_position/{quarter}/sampling_logp_difference" in metrics for quarter in QUARTERS)
