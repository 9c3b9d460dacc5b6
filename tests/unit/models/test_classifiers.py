# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `config.json` of reward models."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.classifiers import as_classifier, classifier_problem, require_token_predictor
from nemo_rl_moe.models.hf_files import load_hf_config

MODEL = Path(__file__).resolve().parents[3] / "examples/assets/tiny_qwen3_moe"


def config_json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
    return found


def problem_of(content: dict[str, Any], folder: Path) -> str | None:
    (folder / "config.json").write_text(json.dumps(content))
    return classifier_problem(content, load_hf_config(str(folder)))


def test_a_model_becomes_a_classifier_with_one_label(tmp_path: Path) -> None:
    before = config_json()
    assert problem_of(before, tmp_path) == "Qwen3MoeForCausalLM, expected a ForSequenceClassification with one label"
    after = as_classifier(before, "m", 7)
    assert problem_of(after, tmp_path) is None
    assert load_hf_config(str(tmp_path)).pad_token_id == 7
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"architectures", "id2label", "label2id", "pad_token_id"}
    assert as_classifier(after, "m", 7) == after


def test_other_classifiers_are_no_reward_models(tmp_path: Path) -> None:
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    content = {**config_json(), "architectures": ["Qwen3MoeForSequenceClassification"], **labels}
    assert str(problem_of(content, tmp_path)).startswith("Qwen3MoeForSequenceClassification with 3 labels, expected")
    assert str(problem_of({**config_json(), "architectures": None}, tmp_path)).startswith("a model without a name, ")


def test_a_family_without_a_classifier_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got m of model_type 'qwen3_vl_moe', expected a model of which"):
        as_classifier({"model_type": "qwen3_vl_moe"}, "m", 0)


def test_a_classifier_predicts_no_tokens() -> None:
    require_token_predictor(config_json(), "policy.model_name", "m")
    require_token_predictor({**config_json(), "architectures": None}, "policy.model_name", "m")
    with pytest.raises(ConfigurationError) as caught:
        require_token_predictor(as_classifier(config_json(), "m", 0), "policy.model_name", "m")
    (line,) = caught.value.problems
    assert line.startswith("policy.model_name: got m, Qwen3MoeForSequenceClassification, expected a model that ")
