# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A second engine under GRPO, with weights of its own that come from the trainer's ranks: tokens, versions, memory."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation import refit as refit_module
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine, generate_batches
from nemo_rl_moe.models.hf_files import find_model
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from tests.functional import grpo_runs, sft_runs
from tests.support.grpo_inputs import cluster_config
from tests.support.loggers import read_jsonl
from tests.support.scripted_rollouts import generate_all
from tests.support.tiny_model import tiny_batch
from tests.support.transformers_engine import TransformersEngine

pytestmark = pytest.mark.shared_ray

BACKEND = "tests.support.transformers_engine:make_engine"
GREEDY = SamplingParameters(max_new_tokens=12, temperature=0.0)
SAMPLED = SamplingParameters(max_new_tokens=12, temperature=0.8, stop_token_ids=(1,))
MIB = 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    started = RayCluster(cluster_config(1, 0, 2))
    yield started
    started.shutdown()


@contextmanager
def started_policy(cluster: RayCluster, folder: Path, **model: Any) -> Iterator[tuple[MegatronPolicy, Path]]:
    """Two ranks with half of the experts each, and the model's folder."""
    model_folder = sft_runs.make_model_folder(folder / "model", **model)
    overrides = grpo_runs.settings(
        folder,
        folder,
        policy__model_name=model_folder,
        policy__megatron_cfg__expert_model_parallel_size=2,
        policy__train_global_batch_size=8,
        policy__train_micro_batch_size=2,
        policy__megatron_cfg__optimizer__lr=0.01,
        policy__megatron_cfg__optimizer__min_lr=0.01,
    )
    config = load_grpo_config(grpo_runs.EXEMPLAR, overrides, check_paths=False)
    policy = MegatronPolicy(config, cluster, seed=1, num_steps=9, source=find_model(config.policy), model_files={})
    try:
        yield policy, model_folder
    finally:
        policy.shutdown()


@contextmanager
def started_engine(model_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(model_folder)
    try:
        yield engine
    finally:
        engine.shutdown()


def refit(engine: GenerationEngine, policy: MegatronPolicy) -> None:
    """Update the weights as the loop does."""
    refit_module.refit(engine, policy)
    assert not list(SHARED_MEMORY.glob(f"nemo_rl_moe-weights-*-{os.getpid()}-*")), "nothing is left of a transfer"


def sequences(engine: GenerationEngine, sampling: SamplingParameters) -> list[GeneratedSequence]:
    """Generate from prompts of different lengths; return the sequences in their order."""
    generator = np.random.default_rng(5)
    requests = [
        GenerationRequest(tuple(generator.integers(2, 45, 1 + index % 4).tolist()), 70 + index, sampling)
        for index in range(12)
    ]
    found = dict(generate_all(engine, requests))
    assert sorted(found) == list(range(len(requests)))
    return [found[index] for index in range(len(requests))]


def assert_same(
    trainers: GenerationEngine, engine: GenerationEngine, version: int, tolerance: float = 5e-6
) -> list[list[int]]:
    """Both engines draw the same tokens, and are of one mind about their log-probabilities; the greedy tokens."""
    greedy = [sequence.token_ids.tolist() for sequence in sequences(trainers, GREEDY)]
    assert [sequence.token_ids.tolist() for sequence in sequences(engine, GREEDY)] == greedy
    for own, other in zip(sequences(trainers, SAMPLED), sequences(engine, SAMPLED), strict=True):
        assert other.token_ids.tolist() == own.token_ids.tolist()
        assert other.is_truncated == own.is_truncated
        assert own.weight_version == other.weight_version == version
        np.testing.assert_allclose(other.logprobs, own.logprobs, rtol=0, atol=tolerance)
    return greedy


def growth_of_peak(action: Callable[[], Any]) -> int:
    """Bytes by which this process's memory exceeded, at most, what it had before."""

    def bytes_of(field: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = bytes_of("VmRSS")
    action()
    return bytes_of("VmHWM") - before


def weights_over_the_driver(policy: MegatronPolicy) -> int:
    """Bytes of the weights, all of which this process holds for a moment."""
    held: dict[str, torch.Tensor] = {}
    with policy.weight_transport() as transport:
        spec = transport.open(num_receivers=1, version=policy.weight_version)
        load = lambda tensors: held.update((name, tensor.clone()) for name, tensor in tensors)  # noqa: E731
        receiving = Thread(target=spec.receive, args=(0, load))
        receiving.start()
        num_bytes = transport.send()
        receiving.join()
    assert num_bytes == sum(tensor.nbytes for tensor in held.values())
    return num_bytes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_in_other_processes_has_the_trainers_weights(cluster: RayCluster, tmp_path: Path) -> None:
    """Tokens, log-probabilities and versions; then the driver's memory with a model ten times as large."""
    growths, over_the_driver, sizes = {}, {}, {}
    with started_policy(cluster, tmp_path / "small", moe_intermediate_size=384) as (policy, model_folder):
        trainers = LockstepEngine(partial(generate_batches, policy.generate))
        with started_engine(model_folder) as engine:
            with pytest.raises(RuntimeError, match="no weights yet"):
                sequences(engine, GREEDY)
            refit(engine, policy)
            before = assert_same(trainers, engine, version=0)
            batch = tiny_batch(4, vocabulary_size=45)
            policy.train(batch, sft_loss)
            result = policy.train(batch, sft_loss)
            assert policy.weight_version == result.weight_version == 2
            refit(engine, policy)
            assert assert_same(trainers, engine, version=2) != before, "the weights have changed"
            engine.sleep()
            engine.wake()
            assert_same(trainers, engine, version=2)

            problem = pytest.raises(WeightSyncError, match="it has the weights of version 2, expected 3")
            with problem, policy.weight_transport() as transport:
                engine.update_weights(transport, 3)
            with pytest.raises(RuntimeError, match="no weights yet"):
                sequences(engine, GREEDY)
            # The trainer's ranks go on, and a later transfer succeeds.
            growths["small"] = growth_of_peak(lambda: refit(engine, policy))
            assert_same(trainers, engine, version=2)
            assert policy.train(batch, sft_loss).weight_version == 3
        over_the_driver["small"] = growth_of_peak(lambda: sizes.update(small=weights_over_the_driver(policy)))

    with started_policy(cluster, tmp_path / "large", moe_intermediate_size=4096) as (policy, model_folder):
        with started_engine(model_folder) as engine:
            refit(engine, policy)
            growths["large"] = growth_of_peak(lambda: refit(engine, policy))
            # Its experts add up ten times as many numbers.
            assert_same(LockstepEngine(partial(generate_batches, policy.generate)), engine, version=0, tolerance=5e-5)
        over_the_driver["large"] = growth_of_peak(lambda: sizes.update(large=weights_over_the_driver(policy)))

    difference = sizes["large"] - sizes["small"]
    assert difference > 150 * MIB
    print({"bytes": sizes, "growth of the peak": growths, "over the driver": over_the_driver})
    # Seen: less than 1 MiB either way.
    assert growths["large"] - growths["small"] < 0.05 * difference
    assert over_the_driver["large"] - over_the_driver["small"] > 0.9 * difference, "the measure can show it"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run the same short recipe with either engine, as a user starts it; return the run folders."""
    folder = tmp_path_factory.mktemp("engines")
    data = grpo_runs.make_prompts(folder / "data", 40)
    found = {}
    for name, backend in (("megatron", "megatron"), ("transformers", BACKEND)):
        (folder / name).mkdir()
        overrides = grpo_runs.settings(
            folder / name,
            data,
            policy__generation__backend=json.dumps(backend),
            policy__megatron_cfg__optimizer__lr=0.003,
            grpo__val_temperature=0,
            grpo__val_num_generations=1,
            grpo__val_period=1,
            env__reward__kind="callable",
            env__reward__function="tests.functional.grpo_runs:reward_that_fails_at_times",
            **sft_runs.only_jsonl(),
        )
        grpo_runs.run_here(overrides, folder / name)
        found[name] = sft_runs.only_run_folder(folder / name)
    return found


def samples(run_folder: Path, split: str) -> list[tuple[Any, ...]]:
    """Responses of each step."""
    lines = map(json.loads, (run_folder / "samples.jsonl").read_text().splitlines())
    return [
        (line["step"], line["sample_id"], line["response"], line["num_tokens"], line["weight_version"])
        for line in lines
        if line["split"] == split
    ]


@pytest.mark.full
def test_grpo_with_another_engine_is_the_same_run(runs: dict[str, Path]) -> None:
    for split in ("val", "train"):
        assert samples(runs["transformers"], split) == samples(runs["megatron"], split)
    validation = samples(runs["transformers"], "val")
    first, last = ({(name, response) for step, name, response, _, _ in validation if step == n} for n in (0, 3))
    assert first != last, "the weights have changed"
    # A step trains on responses of the weights before it; validation comes after it.
    for split, delay in (("train", 1), ("val", 0)):
        versions = {(step, version) for step, _, _, _, version in samples(runs["transformers"], split)}
        assert versions == {(step, step - delay) for step in range(delay, 4)}
    history = read_jsonl(runs["transformers"] / "metrics.jsonl")
    assert max(value for _, value in history["train/token_mult_prob_error"]) < 1 + 1e-6


@pytest.mark.full
def test_the_time_of_the_refit_is_reported(runs: dict[str, Path]) -> None:
    history = read_jsonl(runs["transformers"] / "metrics.jsonl")
    assert [step for step, _ in history["timing/refit/seconds"]] == [1, 2, 3]
    assert all(value > 0 for _, value in history["timing/refit/seconds"])
    assert "timing/refit/seconds" not in read_jsonl(runs["megatron"] / "metrics.jsonl")


@pytest.mark.full
def test_each_refit_is_checked_tensor_by_tensor(runs: dict[str, Path]) -> None:
    history = read_jsonl(runs["transformers"] / "metrics.jsonl")
    assert history["train/refit/weights_compared"] == [(step, 1.0) for step in (1, 2, 3)], "all of them"
    assert {value for _, value in history["train/refit/checks_failed"]} == {0.0}


@pytest.mark.slow
def test_the_engine_of_the_page_generates(tmp_path: Path) -> None:
    """The documentation's, found in the folder that the command runs in."""
    page = (sft_runs.REPOSITORY_ROOT / "docs/adding-a-generation-engine.md").read_text(encoding="utf-8")
    (module,) = re.findall(r"^```python\n(# my_engine\.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_engine.py").write_text(module, encoding="utf-8")
    overrides = grpo_runs.settings(
        tmp_path,
        grpo_runs.make_prompts(tmp_path / "data", 12),
        policy__generation__backend='"my_engine:ENGINE"',
        **{"+policy__generation__toy": "{num_workers: 2}"},
        grpo__max_num_steps=2,
        grpo__val_period=0,
        **sft_runs.only_jsonl(),
    )
    grpo_runs.run(overrides, tmp_path)
    found = samples(sft_runs.only_run_folder(tmp_path), "train")
    assert {(step, version) for step, _, _, _, version in found} == {(1, 0), (2, 1)}
    assert len({response for step, _, response, _, _ in found if step == 1}) == 1


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("no_such_module:make", "policy.generation.backend: no_such_module:make: there is no module no_such_module"),
        ("json:dumpz", "policy.generation.backend: json:dumpz: json has no dumpz; did you mean dump"),
        ("pytest:__name__", "policy.generation.backend: pytest:__name__ is 'pytest' (str), expected an Engine"),
    ],
)
def test_an_engine_that_is_not_there_is_reported(backend: str, problem: str, tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 4)
    changed = grpo_runs.settings(tmp_path, data, policy__generation__backend=json.dumps(backend))
    done = grpo_runs.run_here(changed, tmp_path, exit_code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert line.startswith(f"error: {problem}")
