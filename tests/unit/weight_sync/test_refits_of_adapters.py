# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters arrive at engines, merged or as they are; the check finds at the first sync what went wrong on the way."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.refit_check import RefitCheck, Scores
from nemo_rl_moe.launch.refit import batch_of
from nemo_rl_moe.models.peft_files import is_of_attention
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from tests.support.family_reference import trainer_of, write_reference
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import RANK, lora, set_random
from tests.support.quick_list import some_of
from tests.support.refit_faults import Pair
from tests.support.tiny_model import layout, parallel_job, tiny_grpo_policy

Named = tuple[str, Tensor]


def lora_policy(
    refit: str,
    precision: str = "float32",
    experts: str = "per_expert",
    targets: Sequence[str] = ("all-linear",),
    world_size: int = 1,
    **changes: Any,
) -> Any:
    """Return a policy that generates, with adapters."""
    policy = tiny_grpo_policy(world_size, precision=precision, optimizer__lr=1e-2, **lora(experts, targets), **changes)
    return policy.model_copy(update={"generation": policy.generation.model_copy(update={"lora_refit": refit})})


class AdapterCopy:
    """An engine in this process that puts the trainer's adapters beside a base that it has read itself.

    Args:
        folder: A Hugging Face folder.
        policy: As of the trainer.
    """

    def __init__(self, folder: Path, policy: PolicyConfig):
        from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
        from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel

        self.model: Any = MegatronModel(policy, plain_config(load_hf_config(str(folder))), folder)
        self.selects_adapters = True
        self.gives_fingerprints = True

    def load(self, tensors: Iterable[Named]) -> None:
        """Replace the adapters."""
        from nemo_rl_moe.models.megatron.lora.transfer import load_factors

        load_factors(self.model.chunks, tensors)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float, *model_inputs: Any) -> list[Scores]:
        with nullcontext() if self.selects_adapters else self.model.adapters.off():
            (found,) = self.model.logprobs([batch_of(sequences)])
        return [list(found[:, 1:].numpy())]

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        return [self.model.weight_fingerprints(number_format) if self.gives_fingerprints else {}]


class LoraPair(Pair):
    """A trainer of adapters and an engine: of transformers with merged weights, or one that takes the adapters."""

    def __init__(self, name: str, folder: Path, policy: Any, num_steps: int = 1):
        super().__init__(name, folder, policy, num_steps)
        self.takes_adapters = policy.generation.lora_refit == "adapter"
        self.on_the_way: Callable[[Iterator[Named]], Iterator[Named]] = lambda tensors: tensors
        if self.takes_adapters:
            self.engine: Any = AdapterCopy(folder, policy)

    def refit(self, altered: bool = False) -> None:
        """Give the engine what the trainer sends, through whatever happens on the way."""
        sent = self.on_the_way(self.trainer._sent_tensors(on_device=False))
        self.engine.load(sent if self.takes_adapters else dict(sent))

    def check(self) -> RefitCheck:
        """Return the check of a run with adapters."""
        check = super().check()
        check.probe_adapters = lambda is_on: self.trainer.begin_probe() if is_on else self.trainer.end_probe()
        return check


# ---- what goes wrong: the check sees it at the first sync, when the adapter is still zero ----


@contextmanager
def changed_factors(pair: LoraPair, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Have other factors while the trainer merges and sends, which it does not compute with."""
    from nemo_rl_moe.models.megatron.lora.adapter import adapters_in

    factors = [factor for adapter in adapters_in(pair.trainer.chunks) for factor in adapter.factors()]
    kept = [factor.parameter.detach().clone() for factor in factors]
    with torch.no_grad():
        for factor, own in zip(factors, kept, strict=True):
            factor.parameter.copy_(change(factor.name, own))
    yield
    with torch.no_grad():
        for factor, own in zip(factors, kept, strict=True):
            factor.parameter.copy_(own)


def doubled(name: str, factor: Tensor) -> Tensor:
    """The product counts twice, as once for each of two tensor-parallel ranks."""
    return 2 * factor if name.endswith("lora_B") else factor


def not_at_all(name: str, factor: Tensor) -> Tensor:
    """The base is sent, again and again."""
    return torch.zeros_like(factor)


def without_attention(name: str, factor: Tensor) -> Tensor:
    """Some layers' names are not known, and left out."""
    return torch.zeros_like(factor) if "self_attn" in name else factor


def other_expert_order(name: str, factor: Tensor) -> Tensor:
    """Each expert has its neighbour's."""
    return factor.roll(1, 0) if factor.dim() == 3 else factor


def first_for_all(name: str, factor: Tensor) -> Tensor:
    """All experts share one adapter."""
    return factor[:1].expand_as(factor) if factor.dim() == 3 else factor


CHANGES: Mapping[str, Callable[[str, Tensor], Tensor]] = {
    "never delivered": not_at_all,
    "some names ignored": without_attention,
    "counted twice": doubled,
    "another order of experts": other_expert_order,
    "shared by all experts": first_for_all,
}


def _sent_with(pair: LoraPair, change: Callable[[str, Tensor], Tensor]) -> Callable[[Iterator[Named]], Iterator[Named]]:
    def send(tensors: Iterator[Named]) -> Iterator[Named]:
        with changed_factors(pair, change):
            yield from [(name, tensor.clone()) for name, tensor in tensors]

    return send


def _harm(pair: LoraPair, fault: str) -> None:
    if fault in CHANGES:
        pair.on_the_way = _sent_with(pair, CHANGES[fault])
    elif fault == "not selected":
        pair.engine.selects_adapters = False
    elif fault == "arrives twice":
        pair.on_the_way = lambda tensors: (each for named in tensors for each in (named, named))
    elif fault == "a layer is missing":
        pair.on_the_way = lambda tensors: (named for named in tensors if ".layers.0." not in named[0])
    elif fault == "another scale":
        from nemo_rl_moe.models.megatron.lora.adapter import adapters_in

        for adapter in adapters_in(pair.engine.model.chunks):
            adapter.scale *= 1.5
    elif fault == "another base":
        # As PiSSA leaves it: without the largest singular values, which its adapter holds.
        for name, weight in pair.engine.model.chunks[0].named_parameters():
            if name.endswith("linear_qkv.weight"):
                left, values, right = torch.linalg.svd(weight.detach().float(), full_matrices=False)
                weight.data.sub_((left[:, :RANK] * values[:RANK]) @ right[:RANK])


def first_syncs(
    name: str, root: str, policy: Any, faults: Sequence[str], gives_fingerprints: bool = True
) -> dict[str, str | None]:
    """Run on one rank: what the check says of the first sync under each fault; None: nothing."""
    said = {}
    with parallel_job(policy):
        for number, fault in enumerate(faults):
            pair = LoraPair(name, Path(root, f"{name}_{number}"), policy)
            pair.engine.gives_fingerprints = gives_fingerprints
            _harm(pair, fault)
            try:
                pair.refit()
                pair.check().after_refit(pair.engine)
                said[fault] = None
            except WeightSyncError as error:
                said[fault] = str(error)
    return said


def right_syncs(name: str, root: str, policy: Any, num_steps: int) -> tuple[list[float], float]:
    """Run on one rank: refits before the first step and after each; mean gaps, and the share of compared tensors."""
    with parallel_job(policy):
        pair = LoraPair(name, Path(root, name), policy, num_steps)
        check, gaps = pair.check(), []
        for step in range(num_steps + 1):
            pair.refit()
            gaps.append(check.after_refit(pair.engine).mean)
            if step < num_steps:
                pair.step(step)
        return gaps, check.share_compared or 0.0


@dataclass(frozen=True)
class LaterRefit:
    """What one rank sends before and after the adapters have got other values.

    Attributes:
        names: Of all its tensors.
        moved: Of those that merged adapters change.
        sent: Of those that are sent to an engine which has had all.
        are_right: What is sent are the merged weights, to the bit.
    """

    names: set[str]
    moved: set[str]
    sent: set[str]
    are_right: bool


def later_refit(name: str, root: str, policy: Any, on_device: bool) -> LaterRefit:
    """Run on every rank: a refit of all tensors, and one of those that changed."""
    with parallel_job(policy):
        folder = Path(root, name)
        write_reference(name, folder)  # transformers writes on rank 0 alone
        torch.distributed.barrier()
        trainer = trainer_of(folder, policy)
        first = _sent(trainer, on_device=on_device)
        set_random(trainer.chunks)
        whole, changed = _sent(trainer, on_device=on_device), _sent(trainer, on_device=on_device, changed_only=True)
        moved = {each for each, tensor in whole.items() if each in first and not torch.equal(first[each], tensor)}
        # Another rank may gather a tensor when there are fewer of them.
        are_right = all(torch.equal(whole[each], tensor) for each, tensor in changed.items() if each in whole)
        return LaterRefit(set(whole), moved, set(changed), are_right)


def _sent(trainer: Any, **options: bool) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._sent_tensors(**options)}


def sent_to_an_engine_without_the_base(name: str, root: str, policy: Any) -> list[dict[str, str]]:
    """Run on every rank: fingerprints of what is sent at first and later, and of base and adapters apart."""
    with parallel_job(policy):
        folder = Path(root, name)
        write_reference(name, folder)
        torch.distributed.barrier()
        trainer = trainer_of(folder, policy)
        set_random(trainer.chunks)
        first, later = _sent(trainer, on_device=False), _sent(trainer, on_device=False, changed_only=True)
        sent = [fingerprints_of(tensors.items(), "float32") for tensors in (first, later)]
        with trainer.adapters.off():
            base = fingerprints_of(trainer._sent_tensors(on_device=False), "float32")
        assert trainer.adapters.is_on
        return [*sent, base, trainer.weight_fingerprints("float32")]


def load_with_a_gap(name: str, root: str, policy: Any) -> list[str]:
    """Run on one rank: what is said of tensors that are missing where others may stay; empty: nothing."""
    from nemo_rl_moe.models.megatron.weights.hf_receive import load_tensors

    with parallel_job(policy):
        folder = Path(root, name)
        write_reference(name, folder)
        trainer = trainer_of(folder, policy)
        tensors = {each: 2 * tensor for each, tensor in _sent(trainer, on_device=False).items()}
        gaps: list[Callable[[str], bool]] = [
            lambda each: ".self_attn." not in each,
            lambda each: not each.endswith(".k_proj.weight"),
        ]
        said = []
        for is_sent in gaps:
            some = [(each, tensor) for each, tensor in tensors.items() if is_sent(each)]
            try:
                load_tensors(trainer.chunks, trainer.config, trainer.hf_config, some, keeps_others=True)
                said.append("")
            except WeightSyncError as error:
                said.append(str(error))
        return said


pytestmark = pytest.mark.megatron
OF_ADAPTERS = [*CHANGES, "not selected", "arrives twice", "a layer is missing", "another scale", "another base"]
CASES = [
    (name, refit, precision)
    for name in ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama", "qwen3_next", "qwen3_5_moe_text")
    for refit in ("merged", "adapter")
    for precision in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("name", "refit", "precision"), some_of(CASES, 3))
def test_right_refits_pass(name: str, refit: str, precision: str, tmp_path: Path) -> None:
    policy = lora_policy(refit, precision, "none" if name == "llama" else "per_expert")
    ((gaps, share_compared),) = run_ranks(right_syncs, 1, name, str(tmp_path), policy, 2)
    assert len(gaps) == 3
    assert share_compared > (0.99 if refit == "adapter" else 0.3)


@pytest.mark.parametrize("gives_fingerprints", some_of([True, False], 1))
@pytest.mark.parametrize("precision", some_of(["float32", "bfloat16"], 1))
@pytest.mark.parametrize(("refit", "faults"), [("merged", [*CHANGES]), ("adapter", OF_ADAPTERS)])
def test_faults_are_found_at_the_first_sync(
    refit: str, faults: list[str], precision: str, gives_fingerprints: bool, tmp_path: Path
) -> None:
    policy = lora_policy(refit, precision)
    (said,) = run_ranks(first_syncs, 1, "qwen3_moe", str(tmp_path), policy, ["none", *faults], gives_fingerprints)
    assert said.pop("none") is None
    assert not [fault for fault, text in said.items() if text is None]
    if refit == "adapter" and gives_fingerprints:
        assert re.search(r"tensors differ: base_model\.model\.\S+\.lora_B\.weight", str(said["another scale"]))


LATER = [
    ("qwen3_moe", {}, ("q_proj", "o_proj"), "none", False),
    ("qwen3_moe", layout(tp=2, ep=2), ("all-linear",), "none", True),
    ("qwen3_moe", layout(tp=2, ep=2), ("down_proj",), "per_expert", False),
    ("qwen3_moe", layout(pp=2), ("all-linear",), "shared", True),
    ("gpt_oss", layout(ep=2), ("down_proj",), "per_expert", False),
    ("deepseek_v3", {}, ("kv_b_proj",), "none", False),
    ("mixtral", {}, ("all-linear",), "per_expert", False),
    ("llama", layout(tp=2), ("gate_proj",), "none", True),
    ("qwen3_5_moe_text", layout(tp=2), ("in_proj_qkv", "in_proj_a"), "none", True),
    ("qwen3_next", layout(pp=2), ("in_proj_ba", "out_proj", "q_proj"), "none", False),
]


@pytest.mark.parametrize(("name", "sizes", "targets", "experts", "on_device"), some_of(LATER, 3))
def test_an_engine_with_the_base_gets_the_blocks_that_adapters_change(
    name: str, sizes: dict[str, int], targets: tuple[str, ...], experts: str, on_device: bool, tmp_path: Path
) -> None:
    world_size = 2 if sizes else 1
    policy = lora_policy("merged", "float32", experts, targets, world_size, **sizes)
    ranks = run_ranks(later_refit, world_size, name, str(tmp_path), policy, on_device)
    names, moved, sent = (set.union(*(getattr(rank, of) for rank in ranks)) for of in ("names", "moved", "sent"))
    assert moved
    assert moved <= sent < names
    assert all(rank.are_right for rank in ranks)
    if experts == "none" and "q_proj" in targets:
        assert all(is_of_attention(each) for each in sent), "experts stay"


@pytest.mark.parametrize("sizes", some_of([{}, layout(tp=2, ep=2), layout(pp=2)], 2))
def test_an_engine_without_the_base_gets_it_once_and_then_the_adapters(sizes: dict[str, int], tmp_path: Path) -> None:
    world_size = 2 if sizes else 1
    policy = lora_policy("adapter", "float32", "none", ("all-linear",), world_size, **sizes)
    generation = policy.generation.model_copy(update={"backend": "vllm"})
    policy = policy.model_copy(update={"generation": generation})
    ranks = run_ranks(sent_to_an_engine_without_the_base, world_size, "qwen3_moe", str(tmp_path), policy)
    found = [{name: of for rank in ranks for name, of in rank[number].items()} for number in range(4)]
    first, later, base, stored = found
    assert later.keys() == {name for name in first if ".lora_" in name} < first.keys()
    assert later.items() <= first.items()
    assert {name: of for name, of in base.items() if ".lora_" not in name}.items() <= first.items()
    assert first.keys() == stored.keys()
    # `B` is compared with its scale, and all others as they are sent.
    assert {name for name in first if first[name] != stored[name]} == {name for name in first if ".lora_B." in name}


def test_a_parameter_of_which_a_part_arrives_is_an_error(tmp_path: Path) -> None:
    (said,) = run_ranks(load_with_a_gap, 1, "qwen3_moe", str(tmp_path), lora_policy("merged"))
    assert said[0] == ""
    assert "k_proj.weight" in said[1]
    assert "have not arrived" in said[1]
