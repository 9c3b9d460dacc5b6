# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2 layer gives mamba_ssm's kernel what its own torch code computes with. A stand-in takes the arguments."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron.layers import mamba
from nemo_rl_moe.models.megatron.layers.mamba import Mamba2Mixer
from nemo_rl_moe.models.megatron.layers.recurrent_mixer import RecurrentState
from nemo_rl_moe.models.megatron.layers.state_space import recurrent_state_space
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.tiny_model import tiny_policy


class Linear(torch.nn.Linear):
    """A linear layer with Megatron-Core's arguments and results."""

    def __init__(self, inputs: int, outputs: int, **_others: Any):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, values: Tensor) -> tuple[Tensor, None]:
        return super().forward(values), None


def mixer() -> Mamba2Mixer:
    config = build_transformer_config(tiny_policy(), FAMILY_MODELS["nemotron_h"].hf_config())
    torch.manual_seed(0)
    linears = SimpleNamespace(in_proj=Linear, out_proj=Linear)
    built = Mamba2Mixer(config, linears, 1, SimpleNamespace(tp=None))  # type: ignore[arg-type]
    with torch.no_grad():
        for name in ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight"):
            built.get_parameter(name).normal_()
    return built


def as_documented(calls: list[str]) -> Callable[..., Any]:
    """Return mamba_ssm's `mamba_chunk_scan_combined` by its documentation, token by token."""

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> Any:
        assert (z, cu_seqlens, dt_limit, dt_softplus) == (None, None, (0.0, float("inf")), True)
        assert chunk_size > 0
        assert D is not None
        assert dt_bias is not None
        calls.append("packed" if seq_idx is not None else "rows")
        steps = F.softplus(dt + dt_bias)
        if seq_idx is None:
            found, state = recurrent_state_space(x * steps[..., None], steps * A, B, C, state=initial_states)
        else:
            assert (seq_idx.dtype, seq_idx.shape) == (torch.int32, x.shape[:2])
            counts = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
            each = [tensor.split(counts, 1) for tensor in (x * steps[..., None], steps * A, B, C)]
            found = torch.cat([recurrent_state_space(*parts)[0] for parts in zip(*each, strict=True)], 1)
        found = found + D[:, None] * x
        return (found, state) if return_final_states else found

    return scan


@pytest.mark.parametrize("how", ["rows", "packed", "with state"])
def test_kernel_gets_what_torch_computes_with(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls = mixer(), []  # type: ignore[var-annotated]
    mixed = torch.randn(20, 1, sum(layer.sizes.projected), generator=torch.Generator().manual_seed(1))
    boundaries = torch.tensor([0, 5, 6, 20], dtype=torch.int32) if how == "packed" else None

    def outputs() -> list[Tensor]:
        if how != "with state":
            return [layer.mix(mixed, boundaries=boundaries)]
        state = RecurrentState()
        found = [layer.mix(part, state=state) for part in mixed.split([7, 12, 1])]
        assert state.memory is not None
        return [*found, state.memory]

    expected = outputs()
    monkeypatch.setattr(mamba, "_kernel_for", lambda values: as_documented(calls))
    torch.testing.assert_close(outputs(), expected, rtol=1e-5, atol=1e-5)
    # One token is computed without the kernel.
    assert calls == {"rows": ["rows"], "packed": ["packed"], "with state": ["rows", "rows"]}[how]
