# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with images: the trainer's log-probs, tokens and routes, and refits of tower and projector."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.interface import GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.generation.vllm.releases import installed_release
from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.functional import grpo_runs, sft_runs, vision_runs
from tests.support.vllm_engines import generated, start_engine
from tests.support.vllm_vision import DECODERS, VisionTrainer, engine_changes, with_images

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(installed_release() is None, reason="vLLM is not installed: make vllm"),
]
TOLERANCE = 5e-6
GREEDY = SamplingParameters(max_new_tokens=8, temperature=0.0)
PARTS = {
    "internvl": ("vision_tower.", "multi_modal_projector.", "mlp.experts"),
    "qwen2_5_vl": ("visual.blocks.", "visual.merger.", "mlp.down_proj"),
    "qwen3_vl": ("visual.blocks.", "merger", "mlp.down_proj"),
    "qwen3_vl_moe": ("visual.blocks.", "merger", "mlp.experts"),
}


# One family: each other one starts another engine, and is in the slow list.
FAMILIES = [name if name == "qwen3_vl_moe" else pytest.param(name, marks=pytest.mark.slow) for name in DECODERS]


@pytest.fixture(scope="module", params=FAMILIES)
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionTrainer:
    return VisionTrainer(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def engine(vllm_cluster: RayCluster, trainer: VisionTrainer) -> Iterator[VllmEngine]:
    has_experts = trainer.model_type in ("internvl", "qwen3_vl_moe")
    engine = start_engine(vllm_cluster, trainer, captures_routes=has_experts, **engine_changes(trainer))
    yield engine
    engine.shutdown()


def asked(trainer: VisionTrainer, sampling: SamplingParameters = GREEDY) -> list[GenerationRequest]:
    return [
        GenerationRequest(tuple(tokens), index, sampling, inputs)
        for index, (tokens, inputs) in enumerate(zip(trainer.sequences, trainer.inputs, strict=True))
    ]


def test_a_refit_of_tower_projector_and_decoder_arrives(engine: VllmEngine, trainer: VisionTrainer) -> None:
    trainer.refit(engine)
    assert trainer.gap(engine) < TOLERANCE
    for part in PARTS[trainer.model_type]:
        before = dict(trainer.tensors)
        trainer.change(part)
        trainer.refit(engine, lambda tensors, before=before: before)
        with pytest.raises(WeightSyncError, match="does not compute with the trainer's weights"):
            trainer.check_of(engine).after_refit(engine)
        # The same images as before: what an engine has kept of them is another tower's.
        trainer.refit(engine)
        assert trainer.check_of(engine).after_refit(engine).largest < TOLERANCE
        assert trainer.gap(engine) < TOLERANCE, part


def test_greedy_tokens_and_routes_are_those_of_transformers(engine: VllmEngine, trainer: VisionTrainer) -> None:
    trainer.refit(engine)
    requests = asked(trainer)
    assert {0, 1, 2} <= {len(inputs["image_sizes"].values) for inputs in trainer.inputs}
    for row, (request, sequence) in enumerate(zip(requests, generated(engine, requests), strict=True)):
        tokens, routes = trainer.greedy(row, GREEDY.max_new_tokens)
        assert sequence.token_ids[: len(tokens)].tolist() == tokens
        if routes is None:
            assert sequence.routed_experts is None
            continue
        assert sequence.routed_experts is not None
        (piece,) = sequence.routed_experts.pieces
        found = ray.get(piece.source)[piece.first : piece.first + piece.num_rows]
        assert len(routes) == len(request.token_ids) + len(tokens) - 1
        np.testing.assert_array_equal(np.sort(found[: len(routes)], -1), np.sort(routes, -1))


def test_many_images_in_one_step_are_answered_as_if_alone(engine: VllmEngine, trainer: VisionTrainer) -> None:
    # More tokens, and more of images, than a step takes: no prompt may be cut in two.
    trainer.refit(engine)
    rows = with_images(trainer.inputs)
    requests = [asked(trainer, SamplingParameters(max_new_tokens=4))[row] for row in rows * 20]
    requests = [GenerationRequest(r.token_ids, seed, r.sampling, r.model_inputs) for seed, r in enumerate(requests)]
    engines = engine.process_ids()
    together = generated(engine, requests)
    assert engine.process_ids() == engines, "none has failed"
    for index in (0, 41, 97):
        (alone,) = generated(engine, [requests[index]])
        assert alone.token_ids.tolist() == together[index].token_ids.tolist()


def test_text_alone_goes_on_beside_images(engine: VllmEngine, trainer: VisionTrainer) -> None:
    trainer.refit(engine)
    prompt = GenerationRequest((3, 4, 5), 1, GREEDY)
    (sequence,) = generated(engine, [prompt])
    assert len(sequence.token_ids) == GREEDY.max_new_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("name", "frozen"), [("tiny_internvl_moe", False), ("tiny_qwen3_vl_moe", True)])
def test_a_run_draws_from_the_weights_that_it_trains(name: str, frozen: bool, tmp_path: Path) -> None:
    shapes = vision_runs.make_shapes(tmp_path / "shapes")
    overrides = grpo_runs.settings(
        tmp_path,
        shapes,
        policy__megatron_cfg__routing_replay="rollout",
        policy__generation__backend="vllm",
        policy__freeze__vision_tower=frozen,
        **vision_runs.grpo_changes(shapes) | {"policy__model_name": Path("examples/assets", name)},
        **sft_runs.only_jsonl(),
    )
    command = grpo_runs.command(overrides, vision_runs.GRPO_EXEMPLAR)
    run = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    records = read_metrics(sft_runs.only_run_folder(tmp_path) / "metrics.jsonl")
    steps = [record.metrics for record in records if "train/refit/logprob_gap" in record.metrics]
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["train/refit/logprob_gap"] < 2e-5
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
        assert metrics["train/moe/routing/agreement"] > 0.999
        assert metrics["train/moe/routing/rows_missing_share"] == 0.0
        assert metrics["train/moe/image/token_share"] > 0.5
