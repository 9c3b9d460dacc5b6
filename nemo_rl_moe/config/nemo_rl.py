# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Translation of a NeMo-RL configuration, with a remark for each key that has no counterpart.

Single keys are translated by the table in `nemo_rl_keys.yaml`. The rules for keys that belong together are in
`nemo_rl_training.py`, `nemo_rl_data.py`, `nemo_rl_grpo.py` and `nemo_rl_roles.py`.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.files import leaves
from nemo_rl_moe.config.nemo_rl_data import DATA_RULES, environment_of, one_set_of_samples
from nemo_rl_moe.config.nemo_rl_files import algorithm_in, read_theirs
from nemo_rl_moe.config.nemo_rl_grpo import RULES_OF
from nemo_rl_moe.config.nemo_rl_keys import row_of
from nemo_rl_moe.config.nemo_rl_training import TRAINING_RULES
from nemo_rl_moe.config.nemo_rl_translation import PLACE_OF_ENGINES, Theirs, Translation, shown
from nemo_rl_moe.config.validation import known_keys
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.masking import masked


def translate(path: Path) -> Translation:
    """Translate a NeMo-RL configuration file, with the files that it inherits from, to this package's keys."""
    return translate_tree(read_theirs(path), path)


def translate_tree(theirs: Mapping[str, Any], path: Path) -> Translation:
    """Translate a NeMo-RL configuration that has been read from `path` to this package's keys."""
    translation = Translation(algorithm_in(theirs, path))
    try:
        asked = Theirs(one_set_of_samples(masked(theirs), translation))
        off = [*_sections_off(asked.tree), *_sections_of_others(Theirs(asked.tree))]
        values = dict(leaves(asked.tree))
        by_rules = [(key, value) for key, value in values.items() if _translate_key(translation, key, values, off)]
        for rule in (*TRAINING_RULES, *DATA_RULES, *RULES_OF.get(translation.algorithm, ())):
            rule(asked, translation)
        translation.unread += [f"{key}: {shown(value)}" for key, value in by_rules if not asked.has_read(key)]
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigurationError(f"{path}: a value has another form than in NeMo-RL: {error}") from error
    return translation


def _sections_off(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the keys of the outermost sections with `enabled: false`. Sections in `_KEPT_WHILE_OFF` are not yielded, so
    that their values are translated although they are off."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if not isinstance(value, Mapping):
            continue
        if value.get("enabled") is False and key not in _KEPT_WHILE_OFF:
            yield key
        else:
            yield from _sections_off(value, f"{key}.")


_KEPT_WHILE_OFF = (
    "checkpointing",
    "policy.dynamic_batching",
    "policy.sequence_packing",
    "policy.generation.colocated",
    "grpo.reward_shaping",
    "ppo.reward_shaping",
)


def _sections_of_others(theirs: Theirs) -> Iterator[str]:
    """Yield the keys of sections that have no effect, because the run uses another backend, logger or environment."""
    backend = theirs.get("policy.generation.backend", "vllm")
    chosen, environments = environment_of(theirs), theirs.get("env", {})
    for section, is_read in (
        *((f"env.{name}", name == chosen) for name, section in environments.items() if isinstance(section, Mapping)),
        ("policy.generation.mcore_generation_config", backend == "megatron"),
        ("policy.generation.vllm_cfg", backend == "vllm"),
        ("policy.generation.vllm_kwargs", backend == "vllm"),
        ("policy.generation.refit_cfg", theirs.get("policy.generation.refit_transport") is not None),
        ("logger.swanlab", theirs.get("logger.swanlab_enabled", False)),
        ("logger.gpu_monitoring", theirs.get("logger.monitor_gpus", False)),
    ):
        if not is_read and theirs.has(section):
            yield section


def _translate_key(translation: Translation, key: str, values: Mapping[str, Any], off: list[str]) -> bool:
    """Translate one key by its row in the table of keys, or report why the key has no counterpart. Return True without
    translation if the row leaves the key to a rule, a function that translates several keys together."""
    value = values[key]
    section = next((above for above in off if key.startswith(f"{above}.") or key == above), None)
    if section is not None:
        if (line := f"{section}.*: switched off, or not read") not in translation.idle:
            translation.idle.append(line)
        return False
    row = row_of(key)
    if row is None:
        translation.without.append(f"{key}: {shown(value)}: not a key that this translator knows")
    elif (ours := row.ours_in(translation.algorithm)) is None:
        _report(translation, key, value, values.get(row.repeated_by(key)) if row.repeats else row.off, row.note)
    elif ours not in _keys_of(translation.algorithm):
        idle = values.get(row.repeats) if row.repeats else row.off
        _report(translation, key, value, idle, f"{ours} is no key of {translation.algorithm}")
    elif row.convert is None:
        return True
    else:
        translation.values[ours] = row.convert(value)
    return False


def _report(translation: Translation, key: str, value: Any, off: Any, why: str) -> None:
    """Report a key without a counterpart. It is reported in `idle` if its value (null, false, zero, empty or `off`) has
    no effect, else in `without`."""
    if value in (None, False, 0, "", off) or value in ({}, []):
        translation.idle.append(f"{key}: {shown(value)}")
    else:
        translation.without.append(f"{key}: {shown(value)}: {why}")


@cache
def _keys_of(algorithm: str) -> frozenset[str]:
    """Return the keys of an algorithm's configuration, with `cluster.roles.generation` if it generates responses."""
    own = {PLACE_OF_ENGINES} if algorithm in RULES_OF else set()
    return frozenset(known_keys(ALGORITHMS[algorithm].config_class)) | own
