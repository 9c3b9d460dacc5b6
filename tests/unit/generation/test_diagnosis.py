# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Outputs of two torch modules, noted and compared."""

import numpy as np
import torch
from torch import Tensor, nn

from nemo_rl_moe.generation.diagnosis import outputs_noted
from nemo_rl_moe.generation.refit_check import first_disagreement


class Block(nn.Module):
    """A branch that gives a pair, as decoder layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.mlp(self.norm(hidden)), None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block, self.head = nn.Embedding(9, 4), Block(), nn.Linear(3, 9)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.block(self.embedding(ids))
        logits: Tensor = self.head(hidden)
        return logits.argmax(-1)


def test_outputs_are_those_of_the_first_pass_by_name() -> None:
    model = Model().bfloat16()
    ids = torch.tensor([[1, 2, 3]])
    with outputs_noted(model) as outputs:
        model(ids)
        model(torch.tensor([[4]]))
    assert {name: output.shape for name, output in outputs.items()} == {
        "embedding": (3, 4),
        "block.norm": (3, 4),
        "block.mlp": (3, 3),
        "block": (3, 3),
        "head": (3, 9),
    }
    assert all(output.dtype == np.float32 for output in outputs.values())
    np.testing.assert_array_equal(outputs["embedding"], model.embedding(ids[0]).float().detach())
    assert not any(module._forward_hooks for module in model.modules()), "nothing stays"


def test_the_module_whose_weights_differ_comes_first() -> None:
    one, other = Model(), Model()
    with torch.no_grad():
        other.block.mlp.weight[0, 0] += 1.0
    noted = []
    for model in (one, other):
        with outputs_noted(model) as outputs:
            model(torch.tensor([[1, 2, 3]]))
        noted.append(outputs)
    name, tokens = first_disagreement(noted[1], noted[0], 1e-3) or ("", np.array([]))
    assert (name, tokens.tolist()) == ("block.mlp", [0, 1, 2])
    assert first_disagreement(noted[0], noted[0], 1e-6) is None
