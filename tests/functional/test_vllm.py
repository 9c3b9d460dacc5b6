# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines: the trainer's log-probs, weights that arrive, faults that are found, engines that die."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import GenerationError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.vllm.diagnosis import disagreement
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.generation.vllm.releases import installed_release
from nemo_rl_moe.weight_sync.refit_check import RefitCheck, probe_sequences
from tests.support.clusters import cluster_config
from tests.support.vllm_engines import VOCABULARY_SIZE, Change, Trainer, start_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(installed_release() is None, reason="vLLM is not installed: make vllm"),
]

PROMPT = (3, 4, 5, 6)
FREE = SamplingParameters(max_new_tokens=16)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = RayCluster(cluster_config(1, 0, 2))
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engine(cluster: RayCluster, trainer: Trainer) -> Iterator[VllmEngine]:
    engine = start_engine(cluster, trainer)
    yield engine
    engine.shutdown()


@pytest.fixture
def fitted(engine: VllmEngine, trainer: Trainer) -> VllmEngine:
    trainer.refit(engine)
    return engine


def requests(count: int, sampling: SamplingParameters = FREE) -> list[GenerationRequest]:
    return [GenerationRequest((*PROMPT, 7 + index % 5), 2**63 + index, sampling) for index in range(count)]


def generated(engine: VllmEngine, asked: list[GenerationRequest]) -> list[GeneratedSequence]:
    found = list(engine.generate(asked))
    assert sorted(index for index, _ in found) == list(range(len(asked))), "each once"
    return [sequence for _, sequence in sorted(found, key=lambda pair: pair[0])]


def check_of(engine: VllmEngine, trainer: Trainer, **changes: object) -> RefitCheck:
    sequences = probe_sequences(4, 24, VOCABULARY_SIZE)
    check = RefitCheck(
        sequences,
        1.0,
        trainer.scores,
        lambda altered: trainer.refit(engine, altered=altered),
        lambda: disagreement(engine.module_outputs, trainer.save_to, sequences[0], in_float32=True, topk=2),
        in_float32=True,
        bound_nats=None,
        refits_again=False,
    )
    return replace(check, **changes)


@pytest.mark.parametrize(
    "sampling",
    [
        FREE,
        replace(FREE, temperature=0.7),
        replace(FREE, temperature=1.6, top_k=5, top_p=0.8),
        replace(FREE, temperature=0.0),
    ],
    ids=["plain", "temperature", "all at once", "greedy"],
)
def test_log_probs_are_those_of_a_training_forward(
    fitted: VllmEngine, trainer: Trainer, sampling: SamplingParameters
) -> None:
    asked = requests(12, sampling)
    for request, sequence in zip(asked, generated(fitted, asked), strict=True):
        whole = [*request.token_ids, *sequence.token_ids.tolist()]
        (expected,) = trainer.scores([whole], sampling.temperature or 1.0)
        np.testing.assert_allclose(sequence.logprobs, expected[len(request.token_ids) - 1 :], atol=5e-6)
        assert sequence.is_truncated
        assert sequence.weight_version == trainer.version


def test_top_k_and_top_p_choose_among_the_likeliest(fitted: VllmEngine, trainer: Trainer) -> None:
    greedy = generated(fitted, requests(5, replace(FREE, temperature=0.0)))
    for sampling in (replace(FREE, top_k=1), replace(FREE, top_p=1e-6)):
        for one, other in zip(greedy, generated(fitted, requests(5, sampling)), strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()


def test_a_response_depends_on_its_request_alone(fitted: VllmEngine) -> None:
    asked = requests(20)
    together = generated(fitted, asked)
    for index in (0, 7, 19):
        (alone,) = generated(fitted, [asked[index]])
        assert alone.token_ids.tolist() == together[index].token_ids.tolist()
    assert len({tuple(sequence.token_ids.tolist()) for sequence in together}) > 15, "seeds differ"


def test_stop_tokens_end_a_response_and_belong_to_it(fitted: VllmEngine) -> None:
    free = generated(fitted, requests(8, replace(FREE, temperature=0.0)))
    stop = int(free[0].token_ids[4])
    for one, cut in zip(
        free, generated(fitted, requests(8, replace(FREE, temperature=0.0, stop_token_ids=(stop,)))), strict=True
    ):
        places = np.flatnonzero(one.token_ids == stop)
        end = places[0] + 1 if len(places) else len(one.token_ids)
        assert cut.token_ids.tolist() == one.token_ids[:end].tolist()
        assert cut.is_truncated == (not len(places))


def test_weights_arrive_again_and_again(engine: VllmEngine, trainer: Trainer) -> None:
    check = check_of(engine, trainer)
    for _ in range(4):
        trainer.move()
        trainer.refit(engine)
        gap = check.after_refit(engine)
        assert gap.largest < 2e-5
    assert check.num_failed == 0


def without(part: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def changed(part: str, change: object) -> Change:
    def apply(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert any(part in name for name in tensors)
        return {name: change(tensor) if part in name else tensor for name, tensor in tensors.items()}  # type: ignore[operator]

    return apply


def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two layers' weights change places."""
    other = {"model.layers.1.": "model.layers.2.", "model.layers.2.": "model.layers.1."}
    return {next((name.replace(a, b) for a, b in other.items() if a in name), name): t for name, t in tensors.items()}


FAULTS: dict[str, tuple[Change, str]] = {
    "an expert left out": (without("layers.1.mlp.experts.3."), "model.layers.1.mlp"),
    "an expert's zeros": (
        changed("layers.2.mlp.experts.5.down_proj", torch.zeros_like),
        "model.layers.2.mlp",
    ),
    "a router's rows in another order": (
        changed("layers.1.mlp.gate.weight", lambda tensor: tensor.roll(1, 0)),
        "model.layers.1.mlp.gate",
    ),
    "layers swapped": (swapped, "model.layers.1."),
    "a norm off by a hundredth": (
        changed("layers.0.input_layernorm", lambda tensor: 1.01 * tensor),
        "model.layers.0.",
    ),
    "rounded to bfloat16": (changed("layers.0.self_attn.v_proj", lambda tensor: tensor.bfloat16()), "model.layers.0."),
    "the output layer of the version before": (
        changed("lm_head", lambda tensor: 0.97 * tensor),
        "the output layer differs",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_refit_is_found_and_named(engine: VllmEngine, trainer: Trainer, fault: str) -> None:
    change, named = FAULTS[fault]
    trainer.refit(engine)
    check_of(engine, trainer).after_refit(engine)
    trainer.move()
    trainer.refit(engine, change)
    check = check_of(engine, trainer)
    with pytest.raises(WeightSyncError) as error:
        check.after_refit(engine)
    assert "does not compute with the trainer's weights" in str(error.value)
    assert named in str(error.value)
    assert check.num_failed == 1
    # Sent once more the weights are right; then the run goes on.
    trainer.refit(engine, change)
    again = check_of(engine, trainer, refits_again=True)
    assert again.after_refit(engine).largest < 2e-5
    assert again.num_failed == 1


def test_an_expert_that_computes_something_else_is_named(engine: VllmEngine, trainer: Trainer) -> None:
    trainer.refit(engine, changed("layers.1.mlp.experts.6.up_proj", torch.zeros_like))
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\.mlp, in its experts 6 "):
        check_of(engine, trainer).after_refit(engine)


def test_in_sixteen_bits_a_round_trip_is_exact(cluster: RayCluster, trainer: Trainer) -> None:
    engine = start_engine(cluster, trainer, dtype="bfloat16")
    try:
        trainer.refit(engine)
        check = check_of(engine, trainer, in_float32=False)
        gap = check.after_refit(engine)
        assert 1e-4 < gap.mean < 0.1
        trainer.refit(engine, changed("layers.1.mlp.gate.weight", lambda tensor: tensor.roll(1, 0)))
        with pytest.raises(WeightSyncError, match="does not compute with the trainer's weights"):
            check.after_refit(engine)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_others_take_over_what_an_engine_had(
    cluster: RayCluster, trainer: Trainer, signal_number: signal.Signals
) -> None:
    told: list[str] = []
    engine = start_engine(cluster, trainer, num_engines=2, stall_timeout_s=4.0, warn=told.append)
    try:
        trainer.refit(engine)
        # They end one after the other: some are answered before the engine dies, others not.
        asked = [
            replace(request, sampling=replace(FREE, max_new_tokens=8 + 3 * index))
            for index, request in enumerate(requests(24))
        ]
        expected = [sequence.token_ids.tolist() for sequence in generated(engine, asked)]
        victim, _ = engine.process_ids()
        answers = engine.generate(asked)
        found = [next(answers)]
        os.kill(victim, signal_number)
        found += list(answers)
        assert sorted(index for index, _ in found) == list(range(24)), "each once"
        assert {index: sequence.token_ids.tolist() for index, sequence in found} == dict(enumerate(expected))
        (line,) = told
        assert "vLLM engine 0" in line
        assert "the other 1 take over what it had" in line
        trainer.move()
        trainer.refit(engine)
        assert len(engine.process_ids()) == 2, "another one takes its place"
        check_of(engine, trainer).after_refit(engine)
    finally:
        engine.shutdown()


def test_the_only_engine_dies_and_the_run_goes_on(cluster: RayCluster, trainer: Trainer) -> None:
    told: list[str] = []
    engine = start_engine(cluster, trainer, warn=told.append)
    try:
        trainer.refit(engine)
        asked = requests(6, replace(FREE, max_new_tokens=80))
        expected = [sequence.token_ids.tolist() for sequence in generated(engine, asked)]
        os.kill(engine.process_ids()[0], signal.SIGKILL)
        assert [sequence.token_ids.tolist() for sequence in generated(engine, asked)] == expected
        assert "engines are started anew" in told[0]
    finally:
        engine.shutdown()


def test_an_engine_that_cannot_start_is_one_line(cluster: RayCluster, trainer: Trainer) -> None:
    started = time.monotonic()
    with pytest.raises(GenerationError, match="vLLM engine 0 of 1 cannot start: ") as error:
        start_engine(cluster, trainer, max_tokens=10**6)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 120


def test_a_refit_that_is_cut_off_leaves_no_engine_that_generates(
    cluster: RayCluster, engine: VllmEngine, trainer: Trainer
) -> None:
    trainer.refit(engine)

    def breaks_off(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = list(tensors)
        return {name: tensors[name] if index < len(names) // 2 else _Raises() for index, name in enumerate(names)}  # type: ignore[misc]

    with pytest.raises(Exception, match="cut off"):
        trainer.refit(engine, breaks_off)
    # The next request gets the weights first: all of them, never a mixture.
    (sequence,) = generated(engine, requests(1))
    assert sequence.weight_version == trainer.version
    check_of(engine, trainer).after_refit(engine)


class _Raises:
    def detach(self) -> Tensor:
        raise RuntimeError("cut off")
