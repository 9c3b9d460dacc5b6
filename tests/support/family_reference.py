# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models as transformers makes, writes and computes them; and how close other outputs come to these."""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.families import FAMILIES
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
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
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE, save_original_format=not as_in_memory)


def read_model(folder: Path, dtype: torch.dtype | str = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads((folder / "config.json").read_text())
    model_type = fields.pop("model_type")
    config = AutoConfig.for_model(FAMILIES[model_type].transformers_type or model_type, **fields)
    found = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager", dtype=dtype)
    return found.eval()


def has_recurrent_layers(model: Any) -> bool:
    """Return whether a model of transformers mixes tokens by the gated delta rule, or has Mamba-2 layers."""
    return any(hasattr(module, "linear_attn") or hasattr(module, "ssm_state_size") for module in model.modules())


@contextmanager
def other_chunks(model: Any, chunk_size: int = 16) -> Iterator[None]:
    """Let transformers compute recurrent layers in other chunks than of 64 or 128: the same on paper."""
    assert has_recurrent_layers(model)
    module = importlib.import_module(type(model).__module__)
    rule = getattr(module, "torch_chunk_gated_delta_rule", None)
    with ExitStack() as changes:
        if rule is not None:
            smaller = partial(rule, chunk_size=chunk_size)
            changes.enter_context(mock.patch.object(module, "torch_chunk_gated_delta_rule", smaller))
        for mixer in (each for each in model.modules() if hasattr(each, "ssm_state_size")):
            changes.enter_context(mock.patch.object(mixer, "chunk_size", chunk_size))
        yield


def _random_values(name: str, like: Tensor) -> Tensor:
    sampled = torch.randn(like.shape)
    if name.endswith(("norm.weight", "norm_f.weight")):
        # Some families begin with 1, others add 1.
        return like + 0.3 * sampled
    if re.search(r"bias|sinks", name):
        return 0.3 * sampled
    # Routers distinguish their experts, and every product keeps the size of its inputs.
    return sampled * (0.4 if re.search(r"\.(gate|router|shared_expert_gate)\.weight", name) else like.shape[-1] ** -0.5)


def reference_outputs(folder: Path) -> ModelOutputs:
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
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(written: Path, original: Path) -> None:
    """Two folders hold the same tensors under the same names, bit for bit."""
    found, expected = tensors_in(written), tensors_in(original)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def trainer_of(folder: Path, policy: PolicyConfig, num_steps: int = 1) -> Any:
    from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

    return MegatronTrainer(policy, plain_config(load_hf_config(str(folder))), folder, num_steps=num_steps)


def files_beside(folder: Path) -> dict[str, bytes]:
    """Return what is to lie beside the weights of a folder's model when they are written."""
    return {"config.json": (folder / "config.json").read_bytes()}


def outputs_of_trainer(trainer: Any) -> ModelOutputs | None:
    """Return the logits and chosen experts of the trainer's weights, on rank 0. Every rank calls it.

    Each data-parallel rank runs its share of the rows; tensor-parallel ones hold parts of the vocabulary and of the
    sequence; pipeline stages hold layers.
    """
    place, rows = trainer.coordinates, token_ids(trainer.hf_config.vocab_size)
    mine = rows.chunk(place.data_parallel_size)[place.data_parallel_rank]
    # Interleaved stages want as many microbatches as there are stages.
    microbatches = mine.chunk(2)
    with _routed_experts(trainer.chunks, len(microbatches[0])) as found:
        logits = _logits(trainer, microbatches)
    chosen = {layer: np.concatenate(of_microbatches) for layer, of_microbatches in found.items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (place, chosen, np.concatenate(logits) if logits else None))
    if dist.get_rank() != 0:
        return None
    whole = _joined([(where, part) for where, _, part in parts if part is not None], tensor_axis=2)
    layers = {layer for _, of_rank, _ in parts for layer in of_rank}
    by_layer = [
        _joined([(where, of_rank[layer]) for where, of_rank, _ in parts if layer in of_rank], tensor_axis=1)
        for layer in sorted(layers)
    ]
    return ModelOutputs(whole[..., : trainer.hf_config.vocab_size], by_layer, [])


def _joined(parts: Sequence[tuple[Any, Array]], tensor_axis: int) -> Array:
    """Put the ranks' parts of one array together: data-parallel ranks along the rows."""
    held = {(where.data_parallel_rank, where.tensor_rank): part for where, part in parts}
    data_ranks, tensor_ranks = (sorted(set(ranks)) for ranks in zip(*held, strict=True))
    blocks = [np.concatenate([held[data, tensor] for tensor in tensor_ranks], tensor_axis) for data in data_ranks]
    return np.concatenate(blocks)


@contextmanager
def _routed_experts(chunks: Sequence[nn.Module], num_rows: int) -> Iterator[dict[int, list[Array]]]:
    """By the number of the layer, the chosen experts of each microbatch of this rank, `[rows, its columns, k]`."""
    from megatron.core.transformer.moe.router import TopKRouter

    chosen: dict[int, list[Array]] = {}

    def keep(router: Any, arguments: Any, output: Any) -> None:
        indices = output[1]
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 1].reshape(len(indices), -1)
        # The model's tokens run sequence first.
        by_column = as_rows(indices, (len(indices) // num_rows, num_rows))
        chosen.setdefault(router.layer_number, []).append(by_column.transpose(1, 0, 2))

    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    handles = [router.register_forward_hook(keep) for router in routers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def _logits(trainer: Any, microbatches: Sequence[Tensor]) -> list[Array]:
    """Return one forward pass of each through all stages; this rank's part of the vocabulary, on the last stage
    alone.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rows, columns = microbatches[0].shape
    positions = torch.arange(columns).expand(rows, columns)
    local = trainer.policy.megatron_cfg.layer_spec == "local"
    mask = torch.ones(columns, columns, dtype=torch.bool).triu_(1)[None, None] if local else None

    def step(iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        # The schedule divides the loss in place, and does nothing else with it.
        return model(next(iterator), positions, mask), lambda logits: (logits.new_zeros(()), logits)

    chunks = list(trainer.chunks)
    for chunk in chunks:
        chunk.eval()
    iterators = [iter(microbatches) for _ in chunks]
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=columns,
            micro_batch_size=rows,
            forward_only=True,
        )
    return [logits.numpy() for logits in found]
