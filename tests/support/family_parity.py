# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family through all that a trainer does with them, in any layout, beside transformers.

Starting processes and importing takes longer than the models: a job goes through many of them.
"""

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.generation.interface import GenerationBatch, SamplingParameters
from tests.support.family_models import FAMILY_MODELS, FamilyModel
from tests.support.family_reference import (
    NUM_NEW_TOKENS,
    PROMPTS,
    ModelOutputs,
    Response,
    files_beside,
    greedy_responses,
    outputs_of_trainer,
    read_model,
    reference_outputs,
    trainer_of,
    write_reference,
)
from tests.support.gloo_ranks import RankError, run_ranks, run_ranks_with_engine
from tests.support.tiny_model import (
    forget_recorded_losses,
    layout,
    parallel_job,
    shard_of_rank,
    tiny_batch,
    tiny_policy,
)


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks, and with which modules.

    Attributes:
        world_size: Number of ranks.
        sizes: As `tests.support.tiny_model.layout` has them.
        layer_spec: This project's modules, or Megatron-Core's own.
    """

    world_size: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    layer_spec: str = "auto"

    def holds(self, model: FamilyModel) -> bool:
        """Return whether the model can be spread like this."""
        chunks = self.sizes.get("pp", 1) * self.sizes.get("vpp", 1)
        cuts_experts = self.sizes.get("etp", 1) > 1
        return model.num_layers % (chunks * model.layers_together) == 0 and (
            not cuts_experts or model.experts_can_be_cut
        )

    def policy(self, *, has_experts: bool) -> PolicyConfig:
        """Return the configuration; ranks that would share experts share the batch where there are none."""
        sizes = {name: size for name, size in self.sizes.items() if has_experts or name != "ep"}
        return tiny_policy(self.world_size, layer_spec=self.layer_spec, **layout(**sizes))


LAYOUTS: Mapping[str, Layout] = {
    "one_rank": Layout(),
    "one_rank_local": Layout(layer_spec="local"),
    "pp2_ep2": Layout(4, {"pp": 2, "ep": 2}),
    "dp2": Layout(2),
    "tp2": Layout(2, {"tp": 2}),
    "tp2_local": Layout(2, {"tp": 2}, "local"),
    "ep2": Layout(2, {"ep": 2}),
    "pp2": Layout(2, {"pp": 2}),
    "pp2_vpp2": Layout(2, {"pp": 2, "vpp": 2}),
    "tp2_etp2_local": Layout(2, {"tp": 2, "etp": 2}, "local"),
    "tp2_ep2_pp2": Layout(4, {"tp": 2, "ep": 2, "pp": 2}),
}


@dataclass(frozen=True)
class Step:
    """One optimizer step; the same on every rank."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class FamilyRun:
    """What a trainer does with a folder.

    Attributes:
        outputs: Of the folder's weights, which are then exported.
        responses: To `PROMPTS`, greedily.
        step: One step of supervised fine-tuning.
        trained: Outputs of the weights after it, which are exported too.
        packed_step: The same step from the folder's weights, with packed sequences; Megatron-Core's own attention knows
            none.
    """

    outputs: ModelOutputs
    responses: list[Response]
    step: Step
    trained: ModelOutputs
    packed_step: Step | None


@dataclass(frozen=True)
class Reference:
    """What transformers does with a folder."""

    outputs: ModelOutputs
    responses: list[Response]


@dataclass(frozen=True)
class Export:
    """What transformers makes of an export.

    Attributes:
        is_same: Of the weights before the step: every tensor is that of the folder, bit for bit.
        trained: Outputs of the weights after it.
    """

    is_same: bool
    trained: ModelOutputs


def run_family(folder: Path, policy: PolicyConfig, exports: Path) -> FamilyRun | None:
    """Return every rank of a job calls it, in `parallel_job`.

    Args:
        folder: A Hugging Face folder.
        policy: The layout, and what else there is to choose.
        exports: Where to write the weights, in the folders `same` and `trained`.

    Returns:
        The run on rank 0, None on the others.
    """
    forget_recorded_losses()
    trainer = trainer_of(folder, policy)
    outputs = outputs_of_trainer(trainer)
    trainer.save_weights(exports / "same", files_beside(folder))
    responses = responses_of_trainer(trainer)
    step = _train_step(trainer)
    trained = outputs_of_trainer(trainer)
    trainer.save_weights(exports / "trained", files_beside(folder))
    packed_step = None
    if policy.megatron_cfg.layer_spec != "local":
        packing = policy.sequence_packing.model_copy(update={"enabled": True})
        packed_step = _train_step(trainer_of(folder, policy.model_copy(update={"sequence_packing": packing})))
    if outputs is None or trained is None:
        return None
    return FamilyRun(outputs, responses, step, trained, packed_step)


def responses_of_trainer(trainer: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Response]:
    """Return greedy responses, checked to be the same on all ranks that report them. Every rank calls it."""
    sampling = SamplingParameters(max_new_tokens=NUM_NEW_TOKENS, temperature=0.0)
    found = trainer.generate(GenerationBatch(prompts, tuple(range(len(prompts))), sampling), max_batch_size=None)
    own = [Response(sequence.token_ids.tolist(), sequence.logprobs.tolist()) for sequence in found]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    reported = [responses for responses in of_ranks if responses]
    tokens = [[response.token_ids for response in responses] for responses in reported]
    assert all(of_rank == tokens[0] for of_rank in tokens)
    return list(reported[0])


def _train_step(trainer: Any) -> Step:
    place, vocabulary = trainer.coordinates, trainer.hf_config.vocab_size
    shard = shard_of_rank(tiny_batch(11, vocabulary), place.data_parallel_rank, place.data_parallel_size)
    result = trainer.train([shard], sft_loss)
    return Step(result.global_loss, result.grad_norm)


# ---- what the ranks of a job run, for many models ----


def write_references(names: Sequence[str], root: str) -> dict[str, Reference | str]:
    """Run on one rank: writes `root/NAME` for each model; what transformers does with it, or why it
    fails.
    """

    def write(folder: Path, name: str) -> Reference:
        write_reference(name, folder)
        return Reference(reference_outputs(folder), greedy_responses(folder))

    return {name: or_why_not(partial(write, Path(root, name), name)) for name in names}


def run_families(names: Sequence[str], root: str, policy: PolicyConfig, exports: str) -> dict[str, Any]:
    """Run on every rank of a job: `run_family` of `root/NAME`, exported to `exports/NAME`, or why it
    fails.
    """
    with parallel_job(policy):
        return {name: or_why_not(partial(run_family, Path(root, name), policy, Path(exports, name))) for name in names}


def read_exports(names: Sequence[str], root: str, exports: str) -> dict[str, Export | str]:
    """Run on one rank: what transformers makes of the exports of `run_families`, or why it fails."""
    return {name: or_why_not(partial(_read_export, Path(root, name), Path(exports, name))) for name in names}


def _read_export(folder: Path, exports: Path) -> Export:
    original, same = (read_model(source, dtype="auto").state_dict() for source in (folder, exports / "same"))
    is_same = original.keys() == same.keys() and all(
        tensor.dtype == same[name].dtype and torch.equal(tensor, same[name]) for name, tensor in original.items()
    )
    return Export(is_same, reference_outputs(exports / "trained"))


def or_why_not(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or its traceback: other models are still to be heard of."""
    try:
        return function()
    except Exception:
        return traceback.format_exc()


class ParityJobs:
    """Runs each job once, for all the models that are asked for.

    Args:
        wanted: Keys of `FAMILY_MODELS` with keys of `LAYOUTS`; on one rank every model runs that runs anywhere.
        root: A folder for the models' folders.
        with_engine: With Transformer Engine's modules; then on one rank nothing runs that is not asked for.
    """

    def __init__(self, wanted: Collection[tuple[str, str]], root: Path, *, with_engine: bool = False):
        self._names, self._root = sorted({name for name, _ in wanted}), root
        self._wanted = {*wanted, *((name, "one_rank") for name in self._names if not with_engine)}
        self._run_ranks = run_ranks_with_engine if with_engine else run_ranks
        self._references: dict[str, Any] = {}
        self._runs: dict[tuple[str, bool], dict[str, Any]] = {}
        self._exports: dict[tuple[str, bool], dict[str, Any]] = {}

    def folder(self, name: str) -> Path:
        """Return the model's folder, written by transformers."""
        self.reference(name)
        return self._root / "references" / name

    def reference(self, name: str) -> Reference:
        """Return what transformers does.

        Raises:
            AssertionError: It fails.
        """
        if not self._references:
            (self._references,) = run_ranks(write_references, 1, self._names, str(self._root / "references"))
        found = self._references[name]
        assert isinstance(found, Reference), found
        return found

    def run(self, name: str, layout_name: str) -> FamilyRun:
        """Return what this project does, in one of `LAYOUTS` that holds the model.

        Raises:
            AssertionError: It fails.
        """
        self.reference(name)
        has_experts = FAMILY_MODELS[name].has_experts
        key = (layout_name, has_experts)
        if key not in self._runs:
            alike = [
                other
                for other in self._names
                if (other, layout_name) in self._wanted and FAMILY_MODELS[other].has_experts == has_experts
            ]
            self._runs[key] = self._run(alike, layout_name, LAYOUTS[layout_name].policy(has_experts=has_experts))
        found = self._runs[key][name]
        assert isinstance(found, FamilyRun), found
        return found

    def export(self, name: str, layout_name: str) -> Export:
        """Return what transformers makes of what the run wrote.

        Raises:
            AssertionError: The run fails, or transformers does.
        """
        self.run(name, layout_name)
        has_experts = FAMILY_MODELS[name].has_experts
        key = (layout_name, has_experts)
        if key not in self._exports:
            folders = str(self._root / "references"), str(self._root / layout_name)
            (self._exports[key],) = run_ranks(read_exports, 1, list(self._runs[key]), *folders)
        found = self._exports[key][name]
        assert isinstance(found, Export), found
        return found

    def exported(self, name: str, layout_name: str) -> Path:
        return self._root / layout_name / name / "same"

    def _run(self, names: Sequence[str], layout_name: str, policy: PolicyConfig) -> dict[str, Any]:
        arguments = (str(self._root / "references"), policy, str(self._root / layout_name))
        world_size = LAYOUTS[layout_name].world_size
        try:
            found: dict[str, Any] = self._run_ranks(run_families, world_size, names, *arguments, timeout_s=240)[0]
        except RankError as error:
            # A rank that fails alone leaves the others waiting; the other models are still to be heard of.
            if len(names) == 1:
                return {names[0]: str(error)}
            return {name: self._run([name], layout_name, policy)[name] for name in names}
        return found
