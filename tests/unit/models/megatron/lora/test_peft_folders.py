# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""peft reads the adapters that are written here, in both forms of experts; what peft writes is read here."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import MEGATRON_WEIGHTS_FOLDER
from nemo_rl_moe.models.peft_checks import adapter_problems
from nemo_rl_moe.models.peft_files import is_of_attention, lora_of_folder, read_adapter_config
from tests.support.family_reference import outputs_of_trainer, read_model, token_ids, trainer_of, write_reference
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import RANK, Array, lora, set_random
from tests.support.quick_list import full, some_of
from tests.support.tiny_model import forget_recorded_losses, layout, parallel_job, tiny_policy


def we_write_and_peft_reads(name: str, policy: PolicyConfig, root: str, form: Any) -> tuple[Array, Array]:
    """Run on one rank: the logits here, and those of peft on transformers' model with what was written."""
    from peft import PeftModel

    folder, adapter = Path(root, "model"), Path(root, "adapter")
    write_reference(name, folder)
    ours = _logits_of_ours(folder, policy, adapter, form, random=True)
    base = read_model(folder)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        return ours, model(token_ids(base.config.vocab_size)).logits.numpy()


def _logits_of_ours(folder: Path, policy: PolicyConfig, written: Path, form: Any, *, random: bool) -> Array:
    from nemo_rl_moe.models.megatron.lora.peft_folder import factors_on_first_rank, write_adapter

    with parallel_job(policy) as rank:
        forget_recorded_losses()
        trainer = trainer_of(folder, policy)
        if random:
            set_random(trainer.chunks)
        outputs = outputs_of_trainer(trainer)
        factors = factors_on_first_rank(trainer.chunks)
        if rank == 0:
            assert policy.lora is not None
            write_adapter(written, factors, policy.lora, trainer.hf_config, str(folder), form)
    return torch.zeros(0).numpy() if outputs is None else outputs.logits


def logits_in_layout(folder: str, policy: PolicyConfig, written: str) -> Array:
    """Run on every rank: the logits of the model with `policy.lora.path`, which is written once more; on rank 0."""
    return _logits_of_ours(Path(folder), policy, Path(written), "per_expert", random=False)


def peft_writes_and_we_read(name: str, policy: PolicyConfig, root: str) -> tuple[Array, Array]:
    """Run on one rank: the logits here with an adapter that peft has written, and those of peft."""
    import peft

    folder, adapter = Path(root, "model"), Path(root, "adapter")
    write_reference(name, folder)
    base = read_model(folder)
    attention = sorted(
        {
            path.rpartition(".")[2]
            for path, module in base.named_modules()
            if is_of_attention(path) and isinstance(module, torch.nn.Linear)
        }
    )
    has_experts = any(path.endswith(".experts") for path, _ in base.named_modules())
    mlps = {path for path, module in base.named_modules() if ".mlp." in path and isinstance(module, torch.nn.Linear)}
    mlps = {path for path in mlps if not path.endswith(("gate", "router"))}  # the gate of shared experts too
    parameters = [f"{path}.weight" for path in mlps] if has_experts else []
    assert policy.lora is not None
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=5.0,
        use_rslora=policy.lora.use_rslora,
        target_modules=attention if has_experts else [*attention, *{path.rpartition(".")[2] for path in mlps}],
        target_parameters=[*parameters, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if has_experts else None,
    )
    model: Any = peft.get_peft_model(base, settings).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.6 * values * parameter.shape[-1] ** -0.5)
        theirs = model(token_ids(base.config.vocab_size)).logits.numpy()
    model.save_pretrained(adapter)
    return _logits_of_ours(folder, policy, Path(root, "third"), "per_expert", random=False), theirs


TOLERANCE, OF_DELTA_NETS = 3e-5, 1e-4
"""The rounding of gated delta nets is large; test_adapters_as_peft.py compares it with that of the base model."""
DENSE = ("llama", "qwen3_5_text")
READ = ("qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")
WRITTEN = [
    (name, experts, form)
    for name in (
        "qwen3_moe",
        "qwen2_moe",
        "mixtral",
        "olmoe",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_moe_text",
    )
    for experts in ("per_expert", "shared")
    for form in ("per_expert", "fused")
    if form == "fused" or name not in ("gpt_oss", "qwen2_moe", "qwen3_5_moe_text")
]
"""gpt-oss has no names of single experts; peft 0.21 does not know those of Qwen2-MoE and Qwen3.5-MoE."""


def tolerance_of(name: str) -> float:
    return OF_DELTA_NETS if name.startswith(("qwen3_next", "qwen3_5")) else TOLERANCE


@pytest.mark.parametrize(
    ("name", "experts", "form"), some_of([*WRITTEN, *((name, "none", "per_expert") for name in DENSE)], 4)
)
def test_peft_reads_what_is_written(name: str, experts: str, form: str, tmp_path: Path) -> None:
    policy = tiny_policy(1, **lora(experts))
    ((ours, theirs),) = run_ranks(we_write_and_peft_reads, 1, name, policy, str(tmp_path), form)
    assert np.abs(ours - theirs).max() < tolerance_of(name)


@pytest.mark.parametrize("name", some_of([*READ, *DENSE], 2))
def test_what_peft_writes_is_read(name: str, tmp_path: Path) -> None:
    """With one factor `A` for gate and up projection, as peft makes them on fused experts."""
    policy = tiny_policy(1, **lora("none" if name in DENSE else "per_expert", path=str(tmp_path / "adapter")))
    ((ours, theirs),) = run_ranks(peft_writes_and_we_read, 1, name, policy, str(tmp_path))
    assert np.abs(ours - theirs).max() < tolerance_of(name)
    found = lora_of_folder(tmp_path / "adapter")
    assert found.rank == 4
    assert found.experts == ("none" if name in DENSE else "per_expert")


def test_the_scale_of_rank_stabilized_adapters_is_written_and_read(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    policy = tiny_policy(1, **lora("per_expert", use_rslora=True))
    ((written, expected),) = run_ranks(we_write_and_peft_reads, 1, "qwen3_moe", policy, str(ours), "fused")
    assert np.abs(written - expected).max() < TOLERANCE
    found = lora_of_folder(ours / "adapter")
    assert (found.use_rslora, found.alpha, found.scale) == (True, 5.0, 2.5)
    policy = tiny_policy(1, **lora("per_expert", use_rslora=True, path=str(theirs / "adapter")))
    ((read, expected),) = run_ranks(peft_writes_and_we_read, 1, "qwen3_moe", policy, str(theirs))
    assert np.abs(read - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", full("qwen3_moe")])
def test_every_layout_writes_and_reads_the_same(name: str, tmp_path: Path) -> None:
    policy = tiny_policy(1, **lora("per_expert"))
    ((ours, _),) = run_ranks(we_write_and_peft_reads, 1, name, policy, str(tmp_path), "fused")
    many = tiny_policy(4, **lora("per_expert", path=str(tmp_path / "adapter")), **layout(tp=2, pp=2, ep=2))
    again = tmp_path / "again"
    found = run_ranks(logits_in_layout, 4, str(tmp_path / "model"), many, str(again))[0]
    assert np.abs(found - ours).max() < tolerance_of(name)
    one = tiny_policy(1, **lora("per_expert", path=str(again)))
    (read,) = run_ranks(logits_in_layout, 1, str(tmp_path / "model"), one, str(tmp_path / "third"))
    assert np.abs(read - ours).max() < tolerance_of(name)


def _section(path: Path, experts: str = "none") -> LoraConfig:
    section = tiny_policy(1, **lora(experts, path=str(path))).lora
    assert section is not None
    return section


def _folder(tmp_path: Path, **changes: Any) -> Path:
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 5.0, "bias": "none", **changes}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora: got True, supported: False"),
        ({"use_rslora": True}, "policy.lora.use_rslora: got False, expected True"),
        ({"use_rslora": "yes"}, "use_rslora: got yes, supported: False"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the base model"),
        ({"r": 8}, "policy.lora.rank: got 4, expected 8"),
        ({"r": None}, "adapter_config.json: r: got None, expected a number"),
        ({"lora_alpha": "6"}, "adapter_config.json: lora_alpha: got 6, expected a number"),
        ({"lora_alpha": 6}, "policy.lora.alpha: got 5.0, expected 6"),
    ],
    ids=str,
)
def test_other_adapters_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    try:
        lines = adapter_problems(_section(_folder(tmp_path, **changes)), None)
    except ConfigurationError as error:
        lines = error.problems
    assert any(said in line for line in lines), lines


Q_PROJ = "model.layers.1.self_attn.q_proj"
OF_PEFT = "base_model.model."


def _problems_of(folder: Path, shapes: Mapping[str, tuple[int, int]] = {}, experts: str = "none") -> list[str]:
    """Return what is said about the adapter of one layer beside a base of one layer, both of 6 outputs and 5 inputs."""
    base, adapter = folder / "base", folder / "adapter"
    adapter.mkdir()
    base.mkdir()
    found = {"lora_A": (4, 5), "lora_B": (6, 4), "layer": (6, 5), **shapes}
    factors = {f"{OF_PEFT}{Q_PROJ}.{name}.weight": np.zeros(found[name], np.float32) for name in ("lora_A", "lora_B")}
    _folder(adapter)
    save_file(factors, adapter / "adapter_model.safetensors")
    save_file({f"{Q_PROJ}.weight": np.zeros(found["layer"], np.float32)}, base / "model.safetensors")
    return [line.replace(f"{folder}/", "") for line in adapter_problems(_section(adapter, experts), base)]


FILE = "policy.lora.path: adapter: {} factors in adapter_model.safetensors"


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({}, []),
        (
            {"lora_A": (8, 5), "lora_B": (6, 8)},
            [f"{FILE.format(2)} have another rank than r 4 of adapter_config.json: {OF_PEFT}{Q_PROJ}.lora_A.weight 8"],
        ),
        (
            {"layer": (6, 7)},
            [
                f"{FILE.format(1)} belong to another base than base: {OF_PEFT}{Q_PROJ}.lora_A.weight has the shape"
                " [4, 5], and its layer [6, 7]"
            ],
        ),
        (
            {"layer": (9, 5)},
            [
                f"{FILE.format(1)} belong to another base than base: {OF_PEFT}{Q_PROJ}.lora_B.weight has the shape"
                " [6, 4], and its layer [9, 5]"
            ],
        ),
    ],
    ids=["fits", "rank", "inputs", "outputs"],
)
def test_factors_are_compared_with_rank_and_base_before_workers_start(
    shapes: dict[str, tuple[int, int]], said: list[str], tmp_path: Path
) -> None:
    assert _problems_of(tmp_path, shapes) == said


OTHER_LAYERS = (Q_PROJ, Q_PROJ.replace("1", "0"), Q_PROJ.replace("q_proj", "k_proj"))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (("lm_head",), f"{OF_PEFT}{Q_PROJ}.lora_A.weight has no layer"),
        (OTHER_LAYERS, f"1 layers of {{}} have no factors in adapter_model.safetensors: {OTHER_LAYERS[1]}"),
    ],
    ids=["more layers", "fewer layers"],
)
def test_an_adapter_of_more_or_fewer_layers_is_of_another_base(
    layers: Sequence[str], said: str, tmp_path: Path
) -> None:
    _problems_of(tmp_path)
    base = tmp_path / "base"
    save_file({f"{name}.weight": np.zeros((6, 5), np.float32) for name in layers}, base / "model.safetensors")
    (line,) = adapter_problems(_section(tmp_path / "adapter"), base)
    assert line.endswith(said.format(base))


def test_an_adapter_is_not_added_to_the_weights_that_contain_it(tmp_path: Path) -> None:
    """The final folder of a run has merged weights with an inventory, and the adapter in a folder."""
    (tmp_path / "adapter").mkdir()
    _folder(tmp_path / "adapter")
    (tmp_path / "files.json").write_text("{}")
    for path in (tmp_path, tmp_path / "adapter"):
        (line,) = adapter_problems(_section(path), tmp_path)
        assert (
            line
            == f"policy.lora.path: {path} is merged into {tmp_path} already; expected the base that it was trained on"
        )


def test_an_adapter_without_experts_is_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    assert _problems_of(tmp_path, experts="per_expert") == [
        "policy.lora.experts: got per_expert, but policy.lora.path adapter has no adapters of routed experts"
    ]


def test_a_truncated_file_is_reported_before_workers_start(tmp_path: Path) -> None:
    _problems_of(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigurationError, match=r"adapter: adapter_model.safetensors cannot be read: "):
        adapter_problems(_section(tmp_path / "adapter"), tmp_path / "base")


def test_a_checkpoint_with_other_targets_is_refused_before_workers_start(tmp_path: Path) -> None:
    section = _section(tmp_path).model_copy(update={"targets": ["q_proj", "v_proj"]})
    (tmp_path / MEGATRON_WEIGHTS_FOLDER).mkdir()

    def problems(*targets: str) -> list[str]:
        saved = {**section.model_dump(), "targets": targets}
        (tmp_path / "state.json").write_text(json.dumps({"config": {"policy": {"lora": saved}}}))
        return adapter_problems(section, None)

    assert problems("v_proj", "q_proj") == []
    assert problems("all-linear") == []  # may name the same layers: workers compare
    (line,) = problems("q_proj", "k_proj")
    assert line.startswith("policy.lora.targets: got ['q_proj', 'v_proj'], expected ['k_proj', 'q_proj'], as in ")


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no adapter: there is no adapter_config.json; expected "):
        adapter_problems(_section(tmp_path), None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alpha_pattern": {"q_proj": 20}}, "layers q_proj have rank 4 and alpha 20 (rank_pattern, alpha_pattern)"),
        ({"rank_pattern": {"q_proj": 8}}, "layers q_proj have rank 8 and alpha 5.0"),
        (
            {"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 20}, "use_rslora": True},
            "expected the same scale (alpha over the root of rank) for all layers",
        ),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: got ['q_proj'], expected an object of numbers above 0"),
    ],
    ids=str,
)
def test_adapters_of_several_scales_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_adapter_config(_folder(tmp_path, **changes))
    assert said in caught.value.problems[0]


def test_patterns_that_keep_the_scale_are_read(tmp_path: Path) -> None:
    assert read_adapter_config(_folder(tmp_path, rank_pattern={"x": 8}, alpha_pattern={"x": 10}))["r"] == 4
    changes = {"rank_pattern": {"x": 16}, "alpha_pattern": {"x": 10}, "use_rslora": True}
    assert read_adapter_config(_folder(tmp_path, **changes))["use_rslora"] is True


@pytest.mark.parametrize("kind", ["pipe", "deep"])
def test_a_description_that_cannot_be_read_is_one_line(kind: str, tmp_path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "adapter_config.json")
    else:
        (tmp_path / "adapter_config.json").write_text("[" * 200_000)
    with pytest.raises(ConfigurationError, match=r"adapter_config\.json cannot be read: "):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({}, "factors in adapter_model.safetensors cannot be used: there is none"),
        ({"lora_A": np.zeros((4, 5), np.float32)}, "lora_A.weight has no B beside it"),
        (
            {"lora_A": np.full((4, 5), np.nan, np.float32), "lora_B": np.zeros((6, 4), np.float32)},
            "lora_A.weight has NaN or infinite numbers",
        ),
        (
            {"lora_A": np.zeros((4, 5), np.int32), "lora_B": np.zeros((6, 4), np.float32)},
            "lora_A.weight is of int32, expected floating point",
        ),
    ],
    ids=("none", "half", "NaN", "integers"),
)
def test_factors_that_cannot_be_used_are_named(factors: dict[str, Any], said: str, tmp_path: Path) -> None:
    _folder(tmp_path)
    named = {f"{OF_PEFT}{Q_PROJ}.{name}.weight": value for name, value in factors.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    (line,) = adapter_problems(_section(tmp_path), None)
    assert said in line
