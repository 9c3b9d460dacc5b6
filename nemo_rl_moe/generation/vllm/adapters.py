# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters in a vLLM engine: each refit replaces the engine's only adapter, which all requests select by number.

The tensors go from the transport into vLLM's buffers, without files. vLLM multiplies `B` by the scale when it takes an
adapter, so its buffers contain `scale * B`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.vllm.adapter_rules import RANKS
from nemo_rl_moe.models.peft_files import PREFIX
from nemo_rl_moe.models.safetensors_folder import listed

_SLOT = 0
"""Index of the adapter in vLLM's buffers, which have room for one."""


@dataclass(frozen=True)
class AdapterSettings:
    """The policy's adapters, before any values arrive.

    Attributes:
        modules: Last parts of the names of adapted modules, such as q_proj.
    """

    lora: LoraConfig
    modules: tuple[str, ...]

    def engine_arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments for an engine with buffers for one adapter, on these modules alone."""
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in RANKS if rank >= self.lora.rank),
            "lora_target_modules": list(self.modules),
        }


def is_factor(name: str) -> bool:
    """Return whether a tensor of a transfer is a factor of an adapter. Others are weights of the base."""
    return name.startswith(PREFIX)


def selection(number: int) -> Any:
    """Return vLLM's selection of the adapter that arrived in the refit with this number, from 1 on.

    vLLM keeps the prefixes of different adapters apart by this name. A request for an adapter that is not there fails,
    because no folder has the path.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path=f"/no-folder/adapter-{number}")


def put_adapter(worker: Any, settings: AdapterSettings, number: int, factors: Mapping[str, Tensor]) -> None:
    """Replace the engine's adapter.

    Args:
        number: Number of the refit, from 1 on.
        factors: `A` `[rank, inputs]` and `B` `[outputs, rank]` by peft's names. vLLM changes `B`.

    Raises:
        WeightSyncError: No factor has arrived, or vLLM has no adapters on some of their modules.
    """
    if not factors:
        raise WeightSyncError("no factor of an adapter has arrived")
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager, lora = _manager(worker), settings.lora
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    adapter = LoRAModel.from_lora_tensors(
        number,
        dict(factors),
        PEFTHelper(lora.rank, lora.alpha, list(settings.modules), use_rslora=lora.use_rslora),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=renames,
    )
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    if unknown := sorted(adapter.loras.keys() - known):
        raise WeightSyncError(f"vLLM applies no adapters to {len(unknown)} modules: {listed(unknown)}")
    manager.remove_all_adapters()
    manager.add_adapter(adapter)
    manager.activate_adapter(number)
    worker.adapter_names = {
        parse_fine_tuned_lora_name(name, renames)[0]: name.removeprefix(PREFIX).rpartition(".lora_")[0]
        for name in factors
    }


def held_factors(worker: Any, settings: AdapterSettings) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's name and the values of each factor in vLLM's buffers: `A`, and `B` times the scale.

    vLLM copies the `A` of a module with several buffers to each. If the copies differ, `A` is NaN.
    """
    manager, rank = _manager(worker), settings.lora.rank
    for name, module in manager.modules.items():
        parts: Sequence[str] = manager.packed_modules.get(name, [name])
        for part, slices in zip(parts, _slices_of_parts(module.n_slices, len(parts)), strict=True):
            first, *others = [module.lora_a_stacked[index][_SLOT, 0, :rank] for index in slices]
            down = first if all(torch.equal(first, each) for each in others) else torch.full_like(first, torch.nan)
            up = torch.cat([module.lora_b_stacked[index][_SLOT, 0, :, :rank] for index in slices])
            prefix = f"{PREFIX}{worker.adapter_names.get(part, part)}"
            yield f"{prefix}.lora_A.weight", down
            yield f"{prefix}.lora_B.weight", up


def _slices_of_parts(num_slices: int, num_parts: int) -> list[range]:
    """Return the buffers of each of a layer's joined modules.

    The last modules have one buffer each. The first has the others, as queries, keys and values of a delta net do.
    """
    first = num_slices - num_parts + 1
    return [range(first), *(range(index, index + 1) for index in range(first, num_slices))]


def _manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager
