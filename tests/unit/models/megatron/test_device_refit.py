# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that reach engines without passing the host: all tensors on every rank; what a refit costs by counting."""

import json
import pkgutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.weights import hf_broadcast, hf_gather
from nemo_rl_moe.models.megatron.weights.hf_broadcast import plan_broadcasts, round_of, tensors_on_every_rank
from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import TransportSpec
from nemo_rl_moe.weight_sync.transport_backends import CollectiveTransport, FileTransport, IpcTransport
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.pretended_gpu import PretendedGpu
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, parallel_job, tiny_grpo_policy, tiny_policy
from tests.support.training_run import build_trainer, tiny_trainer


def both_ways(policy: PolicyConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Return the fingerprints of the tensors that this rank gathers, and of those that it has on its device."""
    with tiny_trainer(policy) as trainer:
        model = (trainer.chunks, trainer.config, trainer.hf_config)
        return tuple(  # type: ignore[return-value]
            fingerprints_of(gather(*model), "bfloat16") for gather in (tensors_of_this_rank, tensors_on_every_rank)
        )


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, {"ep": 2}),
        full(2, {"tp": 2}),
        full(2, {"pp": 2}),
        slow(4, {"tp": 2, "ep": 2, "etp": 2}),
        slow(4, {"tp": 2, "pp": 2, "ep": 2}),
    ],
)
def test_every_rank_has_all_tensors_in_one_order(world_size: int, sizes: dict[str, int]) -> None:
    found = run_ranks(both_ways, world_size, tiny_policy(world_size, precision="bfloat16", **layout(**sizes)))
    gathered = {name: print_ for own, _ in found for name, print_ in own.items()}
    for _, everywhere in found:
        assert everywhere == gathered
        assert list(everywhere) == list(found[0][1])
    rounds = [round_of(name) for name in found[0][1]]
    assert len(list(dict.fromkeys(rounds))) == sum(a != b for a, b in zip(rounds, [None, *rounds], strict=False)), (
        "an engine that loads a layer when it is complete keeps one at a time"
    )


def outcomes_with_failure(policy: PolicyConfig, function: str) -> list[str]:
    """Take part twice; the first time the third call of a function fails on the last rank, and all later ones."""
    original, outcomes = pkgutil.resolve_name(function), []
    with parallel_job(policy) as rank:
        trainer = build_trainer(policy)
        for fails in (True, False):
            calls = iter(range(10**6))

            def failing(*arguments: Any, calls: Iterator[int] = calls) -> Any:
                if next(calls) > 1:
                    raise RuntimeError("not enough memory")
                return original(*arguments)

            replaced = failing if fails and rank == dist.get_world_size() - 1 else original
            with mock.patch(function, replaced):
                try:
                    number = sum(1 for _ in tensors_on_every_rank(trainer.chunks, trainer.config, trainer.hf_config))
                    outcomes.append(f"{number > 50}")
                except RuntimeError as error:
                    outcomes.append(str(error))
    return outcomes


PACKAGE = "nemo_rl_moe.models.megatron.weights"


@pytest.mark.parametrize(
    "function", [f"{PACKAGE}.hf_broadcast.packed", full(f"{PACKAGE}.hf_gather._joined")], ids=["packing", "gathering"]
)
def test_a_rank_without_memory_keeps_nobody_waiting(function: str) -> None:
    policy = tiny_policy(2, **layout(tp=2, etp=2))
    failed = "the weights cannot be exported: rank 1: not enough memory"
    assert run_ranks(outcomes_with_failure, 2, policy, function) == [[failed, "True"]] * 2


@dataclass
class KeptMemory:
    """Memory of the pretended GPU, which nobody opens."""

    sizes: list[int] = field(default_factory=list)

    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def place(self) -> str:
        return "GPU-0"

    def shared(self, buffer: Tensor) -> Mapping[str, Any]:
        assert buffer.is_cuda
        self.sizes.append(buffer.nbytes)
        return {}

    @contextmanager
    def mapped(self, handle: Mapping[str, Any]) -> Iterator[Tensor]:
        raise NotImplementedError


def acknowledge(folder: Path, names: list[str], is_over: threading.Event) -> None:
    """Stand for a receiver: takes every bucket, and notes what is in it."""
    while not is_over.is_set():
        for path in folder.glob("*.bucket"):
            taken = path.with_name(f"{path.name}.taken-0000")
            if not taken.exists():
                try:
                    names += [row[0] for row in json.loads(path.read_text())["tensors"]]
                except ValueError:  # a file of tensors
                    names += [path.name]
                taken.touch()
        time.sleep(0.001)


def copies_to_the_host(policy: PolicyConfig, folder: Path, way: str) -> tuple[dict[str, int], int, int, int]:
    """Send the weights of a rank that takes itself for one on a GPU.

    Returns:
        Copies to the host, by who makes them; other waits for the device; tensors and buckets that arrived.
    """
    gpu, names, is_over, sent = PretendedGpu(), list[str](), threading.Event(), list[int]()
    backends: dict[str, Any] = {
        "cuda_ipc": IpcTransport(KeptMemory(sent)),
        "nccl": CollectiveTransport("nccl", "group", 1, 60.0),
        "files": FileTransport(),
    }
    folder = folder / way
    folder.mkdir(exist_ok=True)
    spec = TransportSpec(folder, 0, num_senders=1, num_receivers=1, backend=backends[way])

    def broadcast(self: Any, board: Any, label: Any, rank: int, buffer: Tensor) -> None:
        assert buffer.is_cuda
        sent.append(buffer.nbytes)

    with parallel_job(policy) as rank, gpu.plugged_in():
        trainer = build_trainer(policy)
        receiver = threading.Thread(target=acknowledge, args=(folder, names, is_over))
        if rank == 0:
            # Before anybody could read a file that is not yet written.
            (folder / "0000.receiver-at").write_text("GPU-0")
            receiver.start()
        gpu.waits.clear()
        with mock.patch.object(CollectiveTransport, "_broadcast", broadcast):
            trainer.send_weights(spec)
        is_over.set()
        copies = {wait.function: count for wait, count in gpu.waits.items() if wait.kind == "copy to the host"}
    if rank == 0:
        receiver.join()
    return copies, sum(gpu.waits.values()) - sum(copies.values()), len(names), len(sent)


NAMES_AND_ERRORS = {"hf_broadcast.tensors_on_every_rank": 1, "hf_export._problems_of_all": 1}
"""Objects that ranks tell each other, by NCCL in memory of the device."""


@pytest.mark.parametrize("way", ["cuda_ipc", full("nccl")])
def test_no_tensor_passes_the_host(way: str, tmp_path: Path) -> None:
    policy = tiny_grpo_policy(1)
    ((copies, waits, num_tensors, num_buckets),) = run_ranks_with_engine(copies_to_the_host, 1, policy, tmp_path, way)
    assert (num_tensors, num_buckets) == (135, 1)
    assert copies == NAMES_AND_ERRORS
    ((by_files, *_),) = run_ranks_with_engine(copies_to_the_host, 1, policy, tmp_path, "files")
    assert by_files["hf_export._host_copy"] == 135, "what the way through files copies, and so what the count sees"
    # For each broadcast two, of the agreement before it; for each bucket the checksum's and the handle's.
    assert waits <= 2 * 12 + 2


def test_layers_are_sent_one_after_the_other_by_all_ranks_that_have_a_part() -> None:
    def row(name: str) -> tuple[str, str, list[int]]:
        return name, "bfloat16", [3]

    first = [row("model.layers.0.a"), row("model.embed_tokens.weight"), row("model.layers.1.a")]
    second = [row("model.layers.1.b"), row("model.layers.0.b"), row("model.layers.0.c"), row("visual.blocks.0.d")]
    found = plan_broadcasts([first, second, []])
    assert [(each.round, each.root, [name for name, *_ in each.packing.rows]) for each in found] == [
        ("model.layers.0", 0, ["model.layers.0.a"]),
        ("model.layers.0", 1, ["model.layers.0.b", "model.layers.0.c"]),
        ("model.embed_tokens.weight", 0, ["model.embed_tokens.weight"]),
        ("model.layers.1", 0, ["model.layers.1.a"]),
        ("model.layers.1", 1, ["model.layers.1.b"]),
        ("visual.blocks.0", 1, ["visual.blocks.0.d"]),
    ]
    assert found[1].packing.num_bytes == 32, "each at a multiple of 16"


# What a refit of Qwen3-30B-A3B costs on 8 GPUs

NVLINK, MEMORY = 200e9, 2.0e12
"""Bytes a second, on the low side: of a broadcast among 8 H100 (450e9 each way), of a GPU's memory (3.35e12)."""
LOAD_S = 0.33e-3
"""Of vLLM's loader for one tensor, in one thread of a CPU of today; measured with vLLM 0.32."""
CALL_S = 0.1e-3
"""Of the host for a collective or a bucket, waits included."""


def rows_of_each_rank(folder: str, world_size: int) -> list[Any]:
    """Return the tensors that each rank of a layout with experts on all ranks gathers, of fake tensors."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nemo_rl_moe.config.loading import load_grpo_config
    from nemo_rl_moe.models.hf_files import load_hf_config
    from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
    from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

    config = load_grpo_config("grpo_qwen3_30b_a3b.yaml", [f"policy.model_name={folder}"], check_paths=False)
    hf_config, found = load_hf_config(folder), []
    transformer = build_transformer_config(config.policy, hf_config)
    transformer.perform_initialization = False
    chunks: Any = None
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=world_size, create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            # Ranks differ in what their experts are called, and in which of equal tensors they send.
            chunks = chunks or build_model_chunks(config.policy, transformer, hf_config)
            deliveries, without_rule = hf_gather.plan_deliveries(chunks, transformer, hf_config)
            assert not without_rule
            found.append(hf_broadcast.rows_of(deliveries))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_a_refit_of_qwen3_30b_a3b_on_8_gpus_by_counting(repository_root: Path) -> None:
    """By the bytes and calls of the plan that all ranks follow; docs/refit-cost.md shows the numbers."""
    folder = str(repository_root / "examples/assets/model_configs/Qwen3-30B-A3B")
    (rows,) = run_ranks(rows_of_each_rank, 1, folder, 8, fresh=True, timeout_s=1200)
    broadcasts = plan_broadcasts(rows)
    total = sum(each.packing.num_bytes for each in broadcasts)
    names = [name for of_rank in rows for name, *_ in of_rank]
    assert len(names) == len(set(names)) == 18_867
    assert total == pytest.approx(2 * 30_532_122_624, rel=1e-3)
    assert len(broadcasts) <= 8 * (48 + 3)
    num_buckets = total / (512 * 2**20)
    # An engine of two GPUs that divides experts among them loads half of them on each.
    experts = sum(".experts." in name for name in names)
    loaded = experts // 2 + len(names) - experts
    seconds = {
        "broadcast": total / NVLINK + len(broadcasts) * CALL_S,
        # Read and written: packed for the engine; read: both checksums; and for the loader copied twice.
        "memory": total * (2 + 2 + 4) / MEMORY + num_buckets * CALL_S,
        "loader": loaded * LOAD_S,
    }
    print(len(broadcasts), total, num_buckets, loaded, seconds)
    assert sum(seconds.values()) < 5.0
