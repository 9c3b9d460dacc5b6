# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Search for the wrong tensors after a failed refit check: compare the engine with transformers' model.

transformers' model gets the trainer's weights. Both models run the same tokens, and the outputs of modules of the same
name are compared in the order of the forward pass. The first module with different outputs has equal inputs, so its
weights are wrong. The search costs a copy of the model on disk and in host memory, in a run that is about to end.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from jaxtyping import Float
from torch import Tensor, nn

from nemo_rl_moe.generation.interface import ModuleOutputs, TokenSequence
from nemo_rl_moe.generation.refit_check import first_disagreement, guilty_experts

TOLERANCE = 1e-3
"""Largest relative difference of outputs that count as equal in float32. Rounding causes a thousandth of it."""
COARSE_TOLERANCE = 0.1
_DECODER_LAYER = re.compile(r"(^model|layers\.\d+)$")


@contextmanager
def outputs_noted(model: nn.Module) -> Iterator[dict[str, Float[np.ndarray, "tokens features"]]]:
    """Record the first output tensor of each module, `[tokens, features]`, in the first forward pass."""
    outputs: dict[str, Float[np.ndarray, "tokens features"]] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1 and name not in outputs:
                outputs[name] = first.detach().float().cpu().reshape(-1, first.shape[-1]).numpy().copy()

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def reference_outputs(
    folder: Path, sequences: Sequence[TokenSequence]
) -> dict[str, Float[np.ndarray, "tokens features"]]:
    """Return the outputs of transformers' model in float32, from a folder of weights. Runs in a separate process."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with outputs_noted(model) as outputs, torch.no_grad():
        model(input_ids=torch.tensor(sequences))
    return outputs


def disagreement(
    engine_outputs: Callable[[TokenSequence], ModuleOutputs],
    save_weights: Callable[[Path], object],
    sequences: Sequence[TokenSequence],
    *,
    in_float32: bool,
    topk: int | None,
) -> str:
    """Return a description of the first module whose weights in the engine differ from the trainer's.

    Args:
        sequences: Sequences of one length. More sequences give a shorter list of suspected experts.
        topk: Number of experts of a token, to name the wrong experts. None for a model without MoE layers.
    """
    with tempfile.TemporaryDirectory(prefix="nemo_rl_moe-diagnosis-") as parent:
        folder = Path(parent, "model")
        save_weights(folder)
        expected: ModuleOutputs = ray.get(ray.remote(reference_outputs).options(num_cpus=0).remote(folder, sequences))
    by_sequence = [engine_outputs(tokens) for tokens in sequences]
    found = {name: np.concatenate([outputs[name] for outputs in by_sequence]) for name in by_sequence[0]}
    num_tokens = sum(map(len, sequences))
    # vLLM's decoder layers return the branch and the residual stream separately, transformers' return the sum.
    shared = {name: output for name, output in expected.items() if name in found and not _DECODER_LAYER.search(name)}
    if not shared:
        return "The engine and transformers' model have no module in common whose outputs can be compared."
    first = first_disagreement(found, shared, TOLERANCE if in_float32 else COARSE_TOLERANCE)
    if first is None:
        return "All modules that engine and transformers have in common have equal outputs; the output layer differs."
    name, wrong = first
    experts = ""
    block = name.removesuffix(".experts")
    router = next((shared[each] for each in (f"{block}.gate", f"{block}.router") if each in shared), None)
    if router is not None and topk:
        routes = np.argsort(-router, axis=1)[:, :topk]
        guilty = list(guilty_experts(routes, wrong, num_tokens))
        if 0 < len(guilty) < router.shape[1]:
            experts = f", expert{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}"
    return (
        f"The first module whose output is wrong is {name}{experts} ({len(wrong)} of {num_tokens} tokens):"
        f" its weights, or those of the norm before it, are not the trainer's."
    )
