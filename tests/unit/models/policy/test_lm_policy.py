# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the policy over fake workers: who gets what, and how the answers come together."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_run import RolePlacementConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence
from nemo_rl_moe.distributed.microbatches import DynamicBatching, PackedBatching, PlainBatching
from nemo_rl_moe.distributed.shared_arrays import ArrayStore
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.errors import CheckpointError, CheckpointSaveError, ConfigurationError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, SamplingParameters
from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.flops import ForwardFlops
from nemo_rl_moe.models.hf_files import ModelSource
from nemo_rl_moe.models.images import IMAGE_IDS, PIXELS
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.policy import model_workers
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.models.policy.model_workers import choose_batching
from nemo_rl_moe.models.rank_results import RankDescription, RankTrainResult
from nemo_rl_moe.weight_sync.transport_backends import CollectiveTransport
from tests.conftest import REPOSITORY_ROOT
from tests.support.grpo_fakes import small_config
from tests.support.quick_list import some_of
from tests.support.tiny_model import tiny_batch
from tests.support.vision_models import random_image, vision_batch


def trained_by(rank: int) -> RankTrainResult:
    """A rank's result; one that reports has a loss, and all have memory."""
    reserved = MetricSeries((10.0 - rank,), Reduction.MAX)
    return RankTrainResult(
        global_loss=0.5,
        grad_norm=1.0,
        lr=1e-3,
        num_microbatches=1,
        microbatch_metrics={"loss": MetricSeries((0.25,), Reduction.SHARE)} if rank > 1 else {},
        moe_metrics={},
        num_updates=1,
        num_skipped_updates=0,
        skipped_in_a_row=0,
        weight_version=1,
        memory={"max_memory_reserved_gb": reserved},
    )


@dataclass
class FakeWorkers:
    """Two pipeline stages of each data-parallel rank; only the second stage reports."""

    arguments: dict[str, Any]  # what every worker was made with
    data_parallel_size: int = 2
    gpu: str | None = None  # name of every worker's card

    def __post_init__(self) -> None:
        self.problem: Exception | None = None  # of the ranks, by which sends of weights and writes of models end
        self.weight_version = 0
        self.biases: list[dict[int, np.ndarray]] = []  # expert biases of each worker's layers
        self.calls: list[tuple[Callable[..., Any], Sequence[Any]]] = []  # method and the workers' arguments
        self.places = [
            SimpleNamespace(
                data_parallel_rank=rank,
                data_parallel_size=self.data_parallel_size,
                tensor_rank=0,
                context_rank=0,
                reports_loss=stage == 1,
            )
            for stage in (0, 1)
            for rank in range(self.data_parallel_size)
        ]

    def call_all(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.calls.append((method, arguments))
        if method == MegatronModel.describe:
            flops = ForwardFlops(per_token=10, per_pair={None: 4})
            return [RankDescription(coordinates=place, forward_flops=flops, gpu=self.gpu) for place in self.places]
        if method == MegatronModel.save_weights:
            if self.problem is not None:
                raise self.problem
            return [["router.bias"] for _ in self.places]
        assert method == MegatronTrainer.load_checkpoint
        return [self.weight_version for _ in self.places]

    def start_each(
        self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...] | None]
    ) -> Callable[[], dict[int, Any]]:
        self.calls.append((method, arguments))
        return lambda: self._results(method, arguments)

    def _results(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...] | None]) -> dict[int, Any]:
        if method == MegatronModel.send_weights:
            if self.problem is not None:
                raise self.problem
            return {rank: rank for rank in range(len(self.places))}
        if method == MegatronTrainer.train:
            return {rank: trained_by(rank) for rank in range(len(self.places))}
        if method == MegatronTrainer.expert_biases:
            return {rank: self.biases[rank] for rank, given in enumerate(arguments) if given is not None}
        answers: dict[Any, Callable[..., Any]] = {
            MegatronModel.generate: self._generate,
            MegatronModel.logprobs: partial(self._logprobs, -1.0),
            MegatronTrainer.reference_logprobs: partial(self._logprobs, 1.0),
        }
        return {
            rank: answers[method](*given) if place.reports_loss else []
            for rank, (place, given) in enumerate(zip(self.places, arguments, strict=True))
            if given is not None
        }

    def _generate(self, request: GenerationBatch, max_batch_size: int | None) -> list[GeneratedSequence]:
        return [
            GeneratedSequence(np.array([*prompt, seed]), np.zeros(len(prompt) + 1), False, 0)
            for prompt, seed in zip(request.prompts, request.seeds, strict=True)
        ]

    def _logprobs(self, sign: float, microbatches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """A number that names the token and its place; rubbish on padding."""
        assert all(not batch.columns for batch in microbatches)
        found = []
        for batch in microbatches:
            columns = torch.arange(batch.input_ids.shape[1])
            values = sign * (100.0 * columns + batch.input_ids)
            found.append(values.where(columns < batch.lengths[:, None], torch.nan))
        return found


Make = Callable[..., tuple[MegatronPolicy, FakeWorkers]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return what makes a policy of a configuration, over fake workers."""

    def made(
        config: MasterConfig, data_parallel_size: int = 2, gpu: str | None = None, model: str = "tiny_qwen3_moe"
    ) -> tuple[MegatronPolicy, FakeWorkers]:
        found: list[FakeWorkers] = []

        def start(_cluster: Any, make_worker: partial[Any], **_: Any) -> FakeWorkers:
            found.append(FakeWorkers(make_worker.keywords, data_parallel_size, gpu))
            return found[-1]

        monkeypatch.setattr(model_workers, "WorkerGroup", start)
        cluster: Any = SimpleNamespace(is_local=False, config=config.cluster)
        source = ModelSource(REPOSITORY_ROOT / "examples/assets" / model, None)
        policy = MegatronPolicy(config, cluster, seed=1, num_steps=2, source=source, model_files=FILES)
        return policy, found[0]

    return made


FILES = {"config.json": b"{}"}
OVERHEAD = "microbatch_overhead_tokens: 7"
BY_PATCHES = "train_mb_tokens: 64, train_mb_patches: 128}"
BY_TOKENS = "train_mb_tokens: 64, train_mb_patches: null}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("policy.logprob_batch_size=5", PlainBatching(5)),
        (f"policy.sequence_packing={{enabled: true, {BY_TOKENS}", PackedBatching(64)),
        (f"policy.dynamic_batching={{enabled: true, {OVERHEAD}, {BY_TOKENS}", DynamicBatching(64, 7)),
        (f"policy.dynamic_batching={{enabled: true, {OVERHEAD}, {BY_PATCHES}", DynamicBatching(64, 7, 128)),
        (f"policy.sequence_packing={{enabled: true, {BY_PATCHES}", PackedBatching(64, 1, 128)),
    ],
)
def test_how_microbatches_are_cut(override: str, expected: Any) -> None:
    policy = small_config(override).policy
    assert choose_batching(policy, policy.logprob_batch_size) == expected


def test_the_expert_biases_of_all_stages_are_in_the_order_of_the_layers(make: Make) -> None:
    """With virtual stages a rank holds layers between those of the next. Only one copy of each is asked for."""
    policy, workers = make(small_config())
    first, second = ({layer: np.full((2, 3), layer + 0.5) for layer in held} for held in ((2, 5), (3, 1)))
    workers.biases = [first, {}, second, {}]
    found = policy.expert_biases()
    assert found is not None
    np.testing.assert_array_equal(found, np.broadcast_to([[1.5], [2.5], [3.5], [5.5]], (2, 4, 3)))
    workers.biases = [{}] * 4
    assert policy.expert_biases() is None


@pytest.mark.parametrize("limit", ["null", "64"])
def test_images_are_limited_and_lie_in_the_store_once(limit: str, make: Make) -> None:
    """Six sequences with one of two images of 64 patches each: both ranks have as many microbatches."""
    budget = f"{{enabled: true, train_mb_tokens: 512, train_mb_patches: {limit}}}"
    policy, workers = make(small_config(f"policy.sequence_packing={budget}"), model="tiny_internvl_moe")
    put: list[np.ndarray] = []

    def put_down(array: np.ndarray) -> int:
        put.append(array)
        return len(put)

    policy._images = ArrayStore(put_down)
    images = [random_image(4, 4, seed) for seed in (0, 1)]
    batch = vision_batch([[2, images[row // 3], 5] for row in range(6)])
    policy.train(batch, sft_loss)
    policy.start_logprobs(batch)
    (_, of_training), (_, of_logprobs) = workers.calls[-2:]
    by_worker = [[batch for shard in shards for batch in shard.microbatches] for (shards, *_) in of_training]
    for received in (by_worker, [share for (share, *_) in of_logprobs]):
        (number,) = {len(microbatches) for microbatches in received}
        microbatches = [batch for of_worker in received for batch in of_worker]
        distinct = [len(set(batch.columns[IMAGE_IDS].values.tolist())) for batch in microbatches]
        assert sum(len(batch) for batch in microbatches) == 2 * 6, "both stages get them"
        assert (number, max(distinct)) == ((1, 2) if limit == "null" else (1, 1))
        found = [each for batch in microbatches for own in batch.shared[PIXELS].arrays for each in own]
        assert all(isinstance(each, StoredRows) for each in found)
        assert len(set(map(id, found))) == 2
    assert sum(array.nbytes for array in put) == 2 * 32 * 32 * 3


@pytest.mark.parametrize(
    ("precision", "gpu", "peak"),
    [("bfloat16", "NVIDIA H200", 4 * 989e12), ("bfloat16", "NVIDIA H200 NVL", None), ("float32", "NVIDIA H200", None)],
)
def test_use_of_gpus(make: Make, precision: str, gpu: str, peak: float | None) -> None:
    """Two stages of two data-parallel ranks, and three engines of two GPUs; lengths count, padding does not."""
    config = small_config(f"policy.precision={precision}")
    place = RolePlacementConfig(num_nodes=3, gpus_per_node=2)
    cluster = config.cluster.model_copy(update={"num_nodes": 1, "gpus_per_node": 4, "roles": {"generation": place}})
    config = config.model_copy(update={"cluster": cluster})
    policy, _ = make(config, gpu=gpu)
    size = config.policy.train_global_batch_size
    batch = tiny_batch(3).select([row % 2 for row in range(size)])
    lengths = batch.lengths.tolist()
    assert len(set(lengths)) == 2, "some have padding"
    use = policy.train(batch, sft_loss).gpu_use
    assert use is not None
    assert (use.num_gpus, use.num_gpus_of_run, use.peak_flops_per_second) == (4, 4 + 6, peak)
    assert use.train_flops == 3 * sum(10 * length + 4 * length * (length + 1) / 2 for length in lengths)
    assert use.memory["max_memory_reserved_gb"].reduce() == 10.0, "the fullest rank, though it reports no loss"


def test_a_trajectory_of_several_sequences_stays_in_one_update(make: Make) -> None:
    """Updates of two trajectories, of which two ranks have equally many rows; empty ones are no tokens."""
    policy, workers = make(small_config("policy.train_global_batch_size=2", "policy.train_micro_batch_size=1"))
    batch = replace(tiny_batch(3).select([row % 2 for row in range(9)]), sample_sizes=(3, 1, 1, 1, 2, 1))
    result = policy.train(batch, sft_loss)
    _, ((first, *_), (second, *_), *_) = workers.calls[-1]
    updates = [sorted([*one.places, *other.places]) for one, other in zip(first, second, strict=True)]
    assert updates == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert result.num_tokens == int(batch.lengths.sum())


def test_the_vision_tower_counts_once_for_each_image_of_a_microbatch(make: Make) -> None:
    config = small_config("policy.train_micro_batch_size=3")
    policy, _ = make(config, gpu="NVIDIA H200", model="tiny_internvl_moe")
    policy._images = ArrayStore(lambda array: array)
    a, b = (random_image(4, 4, seed) for seed in (0, 1))
    # Each of two ranks has one microbatch: two images, and one.
    batch = vision_batch([[2, a, 5], [2, b, 5], [2, a, 5], [9], [2, b, 5], [2, b, 2]])
    use, text = policy.train(batch, sft_loss).gpu_use, policy.train(batch.for_loss(), sft_loss).gpu_use
    assert use is not None
    assert text is not None
    family = family_of(policy._hf_config).vision
    assert family is not None
    one = family.shape(policy._hf_config).training_flops([(8, 8)], config.policy.freeze)
    assert use.train_flops - text.train_flops == 3 * one > 0


def test_a_policy_on_cpus_uses_no_gpus(make: Make) -> None:
    config = small_config("policy.precision=float32")
    policy, _ = make(config)
    assert policy.train(tiny_batch(3).select([0] * config.policy.train_global_batch_size), sft_loss).gpu_use is None


def test_responses_come_back_in_the_order_of_the_prompts(make: Make) -> None:
    policy, workers = make(small_config("policy.generation.max_batch_size=7"))
    sampling = SamplingParameters(max_new_tokens=3)
    prompts, seeds = tuple((index,) * (index + 1) for index in range(5)), tuple(range(50, 55))
    found = policy.generate(GenerationBatch(prompts, seeds, sampling))
    assert [response.token_ids.tolist() for response in found] == [
        [*prompt, seed] for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    method, arguments = workers.calls[-1]
    assert method == MegatronModel.generate
    shares = [(request.prompts, request.seeds) for request, _ in arguments]
    assert shares[0] == shares[2] == (prompts[::2], seeds[::2]), "all stages of a share get it"
    assert shares[1] == shares[3] == (prompts[1::2], seeds[1::2])
    assert all((request.sampling, size) == (sampling, 7) for request, size in arguments)


def test_more_ranks_than_prompts(make: Make) -> None:
    policy, _ = make(small_config("policy.train_micro_batch_size=1"), data_parallel_size=3)
    (response,) = policy.generate(GenerationBatch(((4,),), (9,), SamplingParameters(max_new_tokens=3)))
    assert response.token_ids.tolist() == [4, 9]


@pytest.mark.parametrize(
    "override",
    [
        "policy.logprob_batch_size=3",
        "policy.logprob_batch_size=1",
        f"policy.sequence_packing={{enabled: true, {BY_TOKENS}",
        f"policy.dynamic_batching={{enabled: true, {OVERHEAD}, {BY_TOKENS}",
    ],
)
@pytest.mark.parametrize("num_sequences", [8, 7, 1])
@pytest.mark.parametrize("data_parallel_size", some_of([1, 2, 3], 1))
def test_logprobs_stand_at_their_places(override: str, num_sequences: int, data_parallel_size: int, make: Make) -> None:
    policy, _ = make(small_config(override, "policy.train_micro_batch_size=1"), data_parallel_size)
    batch = tiny_batch(4)
    batch = replace(
        batch.select(range(num_sequences)), columns={"advantages": per_sequence(torch.zeros(num_sequences))}
    )
    columns = torch.arange(batch.input_ids.shape[1])
    expected = (100.0 * columns + batch.input_ids).where(columns < batch.lengths[:, None], 0.0)
    assert torch.equal(policy.logprobs(batch), -expected)
    assert torch.equal(policy.reference_logprobs(batch), expected)


@pytest.mark.parametrize(("num_sequences", "rows"), [(3, 2), (4, 2), (5, 3), (1, 1), (8, 4)])
def test_few_sequences_are_not_filled_up_to_a_microbatch(num_sequences: int, rows: int, make: Make) -> None:
    policy, workers = make(small_config("policy.logprob_batch_size=64"), 2)
    policy.logprobs(tiny_batch(4).select(range(num_sequences)))
    _, arguments = workers.calls[-1]
    sizes = {len(microbatch) for microbatches, *_ in arguments for microbatch in microbatches}
    assert sizes == {rows}


@pytest.mark.parametrize(
    ("layout", "called"),
    [
        ({}, {0}),
        ({"expert_model_parallel_size": 2}, {0, 1}),
        ({"expert_tensor_parallel_size": 2}, {0, 1}),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, {0}),
    ],
    ids=["no experts elsewhere", "expert-parallel", "experts cut over two copies", "experts within a copy"],
)
def test_one_copy_of_the_model_scores_a_few_sequences_where_it_has_all_experts(
    layout: dict[str, int], called: set[int], make: Make
) -> None:
    config = small_config("policy.logprob_batch_size=64")
    megatron = config.policy.megatron_cfg.model_copy(update=layout)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"megatron_cfg": megatron})})
    policy, workers = make(config, 2)
    batch = tiny_batch(4)
    assert torch.equal(policy.start_logprobs(batch, by_one_copy=True)(), policy.logprobs(batch))
    method, arguments = workers.calls[-2]
    assert method == MegatronModel.logprobs
    assert {
        place.data_parallel_rank for place, given in zip(workers.places, arguments, strict=True) if given is not None
    } == called


def test_all_ranks_send_their_weights(make: Make, tmp_path: Path) -> None:
    policy, workers = make(small_config(f"checkpointing.checkpoint_dir={tmp_path}"))
    with policy.weight_transport() as transport:
        spec = transport.open(num_receivers=2, version=3)
        assert spec.num_senders == 4
        assert spec.folder.parent == tmp_path, "several machines share no memory"
        assert transport.send() == 1 + 2 + 3
        assert workers.calls[-1] == (MegatronModel.send_weights, [(spec, False)] * 4)
        assert transport.num_bytes == 1 + 2 + 3
        workers.problem = WeightSyncError("receiver 0 is full")
        with pytest.raises(WeightSyncError, match="receiver 0 is full"):
            transport.send()
    with policy.weight_transport(altered=True) as transport:
        spec = transport.open(num_receivers=1, version=3)
        with pytest.raises(WeightSyncError):
            transport.send()
        assert workers.calls[-1] == (MegatronModel.send_weights, [(spec, True)] * 4)
    assert list(tmp_path.iterdir()) == []


def test_frozen_weights_are_sent_once_to_an_engine_that_holds_them(make: Make, tmp_path: Path) -> None:
    scale = "rank: 2, alpha: 4, use_rslora: false"
    lora = f"{{{scale}, targets: [all-linear], dropout: 0.0, experts: none, init: kaiming, path: null}}"
    policy, workers = make(small_config(f"checkpointing.checkpoint_dir={tmp_path}", f"policy.lora={lora}"))

    def skips(*, holds: bool = True, problem: Exception | None = None, **how: bool) -> bool:
        workers.problem = problem
        with policy.weight_transport(**how) as transport:
            spec = transport.open(1, 3, hold_weights=holds)
            with suppress(WeightSyncError):
                transport.send()
        return spec.changed_only

    assert [skips(), skips(), skips(holds=False), skips()] == [False, True, False, True]
    assert [skips(whole=True), skips()] == [False, True]
    assert [skips(altered=True), skips(), skips()] == [False, False, True]
    assert [skips(problem=WeightSyncError("receiver 0 is full")), skips(), skips()] == [True, False, True]
    policy, workers = make(small_config(f"checkpointing.checkpoint_dir={tmp_path}"))
    assert [skips(), skips()] == [False, False], "without adapters nothing is frozen"


def test_a_transfer_after_a_failed_one_has_connections_of_its_own(make: Make, tmp_path: Path) -> None:
    policy, workers = make(
        small_config(
            f"checkpointing.checkpoint_dir={tmp_path}",
            "policy.generation.backend=vllm",
            "policy.generation.weight_transport=gloo",
        )
    )

    def group(problem: Exception | None) -> str:
        workers.problem = problem
        with policy.weight_transport() as transport:
            backend = transport.open(num_receivers=1, version=3).backend
            with suppress(WeightSyncError):
                transport.send()
        assert isinstance(backend, CollectiveTransport)
        return backend.group

    assert group(None) == group(WeightSyncError("receiver 0 is full")) != group(None)


def test_what_is_asked_for_behind_the_weights_is_not_waited_for_with_them(make: Make, tmp_path: Path) -> None:
    policy, workers = make(small_config(f"checkpointing.checkpoint_dir={tmp_path}"))
    batch = tiny_batch(4)
    asked: list[Callable[[], torch.Tensor]] = []
    with policy.weight_transport(then=lambda: asked.append(policy.start_logprobs(batch))) as transport:
        transport.open(num_receivers=1, version=3)
        assert asked == []
        workers.problem = WeightSyncError("receiver 0 is full")
        with pytest.raises(WeightSyncError, match="receiver 0 is full"):
            transport.send()
    # Ranks run forward passes together: those that could send must not wait for one that could not.
    assert [method for method, _ in workers.calls[-2:]] == [MegatronModel.send_weights, MegatronModel.logprobs]
    assert torch.equal(asked[0](), policy.logprobs(batch))


def test_weights_need_a_folder_that_all_machines_reach(make: Make) -> None:
    policy, _ = make(small_config("checkpointing.checkpoint_dir=null"))
    with pytest.raises(ConfigurationError, match=r"checkpointing\.checkpoint_dir: got null"):
        policy.weight_transport()


def test_the_weight_version_is_the_workers(make: Make, tmp_path: Path) -> None:
    policy, workers = make(small_config())
    assert policy.weight_version == 0
    workers.weight_version = 12
    policy.load_checkpoint(tmp_path, with_optimizer=True)
    assert policy.weight_version == 12


@pytest.mark.parametrize(("stop_strings", "needed"), [("null", False), ("[]", False), ("['end']", True)])
def test_workers_need_a_tokenizer_for_stop_strings_alone(stop_strings: str, needed: bool, make: Make) -> None:
    _, workers = make(small_config(f"policy.generation.stop_strings={stop_strings}"))
    assert workers.arguments["decodes_text"] is needed
    assert workers.arguments["keep_reference"] is False


def test_a_policy_of_sft_generates_nothing(make: Make) -> None:
    _, workers = make(load_config("sft_tiny_moe.yaml", check_paths=False))
    assert workers.arguments["decodes_text"] is False


def test_saved_weights_say_what_is_left_out(make: Make, tmp_path: Path) -> None:
    policy, workers = make(small_config())
    assert policy.save_weights(tmp_path / "final") == ["router.bias"]
    assert workers.calls[-1] == (MegatronModel.save_weights, (tmp_path / "final", FILES))
    workers.problem = CheckpointError("the disk is full")
    with pytest.raises(CheckpointSaveError, match="the disk is full"):
        policy.save_weights(tmp_path / "final")
