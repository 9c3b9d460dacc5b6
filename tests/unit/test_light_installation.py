# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What works without the packages of training: imports that anything else would make are refused."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nemo_rl_moe import cli, training_cli
from nemo_rl_moe.checksums import accept_files
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence

# A package stands for what it is imported as; the standard library and what torch, pyarrow and jaxtyping bring go free.
ONLY = """
import importlib.metadata, sys
ALLOWED = set(sys.argv[1].split(","))
OF_TRAINING = set(sys.argv[2].split(","))

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OF_TRAINING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

sys.meta_path.insert(0, Refused())
"""


def distributions(section: list[str]) -> set[str]:
    return {Requirement(line).name.lower() for line in section}


@pytest.fixture(scope="module")
def of_training(repository_root: Path) -> str:
    """Modules of the packages that the extra `train` installs and the package alone does not."""
    from importlib.metadata import packages_distributions

    project = tomllib.loads((repository_root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base = distributions(project["dependencies"])
    more = {name for extra in ("train", "wandb", "mlflow", "environments") for name in distributions(extras[extra])}
    found = {
        module
        for module, owners in packages_distributions().items()
        if {owner.lower() for owner in owners} & (more - base)
    }
    assert {"ray", "megatron", "pydantic", "transformers", "wandb"} <= found
    assert not {"torch", "numpy", "pyarrow", "omegaconf", "yaml", "safetensors", "xxhash"} & found
    return ",".join(sorted(found))


def run_without(of_training: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ONLY + code, "", of_training], capture_output=True, text=True, timeout=280, check=False
    )


def test_the_commands_of_training_are_known_without_it() -> None:
    parser = cli._build_parser(training_cli)
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    assert commands is not None
    assert set(commands) == {*cli.OF_TRAINING, *cli._OF_FOLDERS}


@pytest.mark.full
def test_an_audit_runs(tmp_path: Path, of_training: str) -> None:
    columns = {"rollout_experts": [[[0, 1]], [[2, 3]]]}
    CaptureFolderWriter(tmp_path, CaptureDescription((0,), 4, 2)).write(1, [CapturedSequence("a", 2, columns)])
    done = run_without(of_training, f"from nemo_rl_moe.cli import main; sys.exit(main(['audit', {str(tmp_path)!r}]))")
    assert "1 step, 1 sequence, 2 tokens" in done.stdout
    assert done.returncode == 1, done.stderr
    assert "belong to padding or to the last token" in done.stderr


@pytest.mark.full
def test_files_of_a_framework_are_read_without_pandas(of_training: str, repository_root: Path) -> None:
    """For pandas, pyarrow before 26 asks for the types of numpy; no package of this one brings it."""
    examples = repository_root / "examples" / "audit"
    arguments = ["audit", "verl/layer_swapped", "--model", "model", "--training", "transformers"]
    paths = [str(examples / word) if "-" not in word and word != "audit" else word for word in arguments]
    done = run_without(f"{of_training},pandas", f"from nemo_rl_moe.cli import main; sys.exit(main({paths!r}))")
    assert done.returncode == 1, done.stderr
    assert "layer 1 carries layer 2's routes" in done.stderr


@pytest.mark.full
def test_an_audit_names_unsupported_families(tmp_path: Path, of_training: str, repository_root: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "jetmoe"}')
    words = ["audit", str(repository_root / "examples/audit/verl/layer_swapped"), "--model", str(tmp_path)]
    done = run_without(of_training, f"from nemo_rl_moe.cli import main; sys.exit(main({words!r}))")
    assert "model_type 'jetmoe' (JetMoE) is not supported" in done.stderr
    assert "Traceback" not in done.stderr


def modules_of(names: set[str]) -> str:
    """Return the names under which distributions are imported."""
    from importlib.metadata import packages_distributions

    found = {module for module, owners in packages_distributions().items() if {o.lower() for o in owners} & names}
    assert {"jaxtyping", "pyarrow", "omegaconf"} <= found
    return ",".join(found)


@pytest.mark.full
def test_metrics_need_torch_and_numpy_alone(of_training: str, repository_root: Path) -> None:
    """Not even what the package alone depends on; typing_extensions comes with torch."""
    project = tomllib.loads((repository_root / "pyproject.toml").read_text())["project"]
    others = modules_of(distributions(project["dependencies"]) - {"torch", "numpy", "typing-extensions"})
    code = """
import torch
from nemo_rl_moe.routing.metrics.load_balance_metrics import load_balance_metrics
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
import nemo_rl_moe.routing.findings.tracker, nemo_rl_moe.routing.metrics.load_balance_tracking
import nemo_rl_moe.routing.hooks.routes
import nemo_rl_moe.routing.hooks.router_replay
print(load_balance_metrics(ExpertLoad((0,), torch.tensor([[4, 0]])), router_topk=1)["dead_expert_frac_mean"])
"""
    done = run_without(f"{of_training},{others}", code)
    assert (done.stdout, done.returncode) == ("0.5\n", 0), done.stderr


@pytest.mark.full
def test_the_callback_needs_transformers_besides(repository_root: Path) -> None:
    others = modules_of({"jaxtyping", "msgpack", "omegaconf", "plotly", "pyarrow", "xxhash", "pydantic", "ray"})
    code = "from nemo_rl_moe.routing.hooks.trainer import RoutingCallback; print(RoutingCallback().findings)"
    done = run_without(others, code)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.full
def test_hooks_load_without_their_hosts(of_training: str) -> None:
    done = run_without(of_training, "import nemo_rl_moe.routing.hooks.routes, nemo_rl_moe.routing.hooks.router_replay")
    assert done.returncode == 0, done.stderr


def test_verify_needs_one_package_more_and_says_which(tmp_path: Path, of_training: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"a")
    accept_files(tmp_path)
    code = f"from nemo_rl_moe.cli import main; sys.exit(main(['verify', {str(tmp_path)!r}]))"
    alone = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection"}
    done = run_without(",".join(set(of_training.split(",")) - alone), code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}: 1 files, 0.0 MB: all as they were written\n"
    done = run_without(of_training, code)
    assert done.returncode == 2
    assert done.stderr == "error: verify: needs pydantic, which is not installed: pip install pydantic\n"


def test_training_says_what_is_missing(of_training: str) -> None:
    done = run_without(of_training, "from nemo_rl_moe.cli import main; sys.exit(main(['sft', '--config', 'x.yaml']))")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: sft: needs the packages of training, of which ")
    assert done.stderr.strip().endswith("is not installed: pip install 'nemo-rl-moe[train]'")


def test_help_lists_all_commands(of_training: str) -> None:
    done = run_without(of_training, "from nemo_rl_moe.cli import main; main(['--help'])")
    assert done.returncode == 0, done.stderr
    for name in (*cli.OF_TRAINING, "audit", "report"):
        assert name in done.stdout


def test_routing_functions_load_nothing_but_torch_and_the_shapes(of_training: str) -> None:
    code = """
import torch
before = set(sys.modules)
import nemo_rl_moe.routing.metrics.load_balance_metrics, nemo_rl_moe.routing.agreement.route_identity
import nemo_rl_moe.routing.agreement.statistics
import nemo_rl_moe.routing.metrics.mismatch_split, nemo_rl_moe.routing.findings.tracker
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(names - {name.partition(".")[0] for name in before} - sys.stdlib_module_names))
"""
    done = run_without(of_training, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["jaxtyping", "nemo_rl_moe"]
