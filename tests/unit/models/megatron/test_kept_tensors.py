# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MTP layers: in every folder that a run writes, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_moe.checksums import find_damage
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import CheckpointError, ConfigurationError
from nemo_rl_moe.models.hf_files import holds_megatron_weights, load_config_json, load_hf_config
from nemo_rl_moe.models.kept_tensors import KEPT_FOLDER, find_kept, kept_bands, kept_headers, write_kept
from nemo_rl_moe.models.megatron.model.router_settings import exported_config
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.safetensors_files import SliceReader
from tests.support.family_reference import files_beside, trainer_of
from tests.support.gloo_ranks import run_ranks
from tests.support.mtp_layers import FILE, assert_bits_are_kept, count_in, write_with_mtp_layers
from tests.support.quick_list import some_of
from tests.support.tiny_model import layout, parallel_job, tiny_policy

FAMILIES = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2"),
    *("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe", "nemotron_h"),
)


def change_and_save(policy: PolicyConfig, source: str, target: str) -> list[str]:
    """Read a model, change all of its weights, and write it; what was reported, or the error's text."""
    with parallel_job(policy):
        trainer = trainer_of(Path(source), policy)
        for chunk in trainer.chunks:
            for parameter in chunk.parameters():
                parameter.data.add_(1.0)
        if source.endswith("gone"):
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                (Path(source) / FILE).unlink()
            torch.distributed.barrier()
        try:
            trainer.save_weights(Path(target), files_beside(Path(source)))
        except CheckpointError as error:
            return [str(error)]
        return list(trainer.notices)


@pytest.mark.parametrize("name", some_of(FAMILIES, 3))
def test_exported_weights_contain_them_unchanged(name: str, tmp_path: Path) -> None:
    expected = write_with_mtp_layers(name, tmp_path / "model")
    sizes = {"pp": 2} if name == "qwen3_5_moe_text" else {"tp": 2}
    policy = tiny_policy(2, model_name=str(tmp_path / "model"), **layout(**sizes))
    notices, _ = run_ranks(change_and_save, 2, policy, str(tmp_path / "model"), str(tmp_path / "out"))
    assert_bits_are_kept(tmp_path / "out", expected)
    (line,) = [line for line in notices if "multi-token prediction" in line]
    assert f"{len(expected)} tensors of multi-token prediction (MTP) layers, kept unchanged" in line
    # All other tensors are the trained ones, and none is missing.
    before, after = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (tmp_path / "model", tmp_path / "out")
    )
    assert after.keys() == before.keys()
    unchanged = {name for name in before.keys() - expected.keys() if torch.equal(after[name], before[name])}
    assert all(name.endswith("e_score_correction_bias") for name in unchanged), "all parameters have changed"
    assert find_damage(tmp_path / "out") == []


@pytest.mark.parametrize("name", FAMILIES)
def test_config_declares_them_if_they_are_there(name: str, tmp_path: Path) -> None:
    write_with_mtp_layers(name, tmp_path)
    policy = tiny_policy(model_name=str(tmp_path))
    hf_config, config_json = load_hf_config(str(tmp_path)), load_config_json(str(tmp_path))
    config = build_transformer_config(policy, hf_config)
    for has_kept_tensors in (True, False):
        exported = exported_config(policy, hf_config, config_json, config, has_kept_tensors=has_kept_tensors)
        (tmp_path / "config.json").write_text(json.dumps(exported.content))
        assert count_in(tmp_path) == has_kept_tensors


def test_source_that_is_gone_is_an_error_on_every_rank(tmp_path: Path) -> None:
    write_with_mtp_layers("deepseek_v3", tmp_path / "gone")
    policy = tiny_policy(2, **layout(tp=2))
    texts = run_ranks(change_and_save, 2, policy, str(tmp_path / "gone"), str(tmp_path / "out"))
    assert texts[0] == texts[1]
    assert "out: cannot be written: rank 0: " in texts[0][0]
    assert FILE in texts[0][0]
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigurationError, match=f"{FILE}: cannot be read"):
        find_kept(tmp_path / "gone", load_hf_config(str(tmp_path / "gone")))


def test_nothing_is_kept_without_the_tensors(tmp_path: Path) -> None:
    write_with_mtp_layers("deepseek_v3", tmp_path)
    hf_config = load_hf_config(str(tmp_path))
    assert find_kept(None, hf_config) is None
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != FILE}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_kept(tmp_path, hf_config) is None


def test_quantised_tensors_are_refused_as_others_are(tmp_path: Path) -> None:
    tensors = write_with_mtp_layers("deepseek_v3", tmp_path)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / FILE)
    with pytest.raises(ConfigurationError, match=r"1 tensor of a type that cannot be read: model\.layers\.4\.eh_proj"):
        find_kept(tmp_path, load_hf_config(str(tmp_path)))


def test_bands_are_small_and_complete(tmp_path: Path) -> None:
    expected = write_with_mtp_layers("glm4_moe", tmp_path / "model")
    kept = find_kept(tmp_path / "model", load_hf_config(str(tmp_path / "model")))
    assert kept is not None
    headers = kept_headers(kept)
    assert {header.name: header.dtype for header in headers} == {name: of.dtype for name, of in expected.items()}
    with SliceReader(kept, most_mapped_bytes=300) as reader:
        for header in headers:
            bands = list(reader.bands(header.name))
            assert torch.equal(torch.cat(bands), expected[header.name])
            assert max(band.nbytes for band in bands) <= 300 or all(len(band) == 1 for band in bands)
    assert sum(band.nbytes for band in kept_bands(kept, headers)) == sum(header.num_bytes for header in headers)
    write_kept(kept, tmp_path / "copy")
    shutil.rmtree(tmp_path / "model")
    assert_bits_are_kept(tmp_path / "copy", expected)


def test_tensors_of_any_shape_are_copied(tmp_path: Path) -> None:
    expected = write_with_mtp_layers("deepseek_v3", tmp_path / "model")
    more = {"model.layers.4.scale": torch.tensor(1.5), "model.layers.4.none": torch.zeros(0, 3)}
    save_file(expected | more, tmp_path / "model" / FILE)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(more, FILE)
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    kept = find_kept(tmp_path / "model", load_hf_config(str(tmp_path / "model")))
    assert kept is not None
    write_kept(kept, tmp_path / "copy")
    copied = load_file(tmp_path / "copy" / "model.safetensors")
    assert copied.keys() == expected.keys() | more.keys()
    assert all(
        copied[name].shape == tensor.shape and torch.equal(copied[name], tensor) for name, tensor in more.items()
    )


def test_folder_of_a_checkpoint_has_nothing_else(tmp_path: Path) -> None:
    expected = write_with_mtp_layers("deepseek_v3", tmp_path / "model")
    hf_config = load_hf_config(str(tmp_path / "model"))
    stored = tmp_path / "checkpoint" / KEPT_FOLDER
    stored.mkdir(parents=True)
    (tmp_path / "checkpoint" / "policy").mkdir()
    assert holds_megatron_weights(tmp_path / "checkpoint")
    for more, problem in (
        ({}, None),
        ({"model.norm.weight": torch.ones(4)}, r"1 tensor of no layer of multi-token .*: model\.norm\.weight"),
        ({"model.layers.4.enorm.weight": torch.ones(4, dtype=torch.int8)}, "1 tensor of a type that cannot be read"),
    ):
        save_file(expected | more, stored / "model.safetensors")
        if problem is None:
            found = find_kept(tmp_path / "checkpoint", hf_config)
            assert found is not None
            assert found.tensors.keys() == expected.keys()
        else:
            with pytest.raises(ConfigurationError, match=problem):
                find_kept(tmp_path / "checkpoint", hf_config)
    shutil.rmtree(stored)
    assert find_kept(tmp_path / "checkpoint", hf_config) is None
    stored.symlink_to("nowhere")
    with pytest.raises(ConfigurationError, match=f"{KEPT_FOLDER}: expected a folder"):
        find_kept(tmp_path / "checkpoint", hf_config)
