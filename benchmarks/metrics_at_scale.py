# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes and host time of a step's MoE metrics on one rank of a large job, on a CPU. Prints one JSON line.

The rank is in process groups of PyTorch's fake backend, which has any number of ranks and whose collectives move
nothing. Shapes, bytes and the rank's arithmetic are the same as in a real job, without the waiting for others. On GPUs
the arithmetic of the slice runs on the device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_moe.models.megatron.moe_metrics import get_moe_metrics
from nemo_rl_moe.routing.metrics.expert_load_recorder import BACKWARD, FORWARD, ExpertLoadRecorder, StepEvent

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Job:
    """A job of many ranks, without tensor and pipeline parallelism, so that a rank has the most to count.

    Attributes:
        microbatches: Microbatches of a rank in a step.
        what_if: Expert-parallel sizes whose overload is predicted.
    """

    ranks: int
    expert_parallel: int
    microbatches: int
    layers: int
    experts: int
    what_if: tuple[int, ...] = ()


JOBS = (
    Job(8, 8, 16, 48, 128),
    Job(1024, 8, 16, 48, 128),
    Job(1024, 8, 64, 48, 128),
    Job(1024, 64, 64, 61, 256),
    Job(1024, 64, 64, 61, 256, what_if=(32, 128)),
)


class Traffic(TorchDispatchMode):
    """Bytes of the tensors of each collective, and the size of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            leaves = tree_leaves(args)
            groups = [
                dist.ProcessGroup.unbox(leaf).size()
                for leaf in leaves
                if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
            ]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.found.append((function._schema.name.removeprefix("c10d::"), groups[0] if groups else 0, size))
        return function(*args, **(kwargs or {}))


def measured(job: Job, repeats: int) -> dict[str, Any]:
    """Return a row of the result."""
    dist.init_process_group("fake", rank=0, world_size=job.ranks, store=FakeStore())
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=job.expert_parallel, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    try:
        config = TransformerConfig(
            num_layers=job.layers,
            hidden_size=64,
            num_attention_heads=4,
            num_moe_experts=job.experts,
            moe_router_topk=8,
            expert_model_parallel_size=job.expert_parallel,
        )
        recorder = ExpertLoadRecorder(job.layers, job.experts, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)

        def report() -> float:
            recorder.start(job.microbatches)
            recorder.counts.copy_(torch.randint(0, 200, recorder.counts.shape, generator=generator))
            for number in range(job.microbatches):
                recorder.events += [StepEvent(FORWARD, 0, number), StepEvent(BACKWARD, 0, number)]
            start = time.perf_counter()
            get_moe_metrics(
                1 / job.microbatches,
                config=config,
                device=torch.device("cpu"),
                recorder=recorder,
                what_if_expert_parallel_sizes=job.what_if,
            )
            return time.perf_counter() - start

        traffic = Traffic()
        with traffic:
            report()
        seconds = [report() for _ in range(repeats)]
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    whole_job = sum(size for _, ranks, size in traffic.found if ranks == job.ranks)
    return {
        **asdict(job),
        "collectives": [f"{name} of {ranks}" for name, ranks, _ in traffic.found],
        "bytes_over_all_ranks": whole_job,
        "bytes_elsewhere": sum(size for *_, size in traffic.found) - whole_job,
        "milliseconds": round(1e3 * statistics.median(seconds), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20, help="timed reports of each job (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measured(job, options.repeats) for job in JOBS]
    print(json.dumps({"benchmark": "metrics_at_scale", "torch": torch.__version__, "jobs": rows}))


if __name__ == "__main__":
    main()
