# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models as transformers makes, writes and computes them; and how close other outputs come to these."""

import importlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nemo_rl_moe.models.families import FAMILIES
from tests.support.family_models import FAMILY_MODELS
from tests.support.tiny_model import tiny_batch

COLUMNS = 12
PROMPTS = ((7, 3, 11, 20, 5), (41, 2), (9, 9, 30, 1, 17, 25, 60, 4))
NUM_NEW_TOKENS = 6
# So that every model has several files.
_SHARD_SIZE = "40KB"
# Scores of two experts that are as close as that can change places by rounding.
_TIE = 1e-5
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ModelOutputs:
    """What a model makes of `token_ids`.

    Attributes:
        logits: `[rows, columns, vocabulary]`, float32.
        chosen: For each layer with experts, from the first, those of each token in rising order, `[rows, columns, k]`.
        scores: For each of these layers, what experts are chosen by, `[rows, columns, experts]`; of transformers alone.
    """

    logits: Array
    chosen: list[Array]
    scores: list[Array]


@dataclass(frozen=True)
class Response:
    """What a model continues a prompt with, and the log-probability of each token."""

    token_ids: list[int]
    logprobs: list[float]


def token_ids(vocabulary_size: int) -> Tensor:
    """Return the eight rows of random tokens, `[rows, columns]`."""
    return tiny_batch(3, vocabulary_size, shortest=COLUMNS, longest=COLUMNS).input_ids


def write_reference(name: str, folder: Path, *, as_in_memory: bool = False) -> None:
    """Write a Hugging Face folder with random weights, in several files; nothing is 0 or 1, or too small to show.

    Args:
        name: A key of `FAMILY_MODELS`.
        folder: Where to.
        as_in_memory: With the names and forms that transformers has in memory, such as experts in one tensor.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    family_model = FAMILY_MODELS[name]
    model = AutoModelForCausalLM.from_config(family_model.transformers_config(), dtype=torch.float32)
    with torch.no_grad():
        persistent = set(model.state_dict())
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for tensor_name, tensor in tensors.items():
            if tensor_name in persistent:
                tensor.copy_(_random_values(tensor_name, tensor))
    save_model(model, folder, as_in_memory=as_in_memory)
    (folder / "config.json").write_text(json.dumps(family_model.config_json()))


def save_model(model: Any, folder: Path, *, as_in_memory: bool = False) -> None:
    """Write a model of transformers in several files."""
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE, save_original_format=not as_in_memory)


def read_model(folder: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    """Return a folder's model as transformers computes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads((folder / "config.json").read_text())
    model_type = fields.pop("model_type")
    config = AutoConfig.for_model(FAMILIES[model_type].transformers_type or model_type, **fields)
    found = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager", dtype=dtype)
    return found.eval()


def has_delta_nets(model: Any) -> bool:
    """Return whether a model of transformers mixes tokens by the gated delta rule."""
    return any(hasattr(module, "linear_attn") for module in model.modules())


@contextmanager
def other_chunks(model: Any, chunk_size: int = 16) -> Iterator[None]:
    """Let transformers compute the gated delta rule in other chunks than of 64: the same on paper."""
    assert has_delta_nets(model)
    module = importlib.import_module(type(model).__module__)
    with mock.patch.object(
        module,
        "torch_chunk_gated_delta_rule",
        partial(module.torch_chunk_gated_delta_rule, chunk_size=chunk_size),
    ):
        yield


def _random_values(name: str, like: Tensor) -> Tensor:
    sampled = torch.randn(like.shape)
    if name.endswith("norm.weight"):
        # Some families begin with 1, others add 1.
        return like + 0.3 * sampled
    if re.search(r"bias|sinks", name):
        return 0.3 * sampled
    # Routers distinguish their experts, and every product keeps the size of its inputs.
    return sampled * (0.4 if re.search(r"\.(gate|router|shared_expert_gate)\.weight", name) else like.shape[-1] ** -0.5)


def reference_outputs(folder: Path) -> ModelOutputs:
    """Return what transformers computes with a folder."""
    model = read_model(folder)
    ids = token_ids(model.config.vocab_size)
    chosen, scores = [], []

    def keep(router: nn.Module, arguments: Any, output: Any) -> None:
        logits, _, experts = output
        chosen.append(as_rows(experts, ids.shape))
        scores.append(as_rows(_choosing_scores(router, logits, arguments), ids.shape, in_order=False))

    for router in routers_of_transformers(model):
        router.register_forward_hook(keep)
    with torch.no_grad():
        logits = model(ids).logits
    return ModelOutputs(logits.numpy(), chosen, scores)


def routers_of_transformers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model of transformers, from the first layer on; they give logits, weights, experts."""
    return [module for module in model.modules() if re.search(r"Top[kK]Router$", type(module).__name__)]


def greedy_responses(folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Response]:
    """Return the most likely next token of each prompt, again and again, without a cache."""
    model = read_model(folder)
    return [_greedy_response(model, prompt) for prompt in prompts]


def _greedy_response(model: Any, prompt: Sequence[int]) -> Response:
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_NEW_TOKENS):
            best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).max(-1)
            tokens.append(int(best.indices))
            logprobs.append(float(best.values))
    return Response(tokens[len(prompt) :], logprobs)


def _choosing_scores(router: nn.Module, logits: Tensor, arguments: Sequence[Tensor]) -> Tensor:
    # MiniMax-M2's block has the bias, and gives it to its router.
    bias = arguments[1] if len(arguments) > 1 else getattr(router, "e_score_correction_bias", None)
    return logits if bias is None else logits.float().sigmoid() + bias


def as_rows(values: Tensor, shape: Sequence[int], *, in_order: bool = True) -> Array:
    """`[rows * columns, n]` to `[rows, columns, n]`, numbers of experts in rising order."""
    values = values.reshape(*shape, -1)
    return (values.sort(-1).values if in_order else values).numpy().copy()


def logit_difference(ours: ModelOutputs, reference: ModelOutputs) -> float:
    """Return the largest difference of two logits."""
    assert ours.logits.shape == reference.logits.shape
    return float(np.abs(ours.logits - reference.logits).max())


def assert_same_experts(ours: ModelOutputs, reference: ModelOutputs) -> None:
    """Every token of every layer goes to the same experts, unless their scores are as good as equal."""
    assert len(ours.chosen) == len(reference.chosen)
    layers = zip(ours.chosen, reference.chosen, reference.scores, strict=True)
    for number, (mine, theirs, scores) in enumerate(layers):
        assert mine.shape == theirs.shape
        for row, column in np.argwhere((mine != theirs).any(-1)):
            only_mine = np.setdiff1d(mine[row, column], theirs[row, column])
            only_theirs = np.setdiff1d(theirs[row, column], mine[row, column])
            exchanged = scores[row, column, [*only_mine, *only_theirs]]
            assert np.ptp(exchanged) < _TIE, (
                f"layer {number} with experts, row {row}, column {column}: chosen {mine[row, column]}, "
                f"by transformers {theirs[row, column]}"
            )


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(written: Path, original: Path) -> None:
    """Two folders hold the same tensors under the same names, bit for bit."""
    found, expected = tensors_in(written), tensors_in(original)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
