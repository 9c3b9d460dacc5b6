# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines: the trainer's log-probs and ends of responses, weights that arrive, faults that are found."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.interface import GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.vllm import actors
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.models.megatron.generation.sampling import StopCondition
from nemo_rl_moe.weight_sync.board import FolderBoard
from tests.support.scripted_rollouts import generate_all
from tests.support.vllm_engines import (
    FREE,
    VOCABULARY_SIZE,
    Change,
    Trainer,
    check_of,
    generated,
    letters_tokenizer,
    requests,
    start_engine,
    vllm_tests,
    worker_that_keeps_kernels,
)

pytestmark = vllm_tests()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engine(vllm_cluster: RayCluster, trainer: Trainer) -> Iterator[VllmEngine]:
    engine = start_engine(vllm_cluster, trainer)
    yield engine
    engine.shutdown()


@pytest.fixture
def fitted(engine: VllmEngine, trainer: Trainer) -> VllmEngine:
    trainer.refit(engine)
    return engine


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


def test_prompts_of_more_tokens_than_a_step_takes_are_answered_as_if_alone(fitted: VllmEngine) -> None:
    # A step takes 2048 tokens: the prompt at that place must not be cut in two.
    asked = [
        GenerationRequest(tuple((7 * index + place) % VOCABULARY_SIZE for place in range(length)), index, FREE)
        for index, length in enumerate([51, 67, 79] * 14)
    ]
    engines = fitted.process_ids()
    together = generated(fitted, asked)
    assert fitted.process_ids() == engines, "none has failed"
    for index in (0, 29, 30, 31, 32, 33, 41):
        (alone,) = generated(fitted, [asked[index]])
        assert alone.token_ids.tolist() == together[index].token_ids.tolist()


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


def test_responses_come_as_they_finish(fitted: VllmEngine) -> None:
    lengths = [2, *[40] * 30, 90]
    asked = [
        replace(request, sampling=replace(FREE, max_new_tokens=length))
        for request, length in zip(requests(len(lengths)), lengths, strict=True)
    ]
    before = fitted.num_steps()
    answers = generate_all(fitted, asked)
    first, _ = next(answers)
    steps_of_first = fitted.num_steps() - before
    assert first == 0
    rest = [number for number, _ in answers]
    assert sorted(rest) == list(range(1, len(lengths)))
    assert rest[-1] == len(lengths) - 1, "the longest comes last"
    assert 2 <= steps_of_first < fitted.num_steps() - before == 90


def test_stop_strings_end_a_response_where_the_trainers_engine_ends_it(
    vllm_cluster: RayCluster, trainer: Trainer, tmp_path: Path
) -> None:
    tokenizer = letters_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    engine = start_engine(vllm_cluster, trainer, decodes_text=True, model_files=files | trainer.model_files)
    try:
        trainer.refit(engine)
        free = generated(engine, requests(24))
        texts = [tokenizer.decode(sequence.token_ids) for sequence in free]
        # Over three tokens; one that ends the longest response; one that is nowhere.
        sampling = replace(FREE, stop_strings=(texts[0][4:7], texts[1][-2:], "no such"))
        stop = StopCondition(sampling, tokenizer)
        cut = generated(engine, requests(24, sampling))
        ends = []
        for whole, sequence in zip(free, cut, strict=True):
            tokens = whole.token_ids
            ended = [bool(stop.ended(tokens[None], np.array([length]))[0]) for length in range(1, len(tokens) + 1)]
            end = ended.index(True) + 1 if any(ended) else len(tokens)
            assert sequence.token_ids.tolist() == tokens[:end].tolist()
            np.testing.assert_allclose(sequence.logprobs, whole.logprobs[:end], atol=5e-6)
            assert sequence.is_truncated == (not any(ended))
            ends.append(end if any(ended) else 0)
        assert 0 < ends[0] < 10
        assert ends[1] > 0
        assert 0 in ends
    finally:
        engine.shutdown()


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


FAULTS: dict[str, tuple[Change | None, str]] = {
    "all weights of the version before": (None, "model.embed_tokens "),
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
    planted, named = FAULTS[fault]
    trainer.refit(engine)
    check_of(engine, trainer).after_refit(engine)
    before = dict(trainer.tensors)
    change = planted or (lambda tensors: before)
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


def test_a_resumed_run_whose_engine_keeps_the_weights_of_the_start_is_found(
    engine: VllmEngine, trainer: Trainer
) -> None:
    start = dict(trainer.tensors)
    for _ in range(3):  # what the checkpoint has
        trainer.move()
    trainer.refit(engine, lambda tensors: start)
    check = check_of(engine, trainer)
    with pytest.raises(WeightSyncError, match="does not compute with the trainer's weights"):
        check.after_refit(engine)
    trainer.refit(engine)
    assert check.after_refit(engine).largest < 2e-5


def test_an_expert_that_computes_something_else_is_named(engine: VllmEngine, trainer: Trainer) -> None:
    trainer.refit(engine, changed("layers.1.mlp.experts.6.up_proj", torch.zeros_like))
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\.mlp\.experts, expert 6 "):
        check_of(engine, trainer).after_refit(engine)


def test_in_sixteen_bits_a_round_trip_is_exact(vllm_cluster: RayCluster, trainer: Trainer) -> None:
    engine = start_engine(vllm_cluster, trainer, dtype="bfloat16")
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


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_an_output_layer_with_the_embeddings_weights_gets_new_ones(
    vllm_cluster: RayCluster, tmp_path: Path, dtype: str
) -> None:
    """They are sent once, and on CPUs the layer computes with a packed copy of them."""
    trainer = Trainer(tmp_path / "model", is_tied=True)
    assert "lm_head.weight" not in trainer.tensors
    engine = start_engine(vllm_cluster, trainer, dtype=dtype)
    try:
        check = check_of(engine, trainer, in_float32=dtype == "float32")
        for _ in range(2):
            trainer.refit(engine)
            assert check.after_refit(engine).mean < (2e-5 if dtype == "float32" else 0.1)
            trainer.move()
    finally:
        engine.shutdown()


TINY_FAULTS: dict[str, Change] = {
    "model.layers.1.mlp.experts.3.up_proj.weight": changed("1.mlp.experts.3.up_proj", lambda each: 1.01 * each),
    "model.embed_tokens.weight": changed("embed_tokens", lambda each: each + 1e-3),
    "model.layers.0.self_attn.k_proj.weight": changed("layers.0.self_attn.k_proj", lambda each: each.roll(1, 0)),
    "model.layers.2.post_attention_layernorm.weight": changed("layers.2.post_attention", torch.zeros_like),
    "lm_head.weight": changed("lm_head", lambda each: 1.01 * each),
}
"""By the one tensor that they change."""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_tensor_of_an_engine_is_compared(vllm_cluster: RayCluster, trainer: Trainer, dtype: str) -> None:
    """Joined projections, packed kernels, and experts that are filled up to a multiple of 32."""
    engine = start_engine(vllm_cluster, trainer, dtype=dtype)
    try:
        trainer.refit(engine)
        check = check_of(
            engine,
            trainer,
            in_float32=dtype == "float32",
            start_fingerprints=trainer.start_fingerprints,
            number_format=dtype,
        )
        for _ in range(3):
            check.after_refit(engine)
            assert check.share_compared == 1
            trainer.move()
            trainer.refit(engine)
        for name, change in TINY_FAULTS.items():
            trainer.refit(engine, change)
            named = f"in copy 0 1 of {len(trainer.tensors)} tensors differ: {name} "
            with pytest.raises(WeightSyncError, match=re.escape(named)):
                check.after_refit(engine)
    finally:
        engine.shutdown()


def test_kernels_that_stay_packed_are_found(
    vllm_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "VllmWorker", worker_that_keeps_kernels())
    # Experts so large that their memory goes back to the system, and is not the new weights' by luck.
    trainer = Trainer(tmp_path / "model", expert_size=256)
    engine = start_engine(vllm_cluster, trainer)
    try:
        trainer.refit(engine)
        with pytest.raises(WeightSyncError, match=r"whose output is wrong is model\.layers\.\d\.mlp"):
            check_of(engine, trainer).after_refit(engine)
        # The bounds of 16 bits hold too. A round trip alone may come back to the same garbage, in the same memory.
        with pytest.raises(WeightSyncError, match=r"does not change copy|keeps something of|does not compute with"):
            check_of(engine, trainer, in_float32=False).after_refit(engine)
    finally:
        engine.shutdown()


def test_a_bucket_that_is_lost_or_damaged_is_named(
    engine: VllmEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = FolderBoard.put_file

    def lose(board: FolderBoard, name: str, write: Callable[[Path], object]) -> None:
        if name != "0000-000002.bucket":
            put_file(board, name, write)

    def damage(board: FolderBoard, name: str, write: Callable[[Path], object]) -> None:
        def spoil(path: Path) -> None:
            write(path)
            if name == "0000-000002.bucket":
                content = bytearray(path.read_bytes())
                content[-1] ^= 1  # one bit, of its last tensor
                path.write_bytes(content)

        put_file(board, name, spoil)

    for fault, problem in (
        (lose, r"0000-000002\.bucket is gone before receivers \[0\] have taken it"),
        (damage, r"receiver 0: 0000-000002\.bucket is damaged in (model|lm_head)\.\S+: not what sender 0"),
    ):
        with monkeypatch.context() as patch, pytest.raises(WeightSyncError, match=problem):
            patch.setattr(FolderBoard, "put_file", fault)
            trainer.refit(engine)
    trainer.refit(engine)
    check_of(engine, trainer).after_refit(engine)


def test_a_refit_that_is_cut_off_leaves_no_engine_that_generates(engine: VllmEngine, trainer: Trainer) -> None:
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
    @property
    def nbytes(self) -> int:
        raise RuntimeError("cut off")
