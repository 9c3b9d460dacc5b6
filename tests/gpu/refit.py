# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights from one process to another on one GPU, by each transport: seconds, and the same weights behind them.

The receiver is the part of an engine with a copy of the weights: Megatron-Core's, as vLLM may not be there.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from nemo_rl_moe.weight_sync.transport import WeightTransport, folder_of_one_machine
from nemo_rl_moe.weight_sync.transport_backends import IpcTransport, TransportBackend, make_backend
from tests.gpu.models import Failed, Numbers, run_config, slice_config, timed, weights_from_the_device
from tests.gpu.process import job_of_one
from tests.support.gpu_stand_ins import HostMemory, forget_kept

_LAYERS = 10
"""Of Qwen3-30B-A3B: 13.7 GB, as much as two of its ranks send."""
_VERSION = 0
_FORMAT = "bfloat16"


def _backends(*, rehearse: bool) -> Mapping[str, Callable[[int, str], TransportBackend]]:
    return {
        "files": lambda count, group: make_backend("files", group, count, None),
        "cuda_ipc": lambda count, group: IpcTransport(HostMemory()) if rehearse else IpcTransport(),
    }


def _model(*, rehearse: bool, seed: int) -> Any:
    from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel

    config = run_config(rehearse=rehearse, init_seed=seed)
    with weights_from_the_device():
        hf_config = slice_config(rehearse=rehearse, **({} if rehearse else {"num_hidden_layers": _LAYERS}))
        return MegatronModel(config.policy, hf_config, None)


def refit(*, rehearse: bool) -> Iterator[Numbers]:
    """Yield the seconds of each transport, and of gathering the tensors on the host and on the device."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=_engine, args=(theirs, rehearse), daemon=True)
    engine.start()
    theirs.close()  # so that its end is the end of the engine
    with job_of_one(run_config(rehearse=rehearse).policy):
        from nemo_rl_moe.models.megatron.weights.hf_broadcast import tensors_on_every_rank
        from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank

        model = _model(rehearse=rehearse, seed=1)
        parts = (model.chunks, model.config, model.hf_config)
        on_host, _ = timed(lambda: deque(tensors_of_this_rank(*parts), maxlen=0))
        on_device, _ = timed(lambda: deque(tensors_on_every_rank(*parts), maxlen=0))
        fingerprinted, expected = timed(model.weight_fingerprints, _FORMAT)
        _answer(ours, "ready")
        for way, backend in _backends(rehearse=rehearse).items():
            held = _allocated()
            (first, num_bytes), (again, _) = (timed(_send, model, ours, backend) for _ in range(2))
            kept = _allocated() - held
            ours.send(None)
            found = _answer(ours, "fingerprints")
            numbers = {
                "transport": way,
                "bytes": num_bytes,
                "first_seconds": round(first, 3),
                "seconds": round(again, 3),
                "gb_per_second": round(num_bytes / again / 1e9, 2),
                "gather_on_host_seconds": round(on_host, 3),
                "gather_on_device_seconds": round(on_device, 3),
                "fingerprint_seconds": round(fingerprinted, 3),
                "kept_bytes": kept,
            }
            if kept > 0:  # the engine has no room for it
                raise Failed(f"{kept} bytes of the device are kept behind the transfer", numbers)
            if found != expected:
                wrong = sum(found.get(name) != print_ for name, print_ in expected.items())
                raise Failed(f"{wrong} of {len(expected)} tensors are not what was sent", numbers)
            yield numbers
    ours.close()
    engine.join()
    forget_kept()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _send(model: Any, engine: Connection, backend: Callable[[int, str], TransportBackend]) -> int:
    """Make one transfer; return its bytes."""
    with WeightTransport(folder_of_one_machine(1), 1, model.send_weights, make_backend=backend) as transport:
        engine.send(transport.open(1, _VERSION, "the engine"))
        num_bytes = transport.send()
        _answer(engine, "received")
    return num_bytes


def _answer(engine: Connection, expected: str) -> Any:
    kind, value = engine.recv()
    if kind != expected:
        raise Failed(f"the receiving process: {value}", {})
    return value


def _engine(orders: Connection, rehearse: bool) -> None:
    """Receive weights, or return their fingerprints, until the other end is closed."""
    try:
        with job_of_one(run_config(rehearse=rehearse).policy):
            model = _model(rehearse=rehearse, seed=2)
            orders.send(("ready", None))
            while True:
                spec = orders.recv()
                if spec is None:
                    orders.send(("fingerprints", model.weight_fingerprints(_FORMAT)))
                else:
                    orders.send(("received", model.receive_weights(spec, 0, _VERSION)))
    except EOFError:
        pass
    except Exception as error:
        orders.send(("failed", f"{type(error).__name__}: {error}"[:500]))
