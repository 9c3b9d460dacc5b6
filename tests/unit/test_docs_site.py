# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the site's pages are made with; `make docs` builds the site itself."""

import argparse
import importlib.util
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from nemo_rl_moe import cli, training_cli
from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.files import KINDS_NAME, find_config, read_with_defaults
from nemo_rl_moe.config.schema_base import StrictModel
from nemo_rl_moe.config.validation import known_keys
from tests.conftest import REPOSITORY_ROOT

DOCS = REPOSITORY_ROOT / "docs"
SLURM_SCRIPT = REPOSITORY_ROOT / "examples" / "slurm" / "train.sbatch"


def script(name: str) -> ModuleType:
    """A module of `docs/`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_reference, site_pages, check_site = map(script, ("make_configuration_reference", "site_pages", "check_site"))


def leaves(values: Mapping[str, Any], keys: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full key and value of all that is no section; the values of some keys are mappings by name."""
    for name, value in values.items():
        if isinstance(value, dict) and value and prefix + name not in keys:
            yield from leaves(value, keys, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def inherited_first(name: str) -> list[dict[str, Any]]:
    """A shipped file behind those that it inherits from."""
    content = yaml.safe_load(find_config(name).read_text(encoding="utf-8"))
    inherited = content.pop("defaults", None)
    return [*(inherited_first(inherited) if inherited else []), content]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_key_is_in_the_reference_with_its_shipped_value(algorithm: str) -> None:
    shown = {
        f"{section.path}.{key.name}": key.values[algorithm]
        for section in make_reference.sections()
        for key in section.keys.values()
        if algorithm in key.values and not section.kind
    }
    of_kinds = {
        f"{section.path}.{key.name}"
        for section in make_reference.sections()
        for key in section.keys.values()
        if algorithm in key.values and section.kind
    }
    keys = known_keys(ALGORITHMS[algorithm].config_class)
    sections = {key.rpartition(".")[0] for key in keys}
    assert shown.keys() | of_kinds == set(keys) - sections
    files = inherited_first(make_reference.BASES[algorithm])
    shipped = {key: value for file in files for key, value in leaves(file, shown.keys()) if key in shown}
    assert len(shipped) > 80
    assert {key: yaml.safe_load(shown[key].strip("`")) for key in shipped} == shipped
    assert {shown[key] for key in shown.keys() - shipped.keys()} == {"not set"}


def test_reference_has_the_defaults_of_each_kind() -> None:
    defaults, shown = read_with_defaults(find_config(KINDS_NAME)), {}
    for section in make_reference.sections():
        for key in section.keys.values() if section.kind else ():
            _, part, *inner = section.path.split(".")
            shown[".".join([part, section.kind, *inner, key.name])] = key.values["grpo"]
    given = {key for key, value in shown.items() if value != "not set"}
    assert {key: yaml.safe_load(shown[key].strip("`")) for key in given} == dict(leaves(defaults, given))
    assert {"driver.function.function", "driver.openenv.server", "reward.judge.url"} <= shown.keys() - given
    assert shown["driver.tools.limits.memory_mb"] != shown["driver.agent.limits.memory_mb"]


def test_reference_in_words() -> None:
    lines = make_reference.reference().splitlines()
    assert "### `sft`" in lines
    assert "### `data` (sft, dpo, rm)" in lines
    assert "### `data` (grpo, ppo, distillation)" in lines
    assert lines.count("### `policy.megatron_cfg`") == 1
    for row in (
        "| `max_grad_norm` | a number above 0 and up to 1000000000 or null | `1.0` "
        "| Clip the gradient to this norm. null: no clipping. |",
        "| `train_global_batch_size` | a whole number above 0 | sft `64`, dpo `64`, rm `64`, grpo `512`, ppo `512`, "
        "distillation `512` | Number of samples in one optimizer step, over all ranks. |",
        "| `moe_use_legacy_grouped_gemm` | true or false | the model's own "
        "| Use the older grouped kernels. Megatron-Core up to 0.16. |",
    ):
        assert lines.count(row) == 1
    assert sum(line.startswith("| `num_samples_to_print` (grpo, ppo, distillation) |") for line in lines) == 1
    rows = [line for line in lines if line.startswith("| `")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_key_without_words_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(StrictModel):
        sft: int

    monkeypatch.setitem(ALGORITHMS, "sft", replace(ALGORITHMS["sft"], config_class=Silent))
    with pytest.raises(ValueError, match=r"\.sft: has no docstring in the schema"):
        make_reference.sections()


@pytest.mark.parametrize(
    ("source", "link", "in_site"),
    [
        ("docs/sft.md", "dpo.md#data", "dpo.md#data"),
        ("docs/sft.md", "#data", "#data"),
        ("docs/sft.md", "../CONTRIBUTING.md", "contributing.md"),
        ("docs/sft.md", "../examples/configs/sft.yaml", "examples/configs/sft.yaml"),
        ("docs/sft.md", "https://example.org/docs/sft.md", "https://example.org/docs/sft.md"),
        ("README.md", "docs/sft.md#data", "sft.md#data"),
        ("README.md", "docs/images/demo.png", "images/demo.png"),
        ("README.md", "LICENSE", "LICENSE"),
        ("CONTRIBUTING.md", "README.md", "index.md"),
    ],
)
def test_links_lead_to_the_same_file_in_the_site(source: str, link: str, in_site: str) -> None:
    assert site_pages.with_links_of_site(f"see [it]({link}).", source) == f"see [it]({in_site})."


def test_linked_files() -> None:
    page = "[a](../examples/configs/sft.yaml) [b](dpo.md#data) [c](#here) [d](https://example.org)"
    assert list(site_pages.linked_files(page, "docs/sft.md")) == ["examples/configs/sft.yaml", "docs/dpo.md"]


def test_formulas_become_mathml() -> None:
    page = (
        '<p><span class="arithmatex">\\(a &lt; b\\)</span> and <code>$c$</code></p>'
        '<div class="arithmatex">\\[\nd\n\\]</div>'
    )
    found = site_pages.with_mathematics(page, lambda latex, display: f"[{latex}|{display}]")
    assert found == "<p>[a < b|inline] and <code>$c$</code></p>[d|block]"


def test_lists_that_would_be_lost_are_found() -> None:
    assert site_pages.swallowed_lists("<p>These:\n- one\n- two</p><p>a - b\nc</p>") == ["- one"]
    assert site_pages.swallowed_lists("<p>A table\n| a | b |</p><pre>x\n- y</pre>") == ["| a | b |"]
    assert site_pages.shallow_lists("1. one\n   - inner\n\n```\n  - code\n```\n2. two\n    - deep\n") == ["- inner"]


def test_pages_have_no_such_lists() -> None:
    assert {page.name: site_pages.shallow_lists(page.read_text()) for page in DOCS.rglob("*.md")} == {
        page.name: [] for page in DOCS.rglob("*.md")
    }


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "good.html").write_text(
        '<h1 id="top"></h1><a href="inner/page.html#a%20b">a</a><a href="#top">b</a><a href="https://example.org">c</a>'
        '<img src="image.png"><link rel="canonical" href="https://example.org"><a href="mailto:a@example.org">d</a>'
        '<img src="data:image/png;base64,AA=="><a href="/good.html">e</a><a href="inner/">f</a>'
    )
    (tmp_path / "image.png").write_bytes(b"")
    (tmp_path / "inner" / "index.html").write_text("")
    (tmp_path / "inner" / "page.html").write_text('<p id="a b"><a href="../none.html">x</a><a href="#none">y</a></p>')
    (tmp_path / "bad.html").write_text(
        '<script src="https://example.org/a.js"></script><link rel="stylesheet" href="//example.org/b.css">'
        '<img src="none.png"><p style="background: url(http://example.org/c.png)"></p><a href="good.html#none">z</a>'
    )
    (tmp_path / "fonts.css").write_text('@import url("https://example.org/font.css");')
    (tmp_path / "plain.css").write_text("a { background: url(image.png); } /* https://example.org */")
    assert check_site.problems(tmp_path) == [
        "bad.html: is fetched from another server: https://example.org/a.js",
        "bad.html: is fetched from another server: //example.org/b.css",
        "bad.html: is fetched from another server: background: url(http://example.org/c.png)",
        "bad.html: good.html#none: the page has no such place",
        "bad.html: none.png: there is no such file",
        "inner/page.html: ../none.html: there is no such file",
        "inner/page.html: #none: the page has no such place",
        "fonts.css: fetches something from another server",
    ]
    assert check_site.problems(tmp_path / "none") == [f"{tmp_path / 'none'}: holds no page"]


def navigation() -> list[dict[str, Any]]:
    """Return the entries of the site's navigation, those of groups as lists."""
    text = (REPOSITORY_ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]
    return entries


def test_navigation_has_what_users_do_in_groups_that_fold() -> None:
    groups = [pages for group in navigation() for pages in group.values()]
    assert len(groups) <= 9
    assert max(map(len, groups)) <= 13
    pages = {page for group in groups for entry in group for page in entry.values()}
    assert {"lora.md", "ppo.md", "distillation.md", "from-trl.md", "migrating.md", "audit.md", "agents.md"} <= pages
    features = re.search(r"features:\n((?: +- .*\n)+)", (REPOSITORY_ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert features is not None
    assert not {"navigation.sections", "navigation.expand"} & set(re.findall(r"[\w.]+", features[1]))


def is_shown(option: str, action: argparse.Action) -> bool:
    """Return whether users give an option by this name."""
    return option.startswith("--") and option != "--help" and action.help != argparse.SUPPRESS


def test_commands_and_options_are_on_their_page() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    shown = {
        row[1]: set(re.findall(r"`(--[\w-]+)`", row[2])) for row in re.finditer(r"^\| `(\w+)` \|(.*)$", page, re.M)
    }
    (commands,) = (found for found in cli._build_parser(training_cli)._actions if found.dest == "command")
    assert shown == {
        name: {option for option, action in parser._option_string_actions.items() if is_shown(option, action)}
        for name, parser in dict(commands.choices or {}).items()
    }


def test_script_for_slurm_is_whole() -> None:
    subprocess.run(["bash", "-n", SLURM_SCRIPT], check=True)
    found = subprocess.run([SLURM_SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr == f"error: usage: sbatch {SLURM_SCRIPT} sft|dpo|rm|grpo --config FILE [overrides]\n"
    # Slurm reads its options up to the first command only.
    head, _, _ = SLURM_SCRIPT.read_text(encoding="utf-8").partition("set -euo pipefail")
    options = [line for line in SLURM_SCRIPT.read_text(encoding="utf-8").splitlines() if line.startswith("#SBATCH ")]
    assert len(options) == 10
    assert all(option in head for option in options)
