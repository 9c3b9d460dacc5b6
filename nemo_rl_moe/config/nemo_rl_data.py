# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of a translation from NeMo-RL for the samples and their text, and the data sets that it knows by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_moe.config.nemo_rl_translation import Theirs, Translation, shown


@dataclass(frozen=True)
class KnownDataset:
    """A data set that NeMo-RL knows by a name of its own.

    Attributes:
        path: Its name on the hub.
        prompt_key: Key of the prompt, for GRPO.
        answer_key: Key of the answer, for GRPO.
        split: Its split where the configuration names none.
        to_do: What has to be done before it can be read here; empty: nothing.
    """

    path: str
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    split: str = "train"
    to_do: str = ""


DATASETS = {
    "OpenMathInstruct-2": KnownDataset("nvidia/OpenMathInstruct-2", "problem", "expected_answer", "train_1M"),
    "DeepScaler": KnownDataset("agentica-org/DeepScaleR-Preview-Dataset", "problem"),
    "DAPOMath17K": KnownDataset("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth"),
    "DAPOMathAIME2024": KnownDataset("BytedTsinghua-SIA/AIME-2024", "prompt", "reward_model.ground_truth"),
    "AIME2024": KnownDataset("HuggingFaceH4/aime_2024", "problem"),
    "squad": KnownDataset("rajpurkar/squad", to_do="its records are no conversations: write them as `messages`"),
    "tulu3_sft_mixture": KnownDataset("allenai/tulu-3-sft-mixture"),
    "HelpSteer3": KnownDataset("nvidia/HelpSteer3", to_do="its records are no pairs: write `chosen` and `rejected`"),
    "Tulu3Preference": KnownDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture"),
}
"""By their name."""


def data(theirs: Theirs, translation: Translation) -> None:
    """Both sets of samples, and the names of their keys."""
    values = translation.values
    for part in ("train", "validation"):
        section = theirs.get(f"data.{part}")
        if isinstance(section, list):
            translation.without += [f"data.{part}: {shown(other)}: one set of samples" for other in section[1:]]
            section = section[0]
        if not isinstance(section, Mapping):
            if part == "validation":
                values["data.validation"] = None
            continue
        section = {**theirs.get("data.default", {}), **section}
        name = section.get("dataset_name")
        path = section.get("data_path")
        known = KnownDataset(path or str(name)) if path or name not in DATASETS else DATASETS[name]
        values[f"data.{part}.path"] = known.path
        values[f"data.{part}.split"] = section.get("split") or known.split
        if known.to_do:
            translation.without.append(f"data.{part}.dataset_name: {name}: {known.path}; {known.to_do}")
        elif path is None and name not in DATASETS:
            translation.without.append(f"data.{part}.dataset_name: {name}: a data set of theirs; name its file")
        if translation.algorithm == "grpo":
            values[f"data.{part}.num_items"] = None
            keys = section.get("input_key", known.prompt_key), section.get("output_key", known.answer_key)
            if part == "train":
                values |= {"data.prompt_key": keys[0], "data.answer_key": keys[1]}
            elif keys != (values["data.prompt_key"], values["data.answer_key"]):
                translation.without.append(
                    f"data.{part}: keys {keys[0]} and {keys[1]}: those of the training data hold"
                )
    if translation.algorithm == "grpo":
        values["data.prompt_template"] = None
        if (file := theirs.get("data.default.prompt_file")) is not None:
            translation.without.append(
                f"data.default.prompt_file: {file}: put its text into data.prompt_template, {{prompt}} in place of {{}}"
            )


def chat_template(theirs: Theirs, translation: Translation) -> None:
    """The chat template, which is a file here, and what it is called with."""
    if arguments := theirs.get("policy.tokenizer.chat_template_kwargs"):
        translation.values["data.chat_template_kwargs"] = {**arguments}
    template = theirs.get("policy.tokenizer.chat_template")
    if template is None:
        return
    if "{" in template:
        translation.without.append(
            f"policy.tokenizer.chat_template: {shown(template)}: write it into a file, and name that"
        )
    else:
        translation.values["policy.tokenizer.chat_template"] = template


DATA_RULES = (chat_template, data)
