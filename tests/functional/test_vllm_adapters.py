# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters that real vLLM engines apply to the base: delivery, selection, checks, faults, versions and prefixes."""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, SamplingParameters
from nemo_rl_moe.generation.vllm import actors
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from tests.support.vllm_adapters import (
    ATTENTION,
    FAULTS,
    AdapterTrainer,
    adapter_check,
    lora_config,
    tell_workers,
    worker_with_faults,
)
from tests.support.vllm_engines import generated, generated_across_an_update, requests, start_engine, vllm_tests

pytestmark = vllm_tests(900)

BLOCK = 128
"""Tokens of a block of the prefix cache on CPUs."""
MODULES = (*ATTENTION, "gate")
LONG = SamplingParameters(max_new_tokens=40)


@pytest.fixture(scope="module")
def engine(vllm_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    first = AdapterTrainer(tmp_path_factory.mktemp("first") / "model", MODULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors, "VllmWorker", worker_with_faults())
        options = {"adapters": first.settings, "captures_routes": True, "prefix_caching": "none"}
        engine = start_engine(vllm_cluster, first, **options)
        yield engine
        engine.shutdown()


@pytest.fixture
def trainer(engine: VllmEngine, tmp_path: Path) -> AdapterTrainer:
    """A trainer that the engine has nothing of yet."""
    return AdapterTrainer(tmp_path / "model", MODULES)


def gaps(trainer: AdapterTrainer, prompts: list[tuple[int, ...]], found: list[GeneratedSequence]) -> float:
    """Return the largest difference of a sampled token's log-probability from the trainer's."""
    wholes = [[*prompt, *each.token_ids.tolist()] for prompt, each in zip(prompts, found, strict=True)]
    scores = [trainer.scores([whole])[0] for whole in wholes]
    pairs = zip(scores, found, strict=True)
    return max(float(np.abs(score[-len(each.token_ids) :] - each.logprobs).max()) for score, each in pairs)


def test_tokens_and_routes_follow_the_adapter_and_the_base_is_sent_once(
    engine: VllmEngine, trainer: AdapterTrainer
) -> None:
    trainer.refit(engine)
    before = generated(engine, asked := requests(6))
    prompts = [request.token_ids for request in asked]
    assert gaps(trainer, prompts, before) < 2e-5
    trainer.move()
    trainer.refit(engine)
    found = generated(engine, asked)
    assert gaps(trainer, prompts, before) > 0.01, "the update shows"
    assert gaps(trainer, prompts, found) < 2e-5
    assert {int(np.max(each.weight_version)) for each in found} == {1}
    assert trainer.sent == [{*trainer.tensors, *trainer.factors}, {*trainer.factors}]
    for prompt, sequence in zip(prompts, found, strict=True):
        assert sequence.routed_experts is not None
        (piece,) = sequence.routed_experts.pieces
        routes = ray.get(piece.source)[piece.first : piece.first + piece.num_rows]
        expected = trainer.routes([*prompt, *sequence.token_ids.tolist()][:-1])
        np.testing.assert_array_equal(np.sort(routes, -1), np.sort(expected, -1))


def test_each_refit_is_compared_in_every_tensor_and_factor(engine: VllmEngine, trainer: AdapterTrainer) -> None:
    trainer.refit(engine)
    check = adapter_check(engine, trainer)
    for _ in range(3):
        assert check.after_refit(engine).largest < 2e-5
        assert check.share_compared == 1
        trainer.move()
        trainer.refit(engine)
    assert check.num_failed == 0


NAMED = {
    "not delivered": r"in copy 0 \d+ of \d+ tensors differ: base_model\.model\.\S+lora_A\.weight",
    "the old one stays": r"does not use changed adapters: .* tensors differ: base_model\.model\.\S+lora_B\.weight",
    # Of an engine that has had another adapter before, even the first values differ.
    "stacked": r"keeps something of earlier weights|tensors differ: base_model\.model\.\S+lora_B\.weight",
    "another scale": r"does not use changed adapters: .* tensors differ: base_model\.model\.\S+lora_B\.weight",
    "not selected": r"does not use changed adapters: .* The \d+ tensors that it stores are the trainer's",
}
"""What the check says of each fault at the first sync."""


@pytest.mark.parametrize("in_float32", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_is_found_at_the_first_sync(
    engine: VllmEngine, trainer: AdapterTrainer, fault: str, in_float32: bool
) -> None:
    assert NAMED.keys() == FAULTS.keys() - {"none"}
    tell_workers(engine, "plant", fault)
    try:
        trainer.refit(engine)
        with pytest.raises(WeightSyncError, match=NAMED[fault]):
            adapter_check(engine, trainer, in_float32=in_float32).after_refit(engine)
    finally:
        tell_workers(engine, "plant", "none")


def test_an_adapter_that_is_in_the_base_too_is_found_at_the_first_sync(
    engine: VllmEngine, trainer: AdapterTrainer
) -> None:
    """The trainer begins with an adapter, and sends its base merged."""
    trainer.move()
    trainer.on_the_way = lambda tensors: {name: trainer.merged().get(name, tensor) for name, tensor in tensors.items()}
    trainer.refit(engine)
    with pytest.raises(WeightSyncError, match=r"tensors differ: model\.layers\.0\.\S+\.weight"):
        adapter_check(engine, trainer).after_refit(engine)


@pytest.mark.parametrize(
    ("problem", "said"),
    {
        "a layer is missing": r"tensors differ: base_model\.model\.model\.layers\.0\.",
        "a module without an adapter": r"vLLM applies no adapters to 1 modules: model\.layers\.0\.mlp\.experts\.0",
        "no factor": r"no factor of an adapter has arrived",
    }.items(),
)
def test_factors_that_do_not_fit_are_named(
    vllm_cluster: RayCluster, engine: VllmEngine, trainer: AdapterTrainer, problem: str, said: str
) -> None:
    """A refit that fails ends the engines, so the next one starts new ones."""
    expert = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_{}.weight"
    changes = {
        "a layer is missing": lambda tensors: {
            name: each for name, each in tensors.items() if not re.search(r"\.layers\.0\..*lora_", name)
        },
        "a module without an adapter": lambda tensors: {
            **tensors,
            **{expert.format(factor): each for factor, each in zip("AB", [*tensors.values()][-2:], strict=True)},
        },
        "no factor": lambda tensors: {name: each for name, each in tensors.items() if "lora_" not in name},
    }
    trainer.on_the_way = changes[problem]
    with pytest.raises(WeightSyncError, match=said):
        trainer.refit(engine)
        adapter_check(engine, trainer).after_refit(engine)


def test_responses_that_an_update_interrupts_have_tokens_of_both_adapters(
    engine: VllmEngine, trainer: AdapterTrainer, tmp_path: Path
) -> None:
    old = AdapterTrainer(tmp_path / "old", MODULES)
    trainer.refit(engine)
    asked = requests(24, LONG)
    found = generated_across_an_update(engine, trainer, asked, num_steps=15)
    mixed = 0
    for request, sequence in zip(asked, found, strict=True):
        versions = np.broadcast_to(sequence.weight_version, len(sequence.token_ids))
        whole = [*request.token_ids, *sequence.token_ids.tolist()]
        for version, of in enumerate((old, trainer)):
            own = versions == version
            expected = of.scores([whole])[0][len(request.token_ids) - 1 :]
            np.testing.assert_allclose(sequence.logprobs[own], expected[own], atol=2e-5)
        mixed += len({*versions.tolist()}) == 2
    assert mixed


def test_a_killed_engine_gets_the_base_and_the_current_adapter(vllm_cluster: RayCluster, tmp_path: Path) -> None:
    trainer = AdapterTrainer(tmp_path / "model", MODULES)
    engine = start_engine(vllm_cluster, trainer, adapters=trainer.settings)
    try:
        trainer.refit(engine)
        check = adapter_check(engine, trainer)
        check.after_refit(engine)
        trainer.move()
        trainer.refit(engine)
        trainer.sent.clear()
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        asked = requests(4)
        found = generated(engine, asked)
        assert gaps(trainer, [request.token_ids for request in asked], found) < 2e-5
        assert trainer.sent == [{*trainer.tensors, *trainer.factors}]
        assert check.after_refit(engine).largest < 2e-5
        assert check.num_failed == 0
    finally:
        engine.shutdown()


def test_rank_stabilized_adapters_of_one_projection(vllm_cluster: RayCluster, tmp_path: Path) -> None:
    """A rank that is none of vLLM's, and layers whose joined modules have adapters in part."""
    trainer = AdapterTrainer(tmp_path / "model", ("q_proj",), lora_config(rank=9, alpha=5.0, use_rslora=True))
    engine = start_engine(vllm_cluster, trainer, adapters=trainer.settings)
    try:
        trainer.refit(engine)
        assert adapter_check(engine, trainer).after_refit(engine).largest < 2e-5
        trainer.move()
        trainer.refit(engine)
        asked = requests(4)
        assert gaps(trainer, [request.token_ids for request in asked], generated(engine, asked)) < 2e-5
    finally:
        engine.shutdown()


def test_prefixes_of_different_adapters_are_apart_even_in_a_cache_that_is_not_reset(
    vllm_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "VllmWorker", worker_with_faults())
    trainer = AdapterTrainer(tmp_path / "model", MODULES)
    options = {"adapters": trainer.settings, "prefix_caching": "reset", "max_tokens": 320}
    engine = start_engine(vllm_cluster, trainer, **options)
    prompt = tuple(np.random.default_rng(0).integers(3, 60, BLOCK + 10).tolist())
    asked = [replace(request, token_ids=prompt) for request in requests(1, LONG)]
    try:
        trainer.refit(engine)
        tell_workers(engine, "never_reset")
        counts = []
        for _ in range(3):
            for _ in range(2):
                found = generated(engine, asked)
                counts.append(found[0].num_cached_tokens)
                assert gaps(trainer, [prompt], found) < 2e-5
            trainer.move()
            trainer.refit(engine)
        assert counts == [0, BLOCK] * 3
    finally:
        engine.shutdown()
