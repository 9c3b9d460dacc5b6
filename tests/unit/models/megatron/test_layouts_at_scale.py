# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic against released models in layouts of 128 to 1,024 ranks, one of which is really built.

It stands in process groups of torch's fake backend and is built of fake tensors: shapes, formats and shares are those
of a real rank, with neither memory nor numbers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import make_state, optimizer_parts
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.memory_estimate import rank_parameters, worker_memory
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.training.optimizer import build_optimizer, half_precision_modules, wrap_data_parallel
from tests.support.gloo_ranks import run_ranks
from tests.support.published_configs import DEEPSEEK_CONFIGS, PUBLISHED_CONFIGS
from tests.support.tiny_model import layout

PUBLISHED = {**PUBLISHED_CONFIGS, **DEEPSEEK_CONFIGS}


@dataclass(frozen=True)
class Layout:
    """A released model over machines of eight GPUs; the stages of which a rank is built."""

    model: str
    num_nodes: int
    sizes: dict[str, int]
    stages: tuple[int, ...]


CASES = {
    "Qwen3-30B-A3B, 128 ranks": Layout("Qwen3-30B-A3B", 16, {"tp": 4, "pp": 8, "ep": 4}, (7,)),
    "Qwen3-235B-A22B, 256 ranks, 94 layers": Layout(
        "Qwen3-235B-A22B", 32, {"tp": 4, "pp": 4, "ep": 16, "first": 23, "last": 23}, (0, 1, 3)
    ),
    "DeepSeek-V3, 1,024 ranks, 61 layers": Layout(
        "DeepSeek-V3", 128, {"tp": 2, "pp": 8, "ep": 64, "first": 7, "last": 6}, (0, 1, 7)
    ),
    "gpt-oss-120b, 128 ranks": Layout("gpt-oss-120b", 16, {"tp": 4, "pp": 2, "ep": 8}, (0, 1)),
}


@dataclass(frozen=True)
class Held:
    """What a rank of a stage holds: parameters, and bytes."""

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer_state: int


def config_of(case: Layout, folder: str) -> MasterConfig:
    overrides = [f"policy.model_name={folder}", f"cluster.num_nodes={case.num_nodes}"]
    overrides += [f"policy.train_global_batch_size={8 * case.num_nodes}"]
    sizes = layout(**case.sizes)
    overrides += [f"policy.megatron_cfg.{name}={str(value).lower()}" for name, value in sizes.items()]
    return load_any_config("sft_qwen3_30b_a3b.yaml", overrides, check_paths=False)


def held_by_one_of_many(config: MasterConfig, case: Layout, folder: str) -> list[Held]:
    """Builds the first rank of each of the stages."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hf_config, megatron, found = load_hf_config(folder), config.policy.megatron_cfg, []
    transformer = build_transformer_config(config.policy, hf_config)
    transformer.perform_initialization = False  # reads numbers, which there are none of
    new_group = dist.new_group

    def new_fake_group(*arguments: Any, **keywords: Any) -> Any:
        return new_group(*arguments, **{**keywords, "backend": None})

    def gather_of_like_ranks(gathered: list[Any], mine: Any, group: Any = None) -> None:
        gathered[:] = [mine] * len(gathered)  # names of parameter groups

    for stage in case.stages:
        world_size = config.cluster.world_size
        rank = stage * world_size // megatron.pipeline_model_parallel_size
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        with (
            mock.patch.object(dist, "new_group", new_fake_group),
            mock.patch.object(dist, "all_gather_object", gather_of_like_ranks),
            # Conversion swaps parameters, which fake ones with views cannot; they are made in bfloat16 already.
            mock.patch.object(torch.nn.Module, "bfloat16", lambda module: module),
        ):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=megatron.tensor_model_parallel_size,
                pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
                expert_model_parallel_size=megatron.expert_model_parallel_size,
                expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
                create_gloo_process_groups=True,
            )
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            with FakeTensorMode(allow_non_fake_inputs=True):
                chunks = build_model_chunks(config.policy, transformer, hf_config)
                wrapped = wrap_data_parallel(config.policy, transformer, half_precision_modules(transformer, chunks))
                optimizer = build_optimizer(config.policy, transformer, wrapped)
                state = 0
                for part in optimizer_parts(optimizer):
                    make_state(part)
                    for master, moments in part.optimizer.state.items():
                        state += master.nbytes + moments["exp_avg"].nbytes + moments["exp_avg_sq"].nbytes
                parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
                found.append(
                    Held(
                        parallel_state.get_pipeline_model_parallel_rank(),
                        sum(parameter.numel() for parameter in parameters),
                        sum(parameter.nbytes for parameter in parameters),
                        sum(parameter.main_grad.nbytes for parameter in parameters),
                        state,
                    )
                )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "Qwen3-30B-A3B, 128 ranks" else pytest.mark.slow) for name in CASES]
)
def test_a_rank_of_many_holds_what_the_arithmetic_says(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(dict(PUBLISHED[case.model].config_json)))
    config, hf_config = config_of(case, str(tmp_path)), load_hf_config(str(tmp_path))
    transformer = build_transformer_config(config.policy, hf_config)
    (ranks,) = run_ranks(held_by_one_of_many, 1, config, case, str(tmp_path), fresh=True, timeout_s=600)
    assert [held.stage for held in ranks] == list(case.stages)
    for held in ranks:
        estimate = worker_memory(config, transformer, hf_config, held.stage)
        assert held.parameters == rank_parameters(transformer, hf_config, held.stage).total
        assert held.weights == estimate.weights
        assert held.gradients == estimate.gradients
        # Buffers are padded before they are dealt out.
        assert held.optimizer_state == pytest.approx(estimate.optimizer.state, rel=1e-3)
