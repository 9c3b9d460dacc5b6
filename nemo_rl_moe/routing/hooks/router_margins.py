# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Margins of transformers' routers: score of the last chosen expert minus the best score of an unchosen expert."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_moe.routing.replay import limited_to_groups
from nemo_rl_moe.routing.routers import RouterKind, RouterLayer
from nemo_rl_moe.shapes import Float, Int

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of an expert bias that is added to the sigmoid of the logits: an attribute of the router, or an argument of its
call.
"""


def margins_of_call(
    layer: RouterLayer,
    router: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    experts: Int[Tensor, "tokens topk"],
) -> Float[Tensor, " tokens"] | None:
    """Return the margins of a router's call, or None if it returns no logits or chooses all experts.

    Margins are computed from the softmax of the logits or, with a bias, from their sigmoid plus the bias. If the router
    chooses within groups of experts, experts of other groups do not count (`limited_to_groups`). A margin that is NaN
    or below 0 shows that the router chose by other scores.

    Args:
        args: Positional arguments of the call.
        kwargs: Named arguments of the call.
        outputs: Outputs of the call, the logits first.
        experts: The chosen experts.
    """
    if layer.kind is not RouterKind.TRANSFORMERS or layer.topk >= layer.num_experts or not isinstance(outputs, tuple):
        return None
    logits, experts = outputs[0], experts.long()
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (len(experts), layer.num_experts):
        return None
    logits = logits.detach().float()
    bias = _bias_of_call(layer, router, args, kwargs)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid() + bias.detach().float()
    of_groups = scores.new_full((len(scores),), torch.inf)
    num_groups, group_topk = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    if num_groups > 1 and getattr(router, "topk_method", "") != "greedy":
        # A group's score is its best expert's in DeepSeek-V2. In later models with a bias, it is that of its two best.
        scores, of_groups = limited_to_groups(scores, num_groups, group_topk, 1 if bias is None else 2)
    of_experts = scores.gather(1, experts).amin(-1) - scores.scatter(1, experts, -torch.inf).amax(-1)
    return torch.minimum(of_experts, of_groups)


def _bias_of_call(
    layer: RouterLayer, router: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Float[Tensor, " experts"] | None:
    found = [*args[1:], *(kwargs.get(name) for name in _BIASES), *(getattr(router, name, None) for name in _BIASES)]
    biases = (each for each in found if isinstance(each, Tensor) and tuple(each.shape) == (layer.num_experts,))
    return next(biases, None)
