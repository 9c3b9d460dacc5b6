# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What refits send of a model with adapters to an engine that has had its weights."""

from pathlib import Path

import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.weight_sync.fingerprints import compare_fingerprints
from tests.functional.separate_engines import configuration, started
from tests.support.tiny_model import tiny_batch

pytestmark = pytest.mark.shared_ray


def test_weights_without_an_adapter_are_sent_once(tmp_path: Path) -> None:
    scale = "rank: 4, alpha: 8, use_rslora: false"
    lora = f"{{{scale}, targets: [q_proj], dropout: 0.0, experts: none, init: kaiming, path: null}}"
    with started(configuration(tmp_path, 2, f"policy.lora={lora}")) as (policy, engine, _):
        sizes = []
        for whole in (False, False, True, False):
            sizes.append(refit(engine, policy, whole=whole))
            expected = policy.start_fingerprints("float32")()
            for found in engine.weight_fingerprints("float32"):
                compared = compare_fingerprints(found, expected)
                assert (compared.share_compared, compared.different) == (1.0, [])
            policy.train(tiny_batch(len(sizes), vocabulary_size=45), sft_loss)
    first, second, again, last = sizes
    assert first == again > 8 * second > 0
    assert second == last
