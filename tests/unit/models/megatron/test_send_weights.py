# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's ranks as senders: every tensor once, and ranks that stay in step when a transfer fails halfway."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import NamedTensor, TransportSpec
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import build_trainer

BUCKET_BYTES = 20_000


def refuse(tensors: Iterator[NamedTensor]) -> None:
    for index, (name, _) in enumerate(tensors):
        if index == 4:
            raise ValueError(f"no place for {name}")


def send_twice(policy: PolicyConfig, folder: Path) -> tuple[str, set[str], set[str], int, int]:
    """A transfer that the receiver, a thread of rank 0, ends early, and then a whole one.

    Returns:
        The reason that this rank got; names that arrived and names that this rank owns; bytes sent and received.
    """
    with parallel_job(policy) as rank, ThreadPoolExecutor(1) as pool:
        trainer = build_trainer(policy)
        own = {name for name, _ in tensors_of_this_rank(trainer.chunks, trainer.config, trainer.hf_config)}
        received: set[str] = set()

        def transfer(name: str) -> TransportSpec:
            (folder / name).mkdir(exist_ok=True)
            dist.barrier()
            return TransportSpec(folder / name, 0, num_senders=2, num_receivers=1, bucket_bytes=BUCKET_BYTES)

        def keep(tensors: Iterator[NamedTensor]) -> None:
            received.update(name for name, _ in tensors)

        failing = transfer("failing")
        refusing = pool.submit(failing.receive, 0, refuse) if rank == 0 else None
        with pytest.raises(WeightSyncError) as error:
            trainer.send_weights(failing)
        if refusing is not None:
            assert isinstance(refusing.exception(), ValueError)
        whole = transfer("whole")
        receiving = pool.submit(whole.receive, 0, keep) if rank == 0 else None
        sent = trainer.send_weights(whole)
        return str(error.value), received, own, sent, receiving.result() if receiving else 0


def fingerprints_of_a_transfer(policy: PolicyConfig, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Fingerprints that this rank takes of its weights, and those of what arrives at a thread of rank 0."""
    with parallel_job(policy) as rank, ThreadPoolExecutor(1) as pool:
        trainer = build_trainer(policy)
        arrived: dict[str, str] = {}
        transfer = TransportSpec(folder, 0, num_senders=2, num_receivers=1, bucket_bytes=BUCKET_BYTES)

        def keep(tensors: Iterator[NamedTensor]) -> None:
            arrived.update(fingerprints_of(tensors, "bfloat16"))

        receiving = pool.submit(transfer.receive, 0, keep) if rank == 0 else None
        trainer.send_weights(transfer)
        found = trainer.weight_fingerprints("bfloat16")
        if receiving is not None:
            receiving.result()
        return found, arrived


def test_fingerprints_of_all_ranks_are_those_of_what_arrives(tmp_path: Path) -> None:
    (found, arrived), (of_other, _) = run_ranks(
        fingerprints_of_a_transfer, 2, tiny_policy(2, precision="bfloat16", **layout(tp=2)), tmp_path
    )
    assert found
    assert of_other
    assert not found.keys() & of_other.keys()
    assert found | of_other == arrived


def test_ranks_stay_in_step_when_a_receiver_fails(tmp_path: Path) -> None:
    (reason, arrived, own, sent, num_bytes), (other_reason, _, other_own, other_sent, _) = run_ranks(
        send_twice, 2, tiny_policy(2, **layout(ep=2)), tmp_path
    )
    assert reason == other_reason
    assert reason.startswith("receiver 0 raised ValueError: no place for ")
    assert own
    assert other_own
    assert not own & other_own
    assert arrived == own | other_own
    assert num_bytes == sent + other_sent > 10 * BUCKET_BYTES
