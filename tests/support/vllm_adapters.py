# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer of adapters beside real vLLM engines, which have the base and get the factors; and faults on the way."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.refit_check import RefitCheck
from nemo_rl_moe.generation.vllm.adapters import AdapterSettings
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.generation.vllm.worker import VllmWorker
from nemo_rl_moe.models.peft_files import PREFIX
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import TransportSpec, WeightTransport
from tests.support.vllm_engines import Trainer, check_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
Factors = dict[str, Tensor]


def lora_config(rank: int = 4, alpha: float = 6.0, **changes: Any) -> LoraConfig:
    """Return adapters whose scale is no power of two."""
    fields = {"use_rslora": False, "targets": ["all-linear"], "dropout": 0.0, "experts": "none", "init": "kaiming"}
    return LoraConfig.model_validate({"rank": rank, "alpha": alpha, "path": None, **fields, **changes})


class AdapterTrainer(Trainer):
    """A trainer whose base stays, while the factors of its adapters move.

    Args:
        modules: Last parts of the names of adapted modules.
        lora: Rank and scale.

    Attributes:
        factors: By peft's names. `B` begins as zeros.
        sent: Names of the tensors of each transfer.
        on_the_way: Changes what is sent.
    """

    def __init__(
        self, folder: Path, modules: Sequence[str] = ATTENTION, lora: LoraConfig | None = None, **options: Any
    ):
        self.lora, self.modules = lora or lora_config(), tuple(modules)
        self.factors: Factors = {}
        self.sent: list[set[str]] = []
        self.on_the_way: Callable[[Factors], Factors] = lambda tensors: tensors
        self._kept: Factors | None = None
        self._base_is_sent = False
        super().__init__(folder, **options)
        generator = torch.Generator().manual_seed(1)
        for name, weight in self.tensors.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in modules and ".experts." not in name:
                down = torch.randn(self.lora.rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
                self.factors[f"{PREFIX}{module}.lora_A.weight"] = down
                self.factors[f"{PREFIX}{module}.lora_B.weight"] = torch.zeros(weight.shape[0], self.lora.rank)
        self._save()

    @property
    def settings(self) -> AdapterSettings:
        return AdapterSettings(self.lora, self.modules)

    @property
    def weight_version(self) -> int:
        return self.version

    def move(self) -> None:
        """An update: `B` moves."""
        self._set_random(self.version)
        self.version += 1
        self._save()

    def probe(self, is_on: bool) -> None:
        """Give the adapters other values, or their own again."""
        if is_on:
            self._kept = dict(self.factors)
            self._set_random(100)
        else:
            assert self._kept is not None
            self.factors, self._kept = self._kept, None
        self._save()

    def merged(self) -> dict[str, Tensor]:
        """Return the weights with the adapters added."""
        found = dict(self.tensors)
        for name, up in self.factors.items():
            if ".lora_B." in name:
                module = name.removeprefix(PREFIX).removesuffix(".lora_B.weight")
                down = self.factors[name.replace(".lora_B.", ".lora_A.")]
                found[f"{module}.weight"] = found[f"{module}.weight"] + self.lora.scale * up @ down
        return found

    def start_fingerprints(self, number_format: str) -> Callable[[], dict[str, str]]:
        dtype: torch.dtype = getattr(torch, number_format)
        scaled = {
            name: factor.to(dtype) * (self.lora.scale if ".lora_B." in name else 1.0)
            for name, factor in self.factors.items()
        }
        found = fingerprints_of([*self.tensors.items(), *scaled.items()], number_format)
        return lambda: found

    def weight_transport(
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = lambda: None
    ) -> WeightTransport:
        """Send the factors, and before them the base if an engine has not got it."""

        def send(spec: TransportSpec) -> int:
            tensors = self.on_the_way(self.factors if spec.changed_only else {**self.tensors, **self.factors})
            self.sent.append({*tensors})
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(spec.send, iter(tensors.items()), 0, self.version)
                then()
                num_bytes = sending.result()
            self._base_is_sent = True
            return num_bytes

        skips = self._base_is_sent and not (altered or whole)
        return WeightTransport(SHARED_MEMORY, 1, send, bucket_bytes=20_000, stall_timeout_s=30.0, may_skip_frozen=skips)

    def refit(self, engine: VllmEngine, *_: Any, altered: bool = False) -> None:
        refit(engine, self, altered=altered)

    def _set_random(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, factor in self.factors.items():
            if ".lora_B." in name:
                self.factors[name] = torch.randn(factor.shape, generator=generator) * 0.5

    def _save(self) -> None:
        base, self.tensors = self.tensors, self.merged()
        try:
            super()._save()
        finally:
            self.tensors = base


class RoundedAdapterTrainer(AdapterTrainer):
    """A trainer whose base and factors are numbers of bfloat16."""

    def _save(self) -> None:
        for values in (self.tensors, self.factors):
            values.update({name: tensor.bfloat16().float() for name, tensor in values.items()})
        super()._save()


def adapter_check(engine: VllmEngine, trainer: AdapterTrainer, **changes: object) -> RefitCheck:
    """Return the check of a run with adapters."""
    check = check_of(engine, trainer, start_fingerprints=trainer.start_fingerprints, **changes)
    check.probe_adapters = trainer.probe
    return check


def keep_the_old(put: Callable[..., None]) -> Callable[..., None]:
    """The first adapter stays under every number."""
    first: list[Factors] = []

    def fault(worker: Any, settings: AdapterSettings, number: int, factors: Mapping[str, Tensor]) -> None:
        first.append({name: factor.clone() for name, factor in factors.items()})
        put(worker, settings, number, {name: factor.clone() for name, factor in first[0].items()})

    return fault


def leave_empty(put: Callable[..., None]) -> Callable[..., None]:
    """The engine has buffers for the adapter, but its values never come."""

    def fault(worker: Any, settings: AdapterSettings, number: int, factors: Mapping[str, Tensor]) -> None:
        put(worker, settings, number, {name: torch.zeros_like(factor) for name, factor in factors.items()})

    return fault


def stack(put: Callable[..., None]) -> Callable[..., None]:
    """The new values are added to the old ones."""

    def fault(worker: Any, settings: AdapterSettings, number: int, factors: Mapping[str, Tensor]) -> None:
        modules = worker.model_runner.lora_manager._adapter_manager.modules.values()
        before = [[up.clone() for up in module.lora_b_stacked] for module in modules]
        put(worker, settings, number, factors)
        for module, ups in zip(modules, before, strict=True):
            for up, old in zip(module.lora_b_stacked, ups, strict=True):
                up += old

    return fault


def scale_wrongly(put: Callable[..., None]) -> Callable[..., None]:
    """The scale is that of twice the alpha."""

    def fault(worker: Any, settings: AdapterSettings, number: int, factors: Mapping[str, Tensor]) -> None:
        lora = settings.lora.model_copy(update={"alpha": 2 * settings.lora.alpha})
        put(worker, AdapterSettings(lora, settings.modules), number, factors)

    return fault


@dataclass
class Fault:
    """Something that goes wrong with adapters in an engine.

    Attributes:
        put: Replaces the function that puts an adapter into the engine.
        selects: Whether requests select the adapter.
    """

    put: Callable[[Callable[..., None]], Callable[..., None]] = field(default=lambda put: put)
    selects: bool = True


FAULTS = {
    "none": Fault(),
    "the old one stays": Fault(keep_the_old),
    "not delivered": Fault(leave_empty),
    "stacked": Fault(stack),
    "another scale": Fault(scale_wrongly),
    "not selected": Fault(selects=False),
}


def worker_with_faults() -> type[VllmWorker]:
    """Return a worker in which faults can be planted; travels to its process by value."""

    class Faulty(VllmWorker):
        selects = True

        def plant(self, name: str) -> None:
            """Let one thing go wrong from now on."""
            from nemo_rl_moe.generation.vllm import adapters, receiving
            from tests.support.vllm_adapters import FAULTS

            fault = FAULTS[name]
            receiving.put_adapter = fault.put(adapters.put_adapter)
            self.selects = fault.selects

        def never_reset(self) -> None:
            """Let the prefix cache keep what it has when weights arrive."""
            self._engine.reset_prefix_cache = lambda: True

        def _ask(self, number: int, prompt: Any, sampling: Any) -> None:
            if self.selects:
                super()._ask(number, prompt, sampling)
            else:
                self._engine.add_request(str(number), prompt, sampling)

    return Faulty


def tell_workers(engine: VllmEngine, method: str, *args: object) -> None:
    """Call a method of each engine's actor."""
    ray.get([getattr(actor.handle, method).remote(*args) for actor in engine._actors.present])
