# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every shipped configuration loads, means what it says, and survives being written and read."""

import ast
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_rl_moe.config.describe import field_at, known_keys
from nemo_rl_moe.config.files import exemplar_names, exemplars_folder, read_with_defaults
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES
from nemo_rl_moe.config.overrides import present_keys
from nemo_rl_moe.config.resolved import dump_resolved
from nemo_rl_moe.config.schema import SFTMasterConfig

PACKAGE = Path(__file__).resolve().parents[3] / "nemo_rl_moe"


def attributes_read(code: str) -> set[str]:
    """Names that follow a dot and are not called: `text.split()` reads no key `split`."""
    nodes = list(ast.walk(ast.parse(code)))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and id(node) not in called}


def own_keys() -> list[str]:
    return [key for key in known_keys(SFTMasterConfig) if key.rpartition(".")[2] not in MOE_FIELD_NAMES]


@pytest.mark.parametrize("name", exemplar_names())
def test_exemplar_loads_and_its_dump_loads_to_the_same(name: str, tmp_path: Path) -> None:
    config = load_config(name, check_paths=False)
    written = tmp_path / "config.yaml"
    written.write_text(OmegaConf.to_yaml(OmegaConf.create(dump_resolved(config))))
    again = load_config(written, check_paths=False)
    assert again == config
    assert dump_resolved(again) == dump_resolved(config)


def test_base_exemplar_has_every_key_of_the_schema() -> None:
    present = present_keys(read_with_defaults(exemplars_folder() / "sft.yaml"))
    assert set(own_keys()) <= set(present)


def test_every_key_is_documented_and_none_has_a_default() -> None:
    for key in known_keys(SFTMasterConfig):
        _, field = field_at(SFTMasterConfig, key.split("."))
        assert field is not None
        assert field.description, key
        assert field.is_required() == (key in own_keys()), key


def test_tiny_exemplar_is_the_demo() -> None:
    config = load_config("sft_tiny_moe.yaml", check_paths=False)
    assert config.data_parallel_size == config.cluster.world_size == 2
    assert config.policy.tokenizer.name == config.policy.model_name == "examples/assets/tiny_qwen3_moe"
    assert config.policy.megatron_cfg.optimizer.lr == 3e-3
    assert config.policy.megatron_cfg.moe_transformer_fields["moe_aux_loss_coeff"] == 0.01


def test_unset_moe_fields_stay_out() -> None:
    megatron = load_config("sft_tiny_moe.yaml", ["~policy.megatron_cfg.moe_aux_loss_coeff"], check_paths=False)
    fields = megatron.policy.megatron_cfg.moe_transformer_fields
    assert "moe_aux_loss_coeff" not in fields
    assert "moe_router_topk" not in fields
    assert "moe_per_layer_logging" not in fields
    dumped = dump_resolved(megatron)["policy"]["megatron_cfg"]
    assert "moe_router_topk" not in dumped


def test_a_moe_field_set_to_null_is_passed_on() -> None:
    config = load_config("sft_tiny_moe.yaml", ["policy.megatron_cfg.moe_z_loss_coeff=null"], check_paths=False)
    assert config.policy.megatron_cfg.moe_transformer_fields["moe_z_loss_coeff"] is None


def test_dump_holds_plain_values_only() -> None:
    dumped = dump_resolved(load_config("sft.yaml", check_paths=False))
    assert yaml.safe_load(yaml.safe_dump(dumped)) == dumped
    assert next(iter(dumped)) == "sft"


def test_no_dead_flags() -> None:
    """Every key is read as an attribute by code outside the configuration package."""
    read = {
        name
        for path in PACKAGE.rglob("*.py")
        if "config" not in path.relative_to(PACKAGE).parts
        for name in attributes_read(path.read_text())
    }
    dead = [key for key in own_keys() if key.rpartition(".")[2] not in read]
    assert not dead, f"keys that nothing reads: {', '.join(dead)}"
    assert "moe_transformer_fields" in read
