# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequence classifiers of transformers with one label, which score a sequence: their `config.json`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLASSIFIER = "ForSequenceClassification"


def is_classifier_config(config_json: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is that of a sequence classifier, with any number of labels."""
    return _architecture(config_json).endswith(_CLASSIFIER)


def require_token_predictor(config_json: Mapping[str, Any], key: str, model_name: str) -> None:
    """Raise a `ConfigurationError` if a model is a sequence classifier, which predicts no tokens.

    A checkpoint of a reward model still holds the output layer of its initial model, so its tensors do not show this.

    Args:
        key: Setting with the model's name.
    """
    if is_classifier_config(config_json):
        raise ConfigurationError(
            f"{key}: got {model_name}, {_architecture(config_json)}, expected a model that predicts tokens; a reward"
            " model is used as reward_model.model_name, and trained further by nemo-rl-moe rm"
        )


def classifier_problem(config_json: Mapping[str, Any], hf_config: Any) -> str | None:
    """Return what a model is, and that it should be a sequence classifier with one label. None if it is one."""
    architecture, is_classifier = _architecture(config_json), is_classifier_config(config_json)
    if is_classifier and hf_config.num_labels == 1:
        return None
    found = f"{architecture} with {hf_config.num_labels} labels" if is_classifier else architecture
    return f"{found}, expected a {_CLASSIFIER} with one label"


def scored_pad_token_id(hf_config: Any, tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the padding token of a classifier: its model's, otherwise the tokenizer's, if any."""
    found: int | None = hf_config.pad_token_id
    return tokenizer.pad_token_id if found is None else found


def _architecture(config_json: Mapping[str, Any]) -> str:
    return str((config_json.get("architectures") or ["a model without a name"])[0])


def as_classifier(config_json: Mapping[str, Any], model_name: str, pad_token_id: int | None) -> dict[str, Any]:
    """Return the `config.json` of a sequence classifier with one label and the layers of this model.

    Args:
        model_name: Name of the model in the error message.
        pad_token_id: Padding token. A classifier takes the score of a sequence at its last token that is not padding,
            and reads a batch only with a padding token.

    Raises:
        ConfigurationError: transformers has no sequence classifier of this `model_type`.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    model_type = config_json.get("model_type")
    if model_type not in CLASSIFIERS:
        raise ConfigurationError(
            f"policy.model_name: got {model_name} of model_type {model_type!r}, expected a model of which transformers"
            f" has a {_CLASSIFIER}, the form of a reward model"
        )
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**config_json, "architectures": [CLASSIFIERS[model_type]], **labels, "pad_token_id": pad_token_id}
