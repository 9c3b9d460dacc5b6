# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model of the hub: exactly the files that a run reads are fetched, of one version, and each failure is one line."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RemoteEntryNotFoundError

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.setup import _fetched
from nemo_rl_moe.models.hf_files import HubModel, check_weights, fetching_problem, find_model, load_config_json
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from tests.support.hf_folders import write_folder

NAME, COMMIT = "someone/tiny", "0123456789" * 4
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def policy_of(name: str = NAME, init: str = "pretrained") -> PolicyConfig:
    policy = load_config("sft_tiny_moe.yaml", [f"policy.init={init}"], check_paths=False).policy
    return policy.model_copy(update={"model_name": name})


class FakeHub:
    """A repository of the hub; files come into a folder as the cache has them."""

    def __init__(self, repository: Path, cache: Path):
        self.repository, self.snapshot = repository, cache / "snapshots" / COMMIT
        self.fetched: list[tuple[str, str | None]] = []  # name and version of every file asked for
        self.error: Exception | None = None

    def download(self, name: str, file: str, revision: str | None = None, local_files_only: bool = False) -> str:
        assert name == NAME
        assert not local_files_only, "tests do not ask whether the hub is there"
        self.fetched.append((file, revision))
        if self.error is not None:
            raise self.error
        if not (self.repository / file).is_file():
            raise RemoteEntryNotFoundError(
                "404: no such file", response=httpx.Response(404, request=httpx.Request("HEAD", "https://hub"))
            )
        (self.snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.repository / file, self.snapshot / file)
        return str(self.snapshot / file)


@pytest.fixture
def hub(tmp_path: Path, repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Holds a model in three files, and the same once more as other programs want it."""
    repository = tmp_path / "repository"
    write_folder({f"tensor.{number}": torch.ones(number, 3) for number in range(1, 7)}, repository)
    shutil.copy(repository_root / "examples/assets/tiny_qwen3_moe/config.json", repository)
    (repository / "original").mkdir()
    for name in ("consolidated.safetensors", "original/model.safetensors", "README.md", "modeling_own.py"):
        (repository / name).write_text("not fetched")
    hub = FakeHub(repository, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    return hub


def test_files_are_those_of_the_index_and_of_one_version(hub: FakeHub) -> None:
    shares: list[float] = []
    source = find_model(policy_of(), shares.append)
    assert {file.name for file in hub.snapshot.rglob("*") if file.is_file()} == {"config.json", INDEX, *SHARDS}
    assert hub.fetched[0] == ("config.json", None)
    assert {version for _, version in hub.fetched[1:]} == {COMMIT}
    assert source.hub == HubModel(NAME, COMMIT, ("config.json", INDEX, *SHARDS))
    assert shares == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert source.folder() == hub.snapshot
    check_weights(policy_of(), source.folder())


def test_a_single_file_and_a_generation_configuration(hub: FakeHub) -> None:
    for file in (INDEX, *SHARDS):
        (hub.repository / file).unlink()
    (hub.repository / "model.safetensors").write_text("weights")
    (hub.repository / "generation_config.json").write_text("{}")
    source = find_model(policy_of())
    assert source.hub is not None
    assert source.hub.files == ("config.json", "generation_config.json", "model.safetensors")


def test_random_weights_need_the_configuration_alone(hub: FakeHub) -> None:
    find_model(policy_of(init="random"))
    assert [file.name for file in hub.snapshot.iterdir()] == ["config.json"]


def test_fetching_is_reported(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = _fetched(policy_of(), ConsoleLogger(total_steps=0, live="never"))
    assert folder == hub.snapshot == source.folder()
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"fetching {NAME} ..."
    assert last.startswith(f"fetching {NAME}: done in")


def test_a_folder_is_read_where_it_is(hub: FakeHub) -> None:
    assert find_model(policy_of(str(hub.repository))).folder() == hub.repository
    assert hub.fetched == []


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("[Errno -2] Name or service not known"), OSError(28, "No space left on device")]
)
def test_what_goes_wrong_is_one_line(error: Exception, hub: FakeHub) -> None:
    hub.error = error
    with pytest.raises(ConfigurationError) as caught:
        find_model(policy_of())
    (line,) = caught.value.problems
    assert line.startswith(f"policy.model_name: got '{NAME}', which is no folder here, and config.json of it cannot be")
    assert str(error) in line
    reported = fetching_problem(HubModel(NAME, COMMIT, ("config.json",)))
    assert reported is not None
    assert reported.startswith(f"{line} (on ")


def test_a_repository_without_safetensors_and_a_damaged_index(hub: FakeHub) -> None:
    (hub.repository / INDEX).write_text(json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}}))
    with pytest.raises(ConfigurationError, match="which leaves the folder"):
        find_model(policy_of())
    assert not any("elsewhere" in file for file, _ in hub.fetched)
    (hub.repository / INDEX).unlink()
    with pytest.raises(ConfigurationError, match=r"and model\.safetensors of it cannot be had from the hub"):
        find_model(policy_of())


def test_damaged_files_are_found_before_a_worker_starts(hub: FakeHub) -> None:
    (hub.repository / SHARDS[1]).write_bytes((hub.repository / SHARDS[1]).read_bytes()[:-1])
    source = find_model(policy_of())
    with pytest.raises(ConfigurationError, match=f"{SHARDS[1]}: damaged"):
        check_weights(policy_of(), source.folder())


def new_snapshot(home: Path) -> Path:
    """Return the empty folder of the model's version in a cache."""
    repository = home / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    return repository / "snapshots" / COMMIT


@pytest.mark.slow
def test_the_cache_of_a_machine_without_network(hub: FakeHub, tmp_path: Path, repository_root: Path) -> None:
    """With the hub's own library, in a process of its own: it reads its settings when it is imported."""
    snapshot = new_snapshot(tmp_path / "home")
    for file in ("config.json", INDEX, *SHARDS):
        shutil.copy(hub.repository / file, snapshot)
    (found,) = in_other_process(tmp_path / "home", repository_root)
    assert json.loads(found) == [str(snapshot), ["config.json", INDEX, *SHARDS]]
    (snapshot / SHARDS[2]).unlink()
    (reported,) = in_other_process(tmp_path / "home", repository_root)
    assert f"and {SHARDS[2]} of it cannot be had from the hub" in reported


ASK = """
import json, shutil, sys
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import check_weights, find_model

policy = load_config("sft_tiny_moe.yaml", ["policy.init=pretrained"], check_paths=False).policy
policy = policy.model_copy(update={"model_name": sys.argv[1]})
for come_meanwhile in [None, *sys.argv[2:]]:
    if come_meanwhile:
        shutil.copytree(*come_meanwhile.split(":"), dirs_exist_ok=True)
    try:
        source = find_model(policy)
        check_weights(policy, source.folder())
        print(json.dumps([str(source.folder()), source.hub.files]))
    except ConfigurationError as error:
        print(error)
"""


def in_other_process(home: Path, repository_root: Path, *come_meanwhile: str, **settings: str) -> list[str]:
    """Return what a process that asks for the model gets; and again, once a folder `FROM:TO` has been copied."""
    words = ["-c", ASK, NAME, *come_meanwhile]
    done = run_python(words, home, repository_root, {"HF_HUB_OFFLINE": "1", **settings})
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def run_python(
    words: list[str], home: Path, repository_root: Path, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), **settings}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        [sys.executable, *words], cwd=repository_root, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def away() -> Iterator[dict[str, str]]:
    """Settings of a network in which nobody answers at the hub's address."""
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        yield {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_ENDPOINT": endpoint}


@pytest.mark.full
def test_a_hub_that_is_away_is_not_asked_again_and_again(
    hub: FakeHub, away: dict[str, str], tmp_path: Path, repository_root: Path
) -> None:
    """Its library would try each file six times, for half a minute; what the cache holds is taken at once."""
    in_cache = new_snapshot(tmp_path / "home")
    reported, found = in_other_process(tmp_path / "home", repository_root, f"{hub.repository}:{in_cache}", **away)
    expected = (
        f"policy.model_name: got '{NAME}', which is no folder here, and config.json of it cannot be had from the hub"
        f" ({away['HF_ENDPOINT']}: ConnectError: "
    )
    assert reported.startswith(expected), reported
    assert reported.endswith("), nor from its cache on this machine; a folder with the model's files will do")
    assert json.loads(found) == [str(in_cache), ["config.json", INDEX, *SHARDS]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "arguments", "line"),
    [
        ("tokenizer import load_tokenizer as load", f"'{NAME}'", f"policy.tokenizer.name: {NAME}: "),
        ("sources import open_source as load", f"'{NAME}', 'train'", f"{NAME}: "),
    ],
)
def test_tokenizers_and_data_sets_of_a_hub_that_is_away(
    load: str, arguments: str, line: str, away: dict[str, str], tmp_path: Path, repository_root: Path
) -> None:
    code = (
        f"from nemo_rl_moe.data.{load}\nfrom nemo_rl_moe.errors import UserError\n"
        f"try: load({arguments})\nexcept UserError as error: print(error)\n"
    )
    done = run_python(["-c", code], tmp_path, repository_root, away)
    assert (done.returncode, done.stderr) == (0, "")
    (reported,) = done.stdout.splitlines()
    assert reported.startswith(f"{line}cannot be had from the hub ({away['HF_ENDPOINT']}: ConnectError: "), reported


@pytest.mark.slow
def test_plan_without_a_network_is_one_line(away: dict[str, str], tmp_path: Path, repository_root: Path) -> None:
    words = ["-m", "nemo_rl_moe.cli", "plan", "--config", "sft_tiny_moe.yaml", f"policy.model_name={NAME}"]
    done = run_python(words, tmp_path, repository_root, away)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: policy.model_name: got '{NAME}', which is no folder here, and config.json of it")


@pytest.mark.parametrize("content", ["3", "null", '["a"]', '"text"', "", "{", "[" * 100_000])
def test_a_configuration_that_is_none_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        load_config_json(str(tmp_path))
    (line,) = caught.value.problems
    assert line.startswith("policy.model_name: ")
    assert str(tmp_path) in line
    assert len(line) < 500


def test_a_checkpoint_without_configuration_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    with pytest.raises(ConfigurationError, match=r"holds no config\.json, only weights: copy the model's config\.json"):
        load_config_json(str(tmp_path))
