# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds and bytes of a refit by the size of the model, on CPUs. Prints one JSON line.

A policy with one worker sends its weights (Qwen3-MoE in float32) like after a training step: to a receiver that drops
them, to measure the transport, and, with --with-vllm, to a vLLM engine, which loads them into its model, in turns. A
line through seconds and bytes gives a cost per refit and per gigabyte, from which docs/refit-cost.md estimates larger
models.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from small_model import CONFIGS, make_parser, positive, start_policy, surroundings, write_model

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.registry import EngineSetup
from nemo_rl_moe.generation.vllm.engine import make_vllm_engine
from nemo_rl_moe.models.hf_files import find_model, load_hf_config
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.weight_sync.transport import TransportSpec

EXAMPLES = """\
examples:
  python benchmarks/refit_cost.py                                 the transport alone
  python benchmarks/refit_cost.py --with-vllm                     an engine of vLLM as well (make vllm)
  python benchmarks/refit_cost.py --sizes 1 10 --rounds 5"""

# Changes to the small model, by the approximate number of parameters in millions.
SIZES: dict[int, dict[str, int]] = {
    1: {"num_hidden_layers": 2},
    10: {"hidden_size": 256, "moe_intermediate_size": 320, "num_hidden_layers": 4},
    50: {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 7},
    100: {"hidden_size": 512, "moe_intermediate_size": 1024, "num_hidden_layers": 7},
    200: {"hidden_size": 768, "moe_intermediate_size": 1280, "num_hidden_layers": 8},
}

Refit = Callable[[], int]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    rows = [measured(size, options) for size in sorted(set(options.sizes))]
    kinds = ["transport", *(["vllm"] if options.with_vllm else [])]
    result = {
        "name": "refit_cost",
        "sizes": rows,
        "line": {kind: fitted([(row["bytes"], row["seconds"][kind]["median"]) for row in rows]) for kind in kinds},
        "rounds": options.rounds,
        "precision": "float32",
        "workers": 1,
        **surroundings(),
    }
    print(json.dumps(result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="refits of each kind (default: 5)")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        choices=tuple(SIZES),
        default=list(SIZES),
        metavar="M",
        help=f"millions of parameters: {', '.join(map(str, SIZES))} (default: all)",
    )
    parser.add_argument("--with-vllm", action="store_true", help="refit a vLLM engine too")
    return parser.parse_args(arguments)


def measured(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of refits for one size."""
    with tempfile.TemporaryDirectory(prefix="refit_cost_") as folder, ExitStack() as stack:
        num_parameters = write_model(Path(folder), **SIZES[size])
        refits = dict(stack.enter_context(prepared(Path(folder), with_vllm=options.with_vllm)))
        seconds: dict[str, list[float]] = {kind: [] for kind in refits}
        num_bytes = 0
        for refit in refits.values():
            refit()  # the first one allocates
        for _ in range(options.rounds):
            for kind, refit in refits.items():
                begin = time.perf_counter()
                num_bytes = refit()
                seconds[kind].append(time.perf_counter() - begin)
    return {
        "num_parameters": num_parameters,
        "bytes": num_bytes,
        "seconds": {
            kind: {"median": round(statistics.median(each), 4), "best": round(min(each), 4)}
            for kind, each in seconds.items()
        },
    }


@contextmanager
def prepared(folder: Path, *, with_vllm: bool) -> Iterator[dict[str, Refit]]:
    """Prepare the refits of each kind. Each returns the number of bytes sent."""
    config = make_config(folder)
    with ExitStack() as stack:
        cluster = RayCluster(config.cluster)
        policy = start_policy(config, cluster, stack, seed=0, num_steps=None)
        refits = {"transport": dropping_refit(policy)}
        if with_vllm:
            hf_config = load_hf_config(str(folder))
            setup = EngineSetup(config, cluster, find_model(config.policy), hf_config, None, policy, print)
            engine = make_vllm_engine(setup)
            stack.callback(engine.shutdown)
            refits["vllm"] = lambda: refit(engine, policy)
        yield refits


def dropping_refit(policy: MegatronPolicy) -> Refit:
    """Return a refit to a receiver that drops every tensor."""
    receiver: Any = ray.remote(Dropper).options(num_cpus=0).remote()

    def dropped() -> int:
        with policy.weight_transport() as transport:
            spec = transport.open(num_receivers=1, version=policy.weight_version)
            call = receiver.receive.remote(spec)
            transport.send()
            ray.get(call)
        return transport.num_bytes

    return dropped


class Dropper:
    """An engine's worker without an engine."""

    def receive(self, spec: TransportSpec) -> int:
        """Take part in a transfer, and return the number of bytes."""
        return spec.receive(0, lambda tensors: deque(tensors, maxlen=0))


def make_config(model: Path) -> GRPOMasterConfig:
    """Return the demo's configuration with one worker and this benchmark's model."""
    overrides = [
        f"policy.model_name={model}",
        "policy.init=random",
        "cluster.cpu_workers_per_node=1",
        "policy.generation.refit_check.enabled=false",
    ]
    return load_grpo_config(CONFIGS / "grpo_tiny_moe_vllm.yaml", overrides, check_paths=False)


def fitted(points: Sequence[tuple[int, float]]) -> dict[str, float] | None:
    """Return the seconds per refit and per gigabyte, by least squares of relative errors. None for one point.

    Each equation is divided by its seconds, since the small sizes determine the constant cost.
    """
    if len(points) < 2:
        return None
    num_bytes, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    columns = np.stack([np.ones_like(seconds), num_bytes / 1e9], axis=1) / seconds[:, None]
    (each, gigabyte), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    return {"seconds_each": round(float(each), 4), "seconds_per_gigabyte": round(float(gigabyte), 4)}


if __name__ == "__main__":
    main()
