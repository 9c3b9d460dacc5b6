# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts that change when an input changes which a resumed run relies on."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME

TRAINING_DATA = "training data"
MODEL = "model"
_DIGITS = 16
_END_BYTES = 1 << 20
_MEANING = {
    TRAINING_DATA: "samples may be trained on twice or never, and the run differs from one that never stopped",
    MODEL: "a reference model is read from it anew, so that its log-probabilities differ from those before",
}


def samples_fingerprint(name: str, samples: Iterable[ArrayLike]) -> str:
    """The fingerprint of a data set: its name, its size and a hash of all tokens in their order.

    Args:
        name: What the data set is called.
        samples: The tokens of each sample; of a pair, both lists after each other.
    """
    digest, count = hashlib.sha256(), 0
    for tokens in samples:
        count += 1
        ids = np.asarray(tokens, dtype=np.int64)
        digest.update(ids.size.to_bytes(8, "little"))  # or two samples could be cut elsewhere without a change
        digest.update(ids.tobytes())
    return f"{name}: {count} samples, {digest.hexdigest()[:_DIGITS]}"


def model_fingerprint(model_name: str) -> str:
    """The fingerprint of a model: of a folder, its `config.json`, and the sizes, beginnings and ends of its weights.

    The times of files are left out: a copy is the same model. All of the weights would take too long to read.

    Args:
        model_name: A folder, or a hub's name, which is its own fingerprint.
    """
    folder = Path(model_name)
    if not folder.is_dir():
        return model_name
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(f"{POLICY_FOLDER_NAME}/*.distcp")])
    for file in files:
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(_END_BYTES))
            content.seek(max(0, size - _END_BYTES))
            digest.update(content.read(_END_BYTES))
    return f"{model_name}: {len(files)} weight files, {digest.hexdigest()[:_DIGITS]}"


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line for each input that differs from the checkpoint's, with what that means.

    Args:
        before: The checkpoint's fingerprints.
        now: The present ones.
    """
    return [
        f"the {name} has changed since the checkpoint ({before[name]} -> {now[name]}):"
        f" {_MEANING.get(name, 'the run differs from one that never stopped')}"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]
