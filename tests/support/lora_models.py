# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of tiny models with values that show, in this project's modules and in peft's."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.peft_files import VISION_MODEL, is_of_attention, named_in
from tests.support.family_reference import (
    COLUMNS,
    files_beside,
    has_recurrent_layers,
    other_chunks,
    outputs_of_trainer,
    read_model,
    reference_outputs,
    trainer_of,
    write_reference,
)
from tests.support.tiny_model import forget_recorded_losses, parallel_job, shard_of_rank, tiny_batch, tiny_policy
from tests.support.training_run import RunSettings, shard_of_step, tiny_trainer

RANK = 4
Array = npt.NDArray[Any]
Factors = dict[str, Array]
"""Whole factors by this project's name of each in a checkpoint, without peft's prefix."""

_EXPERTS = re.compile(r"layers\.(\d+)\..*\.experts\.(\w+)\.(lora_[AB])\.weight$")


def lora(experts: str = "per_expert", targets: Sequence[str] = ("all-linear",), **changes: Any) -> dict[str, Any]:
    """Return a `policy.lora` section, as a keyword of `tiny_policy`."""
    fields = {
        "rank": RANK,
        "alpha": 5.0,
        "use_rslora": False,
        "targets": list(targets),
        "dropout": 0.0,
        "experts": experts,
        "init": "kaiming",
        "path": None,
    }
    return {"lora": "{" + ", ".join(f"{name}: {_text(value)}" for name, value in {**fields, **changes}.items()) + "}"}


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def pieces(chunks: Any, *, gradients: bool = False) -> Iterator[Any]:
    """Yield a `ShardedTensor` of each section of each factor of this rank; its `data` is the parameter or gradient."""
    from nemo_rl_moe.models.megatron.lora.checkpoint_names import sharded_adapters

    for sharded in sharded_adapters(chunks).values():
        values = sharded.data.main_grad if gradients else sharded.data.data
        if hasattr(sharded, "build_fn"):
            yield from sharded.build_fn(sharded.key, values, sharded.replica_id, None)
        else:
            yield replace(sharded, data=values)


def _place(piece: Any) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + length) for start, length in zip(piece.global_offset, piece.local_shape, strict=True)
    )


@torch.no_grad()
def set_random(chunks: Any, seed: int = 0) -> None:
    """Give every factor values that no layout changes, `B` among them, which begins with zeros."""
    for piece in pieces(chunks):
        generator = torch.Generator().manual_seed(zlib.crc32(piece.key.encode()) + seed)
        whole = torch.randn(piece.global_shape, generator=generator) * (0.6 * piece.global_shape[-1] ** -0.5)
        piece.data.copy_(whole[_place(piece)])


def local_factors(chunks: Any, *, gradients: bool = False) -> list[tuple[str, tuple[int, ...], Any, Array]]:
    """Return name, whole shape, place and values of each piece of this rank, or of its gradient."""
    return [
        (
            piece.key.removeprefix("base_model.model."),
            tuple(piece.global_shape),
            _place(piece),
            piece.data.detach().float().numpy().copy(),
        )
        for piece in pieces(chunks, gradients=gradients)
    ]


def whole_factors(of_ranks: Sequence[Sequence[tuple[str, tuple[int, ...], Any, Array]]]) -> Factors:
    """Put the ranks' pieces together. Replicas must agree in every bit, and nothing may be missing."""
    found: Factors = {}
    for of_rank in of_ranks:
        for name, shape, place, values in of_rank:
            whole = found.setdefault(name, np.full(shape, np.nan, np.float32))
            held = whole[place]
            if not np.isnan(held).all():
                np.testing.assert_array_equal(held, values, err_msg=f"replicas of {name} differ")
            whole[place] = values
    assert not any(np.isnan(values).any() for values in found.values())
    return found


def factors_of_ranks(chunks: Any, *, gradients: bool = False) -> Factors:
    """Return whole factors, or their gradients. Every rank calls it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, local_factors(chunks, gradients=gradients))
    return whole_factors(found)


class PeftModel:
    """A model of transformers with peft's adapters: the same layers as this project's, the same values.

    Args:
        factors: This project's.
        scale: Factor of the products.
    """

    def __init__(self, base: Any, factors: Mapping[str, Array], scale: float):
        import peft

        decoder = VISION_MODEL if hasattr(base.config, "vision_config") else None
        self._names = {name: _in_memory(name, decoder) for name in factors}
        experts = {_kind(match.group(2)) for name in factors if (match := _EXPERTS.search(name))}
        routers = any(name.endswith(".weight.lora_A.weight") for name in self._names.values())
        fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        parameters = sorted({f"mlp.experts.{fused.get(name, name)}" for name in experts})
        router = ["mlp.router.weight" if hasattr(base.config, "swiglu_limit") else "mlp.gate.weight"]
        modules = {
            self._names[name].removesuffix(".lora_A.weight")
            for name in factors
            if name.endswith(".lora_A.weight") and not _EXPERTS.search(name) and not _is_router(name)
        }
        if experts or hasattr(base.config.get_text_config(), "num_experts_per_tok"):
            # peft takes an MLP's names in a model with experts for those of the experts.
            parameters += [f"{name}.weight" for name in modules if not is_of_attention(name)]
            modules = {name for name in modules if is_of_attention(name)}
        twice = 2 if {"gate_proj", "up_proj"} <= experts else 1
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=scale * RANK,
            target_modules=sorted(modules) or None,
            target_parameters=[*parameters, *(router if routers else [])],
            rank_pattern={r".*\.gate_up_proj": twice * RANK},
            alpha_pattern={r".*\.gate_up_proj": twice * scale * RANK},
        )
        self.model: Any = peft.get_peft_model(base, config).eval()
        self._factors = factors
        with torch.no_grad():
            for name, parameter, index in self._all():
                value = torch.from_numpy(factors[name])
                if index is None:
                    parameter.copy_(value)
                else:
                    _block(parameter, name, index, twice, self._num_experts).copy_(value)

    def gradients(self) -> Factors:
        """Return the gradients after a backward pass, under this project's names; of a shared factor the sum."""
        found = {}
        kinds = {_kind(match.group(2)) for name in self._factors if (match := _EXPERTS.search(name))}
        twice = 2 if "gate_proj" in kinds else 1
        for name, parameter, index in self._all():
            gradient = parameter.grad
            if index is not None:
                gradient = _block(gradient, name, index, twice, self._num_experts)
                if self._factors[name].ndim == 2:
                    gradient = gradient.sum(0)
            found[name] = gradient.numpy().copy()
        return found

    @property
    def _num_experts(self) -> int:
        config = self.model.config.get_text_config()
        return int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0) or int(
            config.n_routed_experts
        )

    def _all(self) -> Iterator[tuple[str, Tensor, int | None]]:
        """Yield each name with peft's parameter; of experts also which half of the fused outputs it is."""
        parameters = dict(self.model.named_parameters())
        wrapped = {
            (int(match.group(1)), module.parameter_name): module
            for path, module in self.model.named_modules()
            if type(module).__name__ == "ParamWrapper"
            and ".experts" in path
            and (match := re.search(r"layers\.(\d+)\.", path))
        }
        for name in self._factors:
            if match := _EXPERTS.search(name):
                layer, kind, factor = int(match.group(1)), _kind(match.group(2)), match.group(3)
                fused = "down_proj" if kind == "down_proj" else "gate_up_proj"
                module = wrapped[layer, fused]
                yield name, getattr(module, factor)["default"].weight, int(kind == "up_proj")
            else:
                own = self._names[name].replace(".weight.lora_", ".lora_")
                yield name, parameters[f"base_model.model.{own.removesuffix('.weight')}.default.weight"], None


def _kind(name: str) -> str:
    return {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(name, name)


def _is_router(name: str) -> bool:
    return re.search(r"\.(gate|router)\.lora_[AB]\.weight$", name) is not None


def _in_memory(name: str, decoder: str | None) -> str:
    """Return transformers' name in memory: files of Mixtral and of models with a vision tower have others."""
    name = name.replace("block_sparse_moe.", "mlp.")
    if decoder is not None:
        name = named_in(decoder, name)
    return re.sub(r"(\.(?:gate|router))\.(lora_[AB])", r"\1.weight.\2", name) if _is_router(name) else name


def _block(parameter: Tensor, name: str, half: int, num_halves: int, num_experts: int) -> Tensor:
    """Return the view `[experts, rows, columns]` of one tensor's factors within peft's.

    In peft `A` counts experts before ranks, and `B` ranks before experts.
    """
    if re.search(r"\.(down_proj|w2|gate_up_proj)\.", name):
        half, num_halves = 0, 1
    if ".lora_A." in name:
        return parameter.view(num_experts, -1, parameter.shape[-1])[:, half * RANK : (half + 1) * RANK]
    of_experts = parameter.view(parameter.shape[0], -1, num_experts).permute(2, 0, 1)
    outputs = parameter.shape[0] // num_halves
    return of_experts[:, half * outputs : (half + 1) * outputs, half * RANK : (half + 1) * RANK]


@dataclass(frozen=True)
class Computed:
    """What a model with adapters computes of eight sequences."""

    logits: Array
    loss: float
    gradients: Factors


@dataclass(frozen=True)
class Comparison:
    """Outputs of both implementations; `peft_again` has other chunks of gated delta nets, as a floor of rounding."""

    ours: Computed
    peft: Computed
    peft_again: Computed
    merged: Array
    base: Array
    ours_without: Array


def plain_policy(
    experts: str, targets: tuple[str, ...] = ("all-linear",), world_size: int = 1, **changes: Any
) -> PolicyConfig:
    """Return a policy whose loss is that of the tokens alone, and whose gradients are left as they are."""
    fields = {"moe_aux_loss_coeff": 0.0, "max_grad_norm": None, **lora(experts, targets), **changes}
    return tiny_policy(world_size, **fields)


def compare_with_peft(name: str, policy: PolicyConfig, root: str) -> Comparison | None:
    """Run on every rank: a model of `FAMILY_MODELS` with adapters in both implementations; the result is rank 0's."""
    folder, merged = Path(root, name), Path(root, "merged")
    assert policy.lora is not None
    with parallel_job(policy) as rank:
        if rank == 0 and not folder.exists():
            write_reference(name, folder)
        dist.barrier()
        forget_recorded_losses()
        trainer = trainer_of(folder, policy)
        set_random(trainer.chunks)
        outputs = outputs_of_trainer(trainer)
        with trainer.adapters.off():
            without = outputs_of_trainer(trainer)
        trainer.save_weights(merged, files_beside(folder))
        factors, place = factors_of_ranks(trainer.chunks), trainer.coordinates
        batch = _batch(trainer.hf_config.vocab_size)
        shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size)
        loss = trainer.train([shard], sft_loss).global_loss
        gradients = factors_of_ranks(trainer.chunks, gradients=True)
    if outputs is None or without is None:
        return None
    return Comparison(
        Computed(outputs.logits, loss, gradients),
        *_of_peft(read_model(folder), factors, policy.lora.scale),
        reference_outputs(merged).logits,
        reference_outputs(folder).logits,
        without.logits,
    )


def _batch(vocabulary: int) -> Any:
    return tiny_batch(3, vocabulary, shortest=COLUMNS, longest=COLUMNS)


def _of_peft(base: Any, factors: Factors, scale: float) -> tuple[Computed, Computed]:
    peft = PeftModel(base, factors, scale)
    found = _computed(peft)
    if not has_recurrent_layers(peft.model):
        return found, found
    peft.model.zero_grad()
    with other_chunks(peft.model.get_base_model(), chunk_size=4):
        return found, _computed(peft)


def _computed(peft: PeftModel) -> Computed:
    batch = _batch(peft.model.config.vocab_size)
    logits = peft.model(batch.input_ids).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    mask = batch.token_mask[:, 1:]
    loss = -(logprobs * mask).sum() / mask.sum()
    loss.backward()
    return Computed(logits.detach().numpy(), float(loss), peft.gradients())


@dataclass(frozen=True)
class LoraRun:
    """What one rank saw of some steps; the factors after them."""

    losses: list[float]
    grad_norms: list[float]
    factors: list[Any]
    num_trained: int


def train_adapters(settings: RunSettings) -> LoraRun:
    """Run on every rank of the job: optimizer steps from adapters that show."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        set_random(trainer.chunks)
        trainer.optimizer.reload_model_params()
        losses, norms = [], []
        for step in range(settings.num_steps):
            result = trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
            losses.append(result.global_loss)
            norms.append(result.grad_norm)
        parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return LoraRun(losses, norms, local_factors(trainer.chunks), trained)


def assert_same_run(runs: list[LoraRun], expected: LoraRun, rounding: float = 5e-6) -> None:
    """A job's ranks train as one rank does. Gradient norms may differ by `rounding`, factors by it or 1e-5."""
    found, wanted = whole_factors([run.factors for run in runs]), whole_factors([expected.factors])
    assert found.keys() == wanted.keys()
    for run in runs:
        np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-6)
        np.testing.assert_allclose(run.grad_norms, expected.grad_norms, rtol=rounding)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=max(1e-5, rounding), err_msg=name)


def save_adapters(settings: RunSettings, folder: str) -> LoraRun:
    """Run on every rank: one step, a checkpoint, and a step after it, which is what is returned."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.train([shard_of_step(trainer, settings, 0)], sft_loss)
        trainer.start_checkpoint(Path(folder), with_optimizer=True)
        assert trainer.finish_checkpoint() is None
        return _one_step(trainer, settings)


def resume_adapters(settings: RunSettings, folder: str) -> LoraRun:
    """Run on every rank: the step after the checkpoint; what was before it must leave no trace."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.train([shard_of_step(trainer, settings, 99)], sft_loss)
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        return _one_step(trainer, settings)


def _one_step(trainer: Any, settings: RunSettings) -> LoraRun:
    result = trainer.train([shard_of_step(trainer, settings, 1)], sft_loss)
    return LoraRun([result.global_loss], [result.grad_norm], local_factors(trainer.chunks), 0)
