# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What stands in for a GPU: memory that others open by a name, and Transformer Engine's optimizer in plain torch."""

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

KEPT: list[shared_memory.SharedMemory] = []
PLACE = ["nowhere"]
"""Of this process."""


@dataclass(frozen=True)
class HostMemory:
    """What `CudaMemory` is on GPUs.

    Attributes:
        is_everywhere: All processes are on one GPU; otherwise each is where `PLACE` says.
    """

    is_everywhere: bool = True

    def device(self) -> torch.device:
        return torch.device("cpu")

    def place(self) -> str:
        return "GPU-0" if self.is_everywhere else PLACE[0]

    def shared(self, buffer: Tensor) -> Mapping[str, Any]:
        block = shared_memory.SharedMemory(create=True, size=max(1, buffer.nbytes))
        np.frombuffer(block.buf, np.uint8)[: buffer.nbytes] = buffer.numpy()
        resource_tracker.unregister(block._name, "shared_memory")  # type: ignore[attr-defined]
        KEPT.append(block)
        return {"name": block.name, "bytes": buffer.nbytes}

    @contextmanager
    def mapped(self, handle: Mapping[str, Any]) -> Iterator[Tensor]:
        block = shared_memory.SharedMemory(handle["name"])
        resource_tracker.unregister(block._name, "shared_memory")  # type: ignore[attr-defined]
        yield torch.frombuffer(block.buf, dtype=torch.uint8)[: handle["bytes"]]


def forget_kept() -> None:
    while KEPT:
        Path("/dev/shm", KEPT.pop().name).unlink()


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Transformer Engine has it: masters and moments in formats of their own, an update count for each group.

    As there, moments that are not float32 are copied to float32, all of a group at a time.

    Attributes:
        most_copied: Most elements of such copies at a time, over all instances.
    """

    most_copied = 0

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ):
        assert adam_w_mode
        assert master_weights
        assert use_decoupled_grad
        assert not store_param_remainders
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self._dtypes = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        self.state[param] = {kind: torch.zeros_like(param, dtype=dtype) for kind, dtype in self._dtypes.items()}
        if "master_param" in self._dtypes:
            self.set_scaled_state(param, "master_param", param.detach().float())

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Return a tensor of the state in float32: itself where it is."""
        return self.state[param][name].float()

    def set_scaled_state(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        """Fill a tensor of the state with values in float32."""
        assert unscaled.dtype == torch.float32
        self.state[param][name].copy_(unscaled)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            copies = {}
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                if param.decoupled_grad is not None:
                    copies[param] = {kind: self.get_unscaled_state(param, kind) for kind in self._dtypes}
            copied = [
                state[kind]
                for param, state in copies.items()
                for kind in self._dtypes
                if state[kind] is not self.state[param][kind]
            ]
            FusedAdam.most_copied = max(FusedAdam.most_copied, sum(tensor.numel() for tensor in copied))
            for param, state in copies.items():
                torch._fused_adamw_(
                    [state["master_param"]],
                    [param.decoupled_grad.float()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(group["step"]))],
                    lr=float(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )
                for kind, tensor in state.items():
                    if tensor is not self.state[param][kind]:
                        self.set_scaled_state(param, kind, tensor)
                param.copy_(state["master_param"])


@contextmanager
def fused_adam() -> Iterator[type[FusedAdam]]:
    """Megatron-Core builds its optimizers as if Transformer Engine were there, whose layers it still does without."""
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core import utils
    from megatron.core.optimizer import distrib_optimizer

    from nemo_rl_moe.models.megatron.training import trainer

    build = trainer.build_optimizer
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    engine = {name: types.ModuleType(name) for name in names}
    engine[names[0]].__version__ = "2.9.0"  # type: ignore[attr-defined]
    engine[names[2]].FusedAdam = FusedAdam  # type: ignore[attr-defined]

    def build_with_fused_adam(*arguments: Any) -> Any:
        with (
            mock.patch.dict(sys.modules, engine),
            mock.patch.object(utils, "_te_version", None),
            mock.patch.object(megatron_optimizer, "Adam", FusedAdam),
            mock.patch.object(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
            mock.patch.object(distrib_optimizer, "Adam", FusedAdam),
        ):
            return build(*arguments)

    FusedAdam.most_copied = 0
    with mock.patch.object(trainer, "build_optimizer", build_with_fused_adam):
        yield FusedAdam
