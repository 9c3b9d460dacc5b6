# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every family with Transformer Engine's modules, as on a GPU: layer spec, names, cuts, import, export, checkpoints.

The modules are a stand-in for Transformer Engine in plain torch. What its kernels compute, a GPU has to show.
"""

from pathlib import Path

import pytest

from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from tests.support.checkpoint_run import load_and_train, train_and_save
from tests.support.context_run import assert_as_one_rank, one_rank, shared_run
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_parity import LAYOUTS, ParityJobs
from tests.support.family_reference import assert_same_experts, assert_same_tensors, logit_difference, write_reference
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.quick_list import listed
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import RunSettings

# Largest seen: 1.0e-5.
LOGITS_TOLERANCE = 1e-4
# Tensor parallelism is where marks, cuts and norms inside of linear layers matter: down-projections that are whole, and
# sinks and biases of experts.
QUICK = {("deepseek_v3", "tp2"), ("gpt_oss", "tp2")}
WHERE = ("one_rank", "tp2", "ep2", "pp2", "tp2_ep2_pp2")


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityJobs:
    """Return the jobs of the models and layouts whose tests are selected."""
    alike = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {
        (chosen["name"], chosen["where"])
        for chosen in (item.callspec.params for item in alike)
        if chosen.keys() >= {"name", "where"}
    }
    return ParityJobs(wanted, tmp_path_factory.mktemp("families"), with_engine=True)


@pytest.mark.parametrize(
    ("name", "where"),
    listed(
        ((name, where) for where in WHERE for name, model in FAMILY_MODELS.items() if LAYOUTS[where].holds(model)),
        in_full=QUICK,
    ),
)
def test_a_family_is_what_transformers_makes_of_it(name: str, where: str, jobs: ParityJobs) -> None:
    run, reference, export = jobs.run(name, where), jobs.reference(name), jobs.export(name, where)
    assert logit_difference(run.outputs, reference.outputs) < LOGITS_TOLERANCE
    assert_same_experts(run.outputs, reference.outputs)
    assert_same_tensors(jobs.exported(name, where), jobs.folder(name))
    assert [one.token_ids for one in run.responses] == [one.token_ids for one in reference.responses]
    # After a step, whose gradients went through all modules, and whose norm counts each weight once.
    assert logit_difference(run.trained, export.trained) < LOGITS_TOLERANCE
    assert logit_difference(run.trained, run.outputs) > 100 * LOGITS_TOLERANCE
    assert run.packed_step is not None
    assert run.packed_step.loss == pytest.approx(run.step.loss, rel=1e-5)
    assert run.packed_step.grad_norm == pytest.approx(run.step.grad_norm, rel=1e-4)


def steps_with_own_modules(name: str, root: str) -> tuple[float, float]:
    """Loss and gradient norm of the step that every layout takes, on one rank."""
    from tests.support.family_parity import run_family

    folder = Path(root, "model")
    write_reference(name, folder)
    with parallel_job(tiny_policy()):
        run = run_family(folder, tiny_policy(), Path(root, "exports"))
    assert run is not None
    return run.step.loss, run.step.grad_norm


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({name for name, _ in QUICK}))
def test_a_step_is_that_of_own_modules(name: str, jobs: ParityJobs, tmp_path: Path) -> None:
    ((loss, norm),) = run_ranks(steps_with_own_modules, 1, name, str(tmp_path))
    step = jobs.run(name, "tp2").step
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert step.grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.full
def test_two_ranks_share_each_sequence() -> None:
    """Other tests of it are in `test_context_parallel.py`; here ranks with the engine run already."""
    changes = {
        "sequence_packing__enabled": True,
        "activation_checkpointing": "full",
        "distributed_data_parallel_config__use_distributed_optimizer": True,
    }
    assert_as_one_rank(shared_run(2, 2, **changes), one_rank())


def modules_and_fields(folders: dict[str, str]) -> dict[str, tuple[set[str], dict[str, object]]]:
    """By model the classes of its modules that stand in for Transformer Engine's, and fields that follow from it."""
    from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
    from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

    found = {}
    with parallel_job(tiny_policy()):
        for name, folder in folders.items():
            hf_config = plain_config(load_hf_config(folder))
            config = build_transformer_config(tiny_policy(), hf_config)
            (chunk,) = build_model_chunks(tiny_policy(), config, hf_config)
            classes = {
                type(module).__name__
                for module in chunk.modules()
                if any(base.__module__.startswith("transformer_engine.") for base in type(module).__mro__)
            }
            fields = ("moe_permute_fusion", "moe_grouped_gemm", "apply_rope_fusion", "bias_dropout_fusion")
            found[name] = classes, {field: getattr(config, field) for field in fields}
    return found


def test_models_are_built_of_its_modules(tmp_path: Path) -> None:
    names = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3")
    folders = {name: str(tmp_path / name) for name in names}
    for name, folder in folders.items():
        FAMILY_MODELS[name].hf_config().save_pretrained(folder)
    (found,) = run_ranks_with_engine(modules_and_fields, 1, folders)
    attention = {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "RMSNorm"}
    experts = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
    assert found["qwen3"][0] == attention
    assert found["qwen3_moe"][0] == attention | experts
    assert found["gpt_oss"][0] == attention | experts
    assert found["deepseek_v3"][0] == attention | experts | {"TEColumnParallelLinear", "TELinear"}
    on = {"moe_permute_fusion": True, "moe_grouped_gemm": True, "apply_rope_fusion": True, "bias_dropout_fusion": True}
    assert found["qwen3_moe"][1] == on
    # Latents take no fused rotary positions, experts no fused dropout beside their biases.
    assert found["deepseek_v3"][1] == on | {"apply_rope_fusion": False}
    assert found["gpt_oss"][1] == on | {"bias_dropout_fusion": False}


def problems_with_packing(folder: str, versions: list[tuple[int, int]]) -> list[list[str]]:
    """Return the problems of a model with packed sequences, for each release of Transformer Engine."""
    from nemo_rl_moe.errors import ConfigurationError
    from nemo_rl_moe.models.megatron.model import transformer_config, transformer_engine

    hf_config = plain_config(load_hf_config(folder))
    problems = []
    for version in versions:
        transformer_engine.release = lambda version=version: version  # type: ignore[assignment]
        transformer_config.build_transformer_config(tiny_policy(), hf_config)
        try:
            transformer_config.build_transformer_config(tiny_policy(sequence_packing__enabled=True), hf_config)
            problems.append([])
        except ConfigurationError as error:
            problems.append(list(error.problems))
    return problems


@pytest.mark.full
def test_packed_sinks_need_a_kernel(tmp_path: Path) -> None:
    FAMILY_MODELS["gpt_oss"].hf_config().save_pretrained(tmp_path / "gpt_oss")
    FAMILY_MODELS["qwen3_moe"].hf_config().save_pretrained(tmp_path / "qwen3_moe")
    versions = [(2, 9), (2, 11), (2, 12), (0, 0)]
    (found,) = run_ranks_with_engine(problems_with_packing, 1, str(tmp_path / "gpt_oss"), versions)
    refused = (
        "policy.sequence_packing.enabled: got true, but Transformer Engine 2.{} has no kernel for packed sequences with"
        " the model's attention sinks; expected false, or Transformer Engine 2.12 or newer"
    )
    assert found == [[refused.format(9)], [refused.format(11)], [], []]
    (others,) = run_ranks_with_engine(problems_with_packing, 1, str(tmp_path / "qwen3_moe"), versions)
    assert others == [[]] * 4


SAVE_AFTER, NUM_STEPS = 1, 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("deepseek_v3", {"tp": 2}),
        pytest.param("qwen2_moe", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"pp": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("into_engine", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoints_go_from_its_modules_to_others(
    model: str, sizes: dict[str, int], into_engine: bool, tmp_path: Path
) -> None:
    """Norms lie elsewhere, experts in one tensor or in many, and another Adam counts its updates elsewhere."""
    two, one = (RunSettings(tiny_policy(n, **layout(**s)), model=model) for n, s in ((2, sizes), (1, {})))
    save, load = run_ranks_with_engine, run_ranks
    if into_engine:
        save, load = load, save
    written = save(train_and_save, 2, two, str(tmp_path), SAVE_AFTER, NUM_STEPS)[0]
    (found,) = load(load_and_train, 1, one, str(tmp_path), SAVE_AFTER, NUM_STEPS)
    for step, expected in zip(found, written[SAVE_AFTER:], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
