# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of algorithms: the built-in ones agree with their schemas, and one of the user's own is found or refused."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe import cli
from nemo_rl_moe.config.algorithm import ALGORITHMS, BUILT_IN, algorithm_of, find_algorithm
from nemo_rl_moe.config.files import WHERE_THE_SHIPPED_ARE_LISTED, exemplar_names
from nemo_rl_moe.config.loading import dump_resolved, load_any_config
from nemo_rl_moe.config.validation import field_at
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.start import entry_point_of
from tests.unit.config.conftest import refused

MODULE = """
from dataclasses import replace

from nemo_rl_moe.config.algorithm import ALGORITHMS, Algorithm
from nemo_rl_moe.config.schema import GRPOMasterConfig, SFTMasterConfig
from nemo_rl_moe.config.schema_base import StrictModel

class Own(StrictModel):
    weight: float

class CustomMasterConfig(GRPOMasterConfig):
    own: Own

def weight_is_positive(config):
    if config.own.weight <= 0:
        yield f"own.weight: got {config.own.weight}, expected a number above 0"

def run(config, run):
    raise SystemExit(f"ran with {config.own.weight}")

OWN = Algorithm(
    "own", "a test", CustomMasterConfig, "my_algorithm:run", rules=(*ALGORITHMS["grpo"].rules, weight_is_positive),
    resume_keys={"grpo.seed": "a reason"}, loop="grpo", responses_at_a_time=ALGORITHMS["grpo"].responses_at_a_time,
)
AHEAD = replace(OWN, rollouts_run_ahead=True)
NO_SECTION = Algorithm("other", "a test", CustomMasterConfig, run)
TAKEN = Algorithm("grpo", "a test", CustomMasterConfig, run)
UNDERIVED = Algorithm("sft", "a test", SFTMasterConfig, run)
NUMBER = 3
"""


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module of the user's own, which is not on the path of an installed program."""
    (tmp_path / "my_algorithm.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    yield tmp_path
    sys.modules.pop("my_algorithm", None)
    for name in set(ALGORITHMS) - set(BUILT_IN):
        del ALGORITHMS[name]


def write_config(folder: Path, **own: object) -> str:
    content = {"defaults": "grpo_tiny_moe.yaml", "algorithm": "my_algorithm:OWN", "own": {"weight": 0.5} | own}
    (folder / "own.yaml").write_text(yaml.safe_dump(content))
    return "own.yaml"


@pytest.mark.parametrize("name", exemplar_names())
def test_shipped_configurations_are_for_built_in_algorithms(name: str) -> None:
    config = load_any_config(name, check_paths=False)
    algorithm = algorithm_of(config)
    assert ALGORITHMS[algorithm.name] is algorithm
    assert algorithm.loop_of(config).seed >= 0
    assert algorithm.updates_per_step(config) >= 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_keys_of_records_are_keys_of_their_schemas(name: str) -> None:
    algorithm = ALGORITHMS[name]
    for key in algorithm.resume_keys:
        place, _ = field_at(algorithm.config_class, key.split("."))
        assert ".".join(place) == key
    assert callable(entry_point_of(algorithm))


@pytest.mark.parametrize(
    ("name", "override", "needs"),
    [
        ("sft_tiny_moe.yaml", "sft.seed=1", False),
        ("dpo_tiny_moe.yaml", "dpo.reference_logprobs=in_step", True),
        ("grpo_tiny_moe.yaml", "loss_fn.reference_policy_kl_penalty=0", False),
        ("grpo_tiny_moe.yaml", "loss_fn.reference_policy_kl_penalty=0.1", True),
    ],
)
def test_needs_reference(name: str, override: str, needs: bool) -> None:
    config = load_any_config(name, [override], check_paths=False)
    assert algorithm_of(config).needs_reference(config) is needs


def test_own_algorithm_is_found_by_the_key(working_folder: Path) -> None:
    config = load_any_config(write_config(working_folder), ["grpo.seed=5"], check_paths=False)
    algorithm = algorithm_of(config)
    assert (algorithm.name, algorithm.reference) == ("own", "my_algorithm:OWN")
    assert algorithm.loop_of(config).seed == 5
    dumped = dump_resolved(config)
    assert list(dumped)[:2] == ["algorithm", "own"]
    (working_folder / "dumped.yaml").write_text(yaml.safe_dump(dumped, sort_keys=False))
    assert load_any_config("dumped.yaml", check_paths=False) == config


def test_rules_of_an_own_algorithm_are_checked_beside_the_common_ones(working_folder: Path) -> None:
    path = write_config(working_folder, weight=-1.0)
    problems = refused(
        load_any_config, path, ["policy.megatron_cfg.context_parallel_size=2", "own.wieght=3"], check_paths=False
    )
    assert "own.wieght: unknown key; did you mean own.weight?" in problems
    assert "own.weight: got -1.0, expected a number above 0" in problems
    assert any(line.startswith("policy.megatron_cfg.context_parallel_size: got 2") for line in problems)


def test_a_loop_that_generates_in_turns_lets_no_rollouts_run_ahead(working_folder: Path) -> None:
    path = write_config(working_folder)
    ahead = ["policy.generation.backend=vllm", "grpo.rollouts.mode=asynchronous"]
    assert refused(load_any_config, path, ahead, check_paths=False) == [
        "grpo.rollouts.mode: got asynchronous, expected synchronous with the algorithm own, whose loop generates a"
        " step's responses only when the step begins"
    ]
    assert load_any_config(path, check_paths=False)
    of_an_own_loop = (working_folder / path).read_text().replace(":OWN", ":AHEAD")
    (working_folder / "ahead.yaml").write_text(of_an_own_loop)
    assert algorithm_of(load_any_config("ahead.yaml", ahead, check_paths=False)).rollouts_run_ahead


@pytest.mark.parametrize(
    ("reference", "problem"),
    {
        "gpro": "algorithm: got 'gpro', expected sft, dpo, rm, grpo, ppo, distillation, or package.module:ALGORITHM;"
        " did you mean grpo?",
        "my-algorithm:OWN": "algorithm: got 'my-algorithm:OWN', expected package.module:ALGORITHM",
        "my_algorithm:OWNN": "algorithm: my_algorithm:OWNN: my_algorithm has no OWNN; did you mean OWN?",
        "my_algoritm:OWN": "algorithm: my_algoritm:OWN: there is no module my_algoritm, neither installed nor in",
        "my_algorithm:NUMBER": "algorithm: my_algorithm:NUMBER is 3 (int), expected an Algorithm",
        "my_algorithm:TAKEN": "algorithm: my_algorithm:TAKEN: its name grpo is that of a built-in algorithm",
        "my_algorithm:UNDERIVED": "algorithm: my_algorithm:UNDERIVED: its name sft is that of a built-in algorithm",
        "my_algorithm:NO_SECTION": "algorithm: my_algorithm:NO_SECTION: its config_class CustomMasterConfig has no"
        " section other",
    }.items(),
)
def test_what_is_refused(working_folder: Path, reference: str, problem: str) -> None:
    (line,) = refused(find_algorithm, reference)
    assert line.startswith(problem)
    if "my_algoritm:" in problem:
        assert line.endswith("; did you mean my_algorithm?")
    assert tuple(ALGORITHMS) == BUILT_IN


def test_an_entry_point_that_is_not_there_is_reported() -> None:
    with pytest.raises(ConfigurationError, match=r"sft: run: nemo_rl_moe.launch.sft:rn_sft: .* did you mean run_sft\?"):
        replace(ALGORITHMS["sft"], run="nemo_rl_moe.launch.sft:rn_sft").entry_point()


def test_commands_of_other_algorithms_name_the_right_one(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(working_folder)
    assert cli.main(["grpo", "--config", path]) == 2
    assert capsys.readouterr().err == (
        "error: own.yaml: is for the algorithm `own`: start it with nemo-rl-moe run --config own.yaml\n"
    )
    assert cli.main(["sft", "--config", "grpo_tiny_moe.yaml"]) == 2
    assert "start it with nemo-rl-moe grpo --config grpo_tiny_moe.yaml" in capsys.readouterr().err


def test_run_ends_with_code_2_before_anything_starts(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (working_folder / "wrong.yaml").write_text("defaults: grpo_tiny_moe.yaml\nalgorithm: my_algorithm:OWM\n")
    assert cli.main(["run", "--config", "wrong.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: algorithm: my_algorithm:OWM: my_algorithm has no OWM; did you mean OWN?\n"
    )
    assert cli.main(["run"]) == 2
    assert capsys.readouterr().err == f"error: run: --config FILE is missing{WHERE_THE_SHIPPED_ARE_LISTED}\n"
    assert {path.name for path in working_folder.iterdir()} <= {"my_algorithm.py", "wrong.yaml", "__pycache__"}


TINY = Path(cli.__file__).resolve().parents[1] / "examples/assets/tiny_qwen3_moe"


def test_config_and_plan_know_an_own_algorithm(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(working_folder)
    there = [f"policy.model_name={TINY}", "data.train.path=of_the_hub", "data.validation=null"]
    assert cli.main(["config", "--config", path, "own.weight=0.25", *there]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["algorithm"], printed["own"]) == ("my_algorithm:OWN", {"weight": 0.25})
    assert cli.main(["plan", "--config", path, f"policy.model_name={TINY}"]) == 0
    assert "+ while generating" in capsys.readouterr().out


def test_help_names_the_algorithms_and_imports_no_torch() -> None:
    code = (
        "import sys; from nemo_rl_moe import cli\n"
        "try: cli.main(['run', '--help'])\n"
        "finally: assert not {'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in BUILT_IN:
        assert ALGORITHMS[name].summary in result.stdout
    assert "algorithm: my_module:ALGORITHM" in result.stdout


def test_roles_are_placed_and_their_layouts_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    example = Path(cli.__file__).resolve().parents[1] / "examples/algorithms"
    monkeypatch.syspath_prepend(example)
    monkeypatch.chdir(tmp_path)
    path = example / "opd.yaml"
    try:
        config = load_any_config(path, ["policy.megatron_cfg.moe_z_loss_coeff=0.1"], check_paths=False)
        place = config.cluster.place_of("teacher")
        assert (place.world_size, config.cluster.world_size, config.cluster.all_workers_per_node) == (1, 2, 3)
        teacher = algorithm_of(config).roles(config)["teacher"].as_policy(config.policy)
        assert (teacher.model_name, teacher.init, teacher.train_micro_batch_size) == ("./teacher", "pretrained", 64)
        assert teacher.megatron_cfg.moe_transformer_fields == {}
        assert not teacher.megatron_cfg.track_moe_metrics
        for override, line in (
            (
                "opd.teacher.megatron_cfg.pipeline_model_parallel_size=2",
                "cluster.roles.teacher: 1 workers (num_nodes 1 x cpu_workers_per_node 1) cannot be divided by 2",
            ),
            ("~cluster.roles.teacher", "cluster.roles.teacher: missing; expected"),
            ("+cluster.roles.critic={}", "cluster.roles.critic: no role of the algorithm opd; its roles: teacher"),
        ):
            with pytest.raises(ConfigurationError) as caught:
                load_any_config(path, [override], check_paths=False)
            assert [problem for problem in caught.value.problems if problem.startswith(line)], caught.value.problems
        assert any(line.startswith("opd.teacher.model_name: teacher not ") for line in refused(load_any_config, path))
    finally:
        ALGORITHMS.pop("opd", None)
        sys.modules.pop("on_policy_distillation", None)


def test_built_in_algorithms_have_no_roles(working_folder: Path) -> None:
    assert refused(load_any_config, "sft_tiny_moe.yaml", ["+cluster.roles.teacher={}"], check_paths=False) == [
        "cluster.roles.teacher: no role of the algorithm sft; it has none; set cluster.roles {}"
    ]
