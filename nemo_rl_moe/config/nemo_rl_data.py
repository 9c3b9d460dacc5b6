# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules of a translation from NeMo-RL for the samples and their text, and the data sets that it knows by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl_moe.config.nemo_rl_keys_run import PICTURE_ENVIRONMENTS
from nemo_rl_moe.config.nemo_rl_translation import Theirs, Translation, shown


@dataclass(frozen=True)
class KnownDataset:
    """A data set that NeMo-RL knows by a name of its own.

    Attributes:
        path: Its name on the hub.
        prompt_key: Key of the prompt, for GRPO.
        answer_key: Key of the answer, for GRPO.
        split: Its split where the configuration names none.
        other_paths: Names on the hub of splits of theirs that are data sets of their own.
        image_key: Key of a record's images; None: it has none.
        to_do: What has to be done before it can be read here; empty: nothing.
    """

    path: str
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    split: str = "train"
    other_paths: Mapping[str, str] = field(default_factory=dict)
    image_key: str | None = None
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
    "clevr-cogent": KnownDataset(
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        "problem",
        "solution",
        other_paths={name: f"MMInstruction/Clevr_CoGenT_V{name[1:]}" for name in ("valA", "valB")},
        image_key="image",
        to_do="its `solution` has the answer between <answer> and </answer>: write it alone",
    ),
    "geometry3k": KnownDataset("hiyouga/geometry3k", "problem", image_key="images"),
    "refcoco": KnownDataset(
        "jxu124/refcoco", image_key="images", to_do="it has no pictures in it: write records with `images` and `answer`"
    ),
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
        split = section.get("split") or known.split
        values[f"data.{part}.path"] = known.other_paths.get(split, known.path)
        values[f"data.{part}.split"] = known.split if split in known.other_paths else split
        if known.image_key is not None:
            values["data.image_key"] = known.image_key
        if known.to_do:
            translation.without.append(
                f"data.{part}.dataset_name: {name}: {values[f'data.{part}.path']}; {known.to_do}"
            )
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


def picture_environment(theirs: Theirs) -> str | None:
    """The environment for pictures with questions that the training data are of; None: they are none of these."""
    keys = ("data.train.env_name", "data.default.env_name", "data.train.dataset_name", "data.dataset_name")
    named = (theirs.get(key) for key in keys)
    return next((name for name in named if name in PICTURE_ENVIRONMENTS), None)


DATA_RULES = (chat_template, data)
