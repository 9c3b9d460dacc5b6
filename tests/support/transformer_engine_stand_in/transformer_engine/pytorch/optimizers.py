# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adam, and the functions on lists of tensors that gradients are measured and scaled with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.gpu_stand_ins import FusedAdam as WithMasters


class FusedAdam(WithMasters):
    """Adam whose number of updates is that of a group, not of a parameter; with masters and moments in formats of their
    own if it is asked for them."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ):
        if amsgrad or not adam_w_mode or capturable:
            raise NotImplementedError("FusedAdam here is AdamW outside of CUDA graphs")
        self._has_masters = master_weights
        if master_weights:
            super().__init__(
                params,
                lr,
                betas,
                eps,
                weight_decay,
                master_weights=master_weights,
                master_weight_dtype=master_weight_dtype,
                exp_avg_dtype=exp_avg_dtype,
                exp_avg_sq_dtype=exp_avg_sq_dtype,
                use_decoupled_grad=use_decoupled_grad,
                store_param_remainders=store_param_remainders,
            )
        else:
            settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
            torch.optim.Optimizer.__init__(self, params, {**settings, "weight_decay": weight_decay})
            self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        # As the real one does: it cannot be made in a process on CPUs.
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if self._has_masters:
            super().step()
            return
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            corrections = [1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in (first, second)]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                gradient = parameter.grad.float()
                state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                size = (state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
                update = state["exp_avg"] / corrections[0] / size + group["weight_decay"] * parameter.float()
                parameter.add_(update.to(parameter.dtype), alpha=-float(group["lr"]))


class FusedSGD(torch.optim.SGD):
    """Never made."""


def multi_tensor_applier(function: Callable[..., Any], noop_flag: Tensor, lists: list[list[Tensor]], *args: Any) -> Any:
    """Call a function below on lists of tensors."""
    return function(2048 * 32, noop_flag, lists, *args)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Fill the second list with the first one times a number."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of all tensors together, `[1]`, and of each where that is asked for."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else None
