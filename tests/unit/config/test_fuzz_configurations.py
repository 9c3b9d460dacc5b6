# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations that nobody has thought of, through `config` and `plan`: refused in words, or taken as they say."""

import json
import math
import random
import string
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_moe.config.files import exemplar_names, exemplars_folder, find_config, read_with_defaults
from nemo_rl_moe.config.loading import dump_resolved, load_any_config
from nemo_rl_moe.config.schema import DPOMasterConfig, GRPOMasterConfig, SFTMasterConfig
from nemo_rl_moe.config.validation import known_keys
from tests.conftest import REPOSITORY_ROOT
from tests.support.fuzzing import Case, Output, command, fuzz
from tests.support.mutations import ODD_TEXTS, mutated_bytes, mutated_tree, near, places, value_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MODEL = f"policy.model_name={REPOSITORY_ROOT / 'examples/assets/tiny_qwen3_moe'}"
TINY = {
    "sft_tiny_moe.yaml": SFTMasterConfig,
    "dpo_tiny_moe.yaml": DPOMasterConfig,
    "grpo_tiny_moe.yaml": GRPOMasterConfig,
}
VALUES = (
    *("1", "0", "-1", "2", "3", "8", "64", "1e-3", ".5", "1e60", "-5.0", "nan", ".nan", ".inf", "1_000", "true", "no"),
    *("null", "~", "''", "auto", "never", "bfloat16", "1:30", "017", "0x1F", "0b11", "2001-01-01", "1e400", "9" * 500),
    *("[]", "{}", "[1, 2]", "{a: 1}", "[[[[1]]]]", "{a: {b: {c: 1}}}", "!!python/object/apply:os.system [ls]", "*a"),
    *("&a [1]", "!!binary aGk=", "!!set {a}", "${policy}", "${sft.max_num_steps}", "${oc.env:HOME}", "${", "a: b"),
    *("[" * 300, "[" * 300 + "]" * 300, "- " * 60 + "1", "? a", "|\n  text", "'", '"\\0"', "%", "@", "`", "#"),
    "x" * 5_000,
)  # fmt: skip


def _override(generator: random.Random, keys: list[str], shipped: dict[str, Any]) -> str:
    key = generator.choice(keys)
    how = generator.randrange(20)
    if how > 9:
        value = near(generator, value_at(shipped, generator.choice(places(shipped)[1:])))
        with suppress(KeyError, TypeError):
            value = near(generator, value_at(shipped, key.split(".")))
        return f"{key}={json.dumps(value)}"
    if how == 0:
        key = key[: generator.randrange(len(key))] + generator.choice(string.printable) + key
    if how == 1:
        key = generator.choice(["k" * 10_000, ".", "a..b", "", "policy." * 400 + "x", "\x1b[2J", "${a}"])
    form = generator.choice(["{}={}", "{}={}", "{}={}", "{}={}", "+{}={}", "~{}", "{}{}"])
    value = generator.choice([*VALUES, *(json.dumps(text) for text in ODD_TEXTS)])
    return form.format(key, value)


def overrides_of_exemplars(generator: random.Random, folder: Path) -> Case:
    exemplar = generator.choice(list(TINY))
    keys, shipped = known_keys(TINY[exemplar]), read_with_defaults(find_config(exemplar))
    words = [_override(generator, keys, shipped) for _ in range(generator.choice([1, 1, 1, 2, 5]))]
    words = [word for word in words if not word.startswith("-")]
    name = generator.choice(["config", "config", "plan"])
    run = command(name, "--config", exemplar, MODEL, *words)
    return Case(
        f"{name} {exemplar} {words}", run, _config_difference(folder, {}) if name == "config" else _plan_is_whole
    )


def changed_exemplars(generator: random.Random, folder: Path) -> Case:
    exemplar = generator.choice(exemplar_names())
    inherits = generator.random() < 0.5
    tree = yaml.safe_load(find_config(exemplar).read_text()) if inherits else read_with_defaults(find_config(exemplar))
    tree, what = mutated_tree(generator, tree, generator.choice([1, 1, 1, 3]))
    path = folder / "mine.yaml"
    text = (
        json.dumps(tree) if generator.random() < 0.3 else yaml.safe_dump(tree, allow_unicode=generator.random() < 0.5)
    )
    path.write_text(text, errors="surrogatepass")
    name = generator.choice(["config", "config", "plan"])
    model = [MODEL] if name == "plan" else []
    difference = _config_difference(folder, tree) if name == "config" else _plan_is_whole
    return Case(f"{name} of {exemplar}: {what}", command(name, "--config", str(path), *model), difference)


def _bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines)


def _chain(generator: random.Random, folder: Path) -> str:
    """Files that inherit from each other, now and then in a circle."""
    length = generator.choice([2, 10, 300])
    for number in range(length):
        parent = (
            f"part_{number + 1}.yaml" if number + 1 < length else generator.choice(["sft_tiny_moe.yaml", "part_0.yaml"])
        )
        (folder / f"part_{number}.yaml").write_text(f"defaults: {parent}\nsft: {{seed: {number}}}\n")
    return "defaults: part_0.yaml\n"


def _wide(generator: random.Random, folder: Path) -> str:
    """Files each of which names the next one twice."""
    for number in range(25):
        parent = f"wide_{number + 1}.yaml" if number < 24 else "sft_tiny_moe.yaml"
        (folder / f"wide_{number}.yaml").write_text(f"defaults: [{parent}, {parent}]\n")
    return "defaults: wide_0.yaml\n"


def _interpolations(generator: random.Random, folder: Path) -> str:
    names = [
        "policy",
        "sft.seed",
        "z0",
        "z1",
        "z2",
        ".z0",
        "..z1",
        "data.train",
        "zz",
        "z0.0",
        "policy.megatron_cfg.optimizer",
    ]
    lines = [
        f"z{number}: {generator.choice(['', 'a', '['])}"
        + "".join(f"${{{generator.choice(names)}}}" for _ in range(generator.choice([1, 1, 2, 3])))
        for number in range(generator.choice([1, 3, 12]))
    ]
    return "defaults: sft_tiny_moe.yaml\n" + "\n".join(lines) + "\n"


TINY_SFT = "defaults: sft_tiny_moe.yaml\n"
_TEXTS: tuple[Callable[[random.Random, Path], str], ...] = (
    lambda generator, folder: f"{TINY_SFT}{_bomb(generator.choice([3, 12, 30, 200]))}\n",
    lambda generator, folder: f"{TINY_SFT}sft: &s {{seed: 3, <<: *s}}\n",
    lambda generator, folder: f"{TINY_SFT}a: &a [*a]\n",
    lambda generator, folder: "x: &x {<<: {<<: {a: 1}}}\n" + TINY_SFT + "sft: {<<: *x}\n",
    lambda generator, folder: "defaults: " + generator.choice([*VALUES, *map(json.dumps, ODD_TEXTS)]),
    lambda generator, folder: f"{TINY_SFT}? {generator.choice(VALUES)}\n: {generator.choice(VALUES)}\n",
    lambda generator, folder: TINY_SFT + "\n".join("  " * n + "a:" for n in range(generator.choice([40, 60, 900]))),
    lambda generator, folder: f"---\n{TINY_SFT}---\na: 1\n",
    lambda generator, folder: f"%YAML 1.2\n%TAG ! tag:x,2000:\n---\n{TINY_SFT}",
    lambda generator, folder: f"{TINY_SFT}sft:\n  seed: {generator.choice(VALUES)}\n",
    _chain,
    _wide,
    _interpolations,
)


def texts_of_configurations(generator: random.Random, folder: Path) -> Case:
    path = folder / "mine.yaml"
    if generator.random() < 0.35:
        whole = (exemplars_folder() / generator.choice([*exemplar_names(), "base.yaml"])).read_bytes()
        content, what = mutated_bytes(generator, whole)
    else:
        make = generator.choice(_TEXTS)
        content = make(generator, folder).encode(errors="surrogatepass")
        what = f"{make.__name__} {content[:200]!r}"
    path.write_bytes(content)
    return Case(what, command("config", "--config", str(path)), _config_difference(folder, {}))


def _config_difference(folder: Path, given: Any) -> Callable[[Output], str | None]:
    """What the printed configuration lacks of a file that PyYAML has read, or what reading it again changes."""

    def difference(output: Output) -> str | None:
        printed = yaml.safe_load(output.printed)
        for place in places(given) if isinstance(given, dict) else ():
            value = value_at(given, place)
            if isinstance(value, dict | list) or place[0] == "defaults" or "${" in str(value):
                continue
            try:
                found = value_at(printed, place)
            except (KeyError, TypeError):
                if value is not None:
                    return f"{place}: {value!r} was given and is not in force"
                continue
            same = found == value or (isinstance(value, float) and math.isnan(value)) or str(found) == str(value)
            if not same and not (isinstance(value, str) and float(value) == found):
                return f"{place}: {value!r} was given, and {found!r} is in force"
        again = folder / "again.yaml"
        again.write_text(output.printed)
        kept = dump_resolved(load_any_config(again, check_paths=False))
        return None if kept == printed else "the printed configuration reads as another one"

    return difference


def _plan_is_whole(output: Output) -> str | None:
    words = ("Layout:", "held all the time", "at the fullest moment")
    return next((f"the plan lacks {word!r}" for word in words if word not in output.printed), None)


def test_overrides(tmp_path: Path) -> None:
    fuzz(overrides_of_exemplars, tmp_path)


def test_changed_exemplars(tmp_path: Path) -> None:
    fuzz(changed_exemplars, tmp_path)


def test_texts(tmp_path: Path) -> None:
    fuzz(texts_of_configurations, tmp_path)
