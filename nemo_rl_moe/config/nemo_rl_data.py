# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that translate NeMo-RL's data and chat template, and the data sets that NeMo-RL knows by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_rl_moe.config.nemo_rl_translation import IMAGE_ENVIRONMENTS, Theirs, Translation, shown

_OF_PAIRS = ("dpo", "rm")
Form = Literal["answers", "conversations", "pairs"]
_WANTED: dict[str, tuple[Form, str]] = {
    "sft": ("conversations", "its records are pairs: name the responses to train on as data.completion_key"),
    **dict.fromkeys(_OF_PAIRS, ("pairs", "its records are no pairs: write `chosen` and `rejected`")),
}
_ANSWERS: tuple[Form, str] = ("answers", "its records have no question with an answer under keys of their own")
"""Form of the records that an algorithm reads, and the advice for records of another form: `_WANTED` for algorithms of
samples and pairs, `_ANSWERS` for other algorithms."""
_NAMED = {
    "sft": {"chat_key": "messages_key", "system_key": "system_key"},
    **{algorithm: {name: name for name in ("prompt_key", "chosen_key", "rejected_key")} for algorithm in _OF_PAIRS},
}
"""Algorithm -> NeMo-RL's setting that names a key of the records -> the setting here."""
_IN_FILES = "ResponseDataset"
"""NeMo-RL's name for a file of questions with answers. Their keys are `input` and `output` unless the configuration
names others."""
_RANKED = "PreferenceDataset"


@dataclass(frozen=True)
class KnownDataset:
    """A data set that NeMo-RL knows by name.

    Attributes:
        path: Name on the hub.
        split: Split that is read if the configuration names none.
        other_paths: Split -> name on the hub, for splits that are separate data sets there.
        system_key: Key of the text of the system turn.
        to_do: Work that is needed before the data set can be read here. Empty: none.
    """

    path: str
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    split: str = "train"
    other_paths: Mapping[str, str] = field(default_factory=dict)
    image_key: str | None = None
    system_key: str | None = None
    form: Form = "answers"
    to_do: str = ""

    @property
    def has_answers(self) -> bool:
        """Whether the records are questions with an answer, and can be trained on without changes."""
        return self.form == "answers" and not self.to_do and self.image_key is None


DATASETS = {
    "OpenMathInstruct-2": KnownDataset("nvidia/OpenMathInstruct-2", "problem", "expected_answer", "train_1M"),
    "DeepScaler": KnownDataset("agentica-org/DeepScaleR-Preview-Dataset", "problem"),
    "DAPOMath17K": KnownDataset("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth"),
    "DAPOMathAIME2024": KnownDataset("BytedTsinghua-SIA/AIME-2024", "prompt", "reward_model.ground_truth"),
    "AIME2024": KnownDataset("HuggingFaceH4/aime_2024", "problem"),
    "squad": KnownDataset("rajpurkar/squad", "question", "answers.text.0", system_key="context"),
    "tulu3_sft_mixture": KnownDataset("allenai/tulu-3-sft-mixture", form="conversations"),
    "HelpSteer3": KnownDataset("nvidia/HelpSteer3", "context", form="pairs"),
    "gsm8k": KnownDataset("openai/gsm8k", "question"),
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
        "jxu124/refcoco", image_key="images", to_do="it has no images in it: write records with `images` and `answer`"
    ),
    "Tulu3Preference": KnownDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture", form="pairs"),
}
"""NeMo-RL's name -> data set."""


def one_set_of_samples(theirs: Mapping[str, Any], translation: Translation) -> Mapping[str, Any]:
    """Return the configuration with only the first of several sets of samples, for training and for validation."""
    samples = theirs.get("data")
    if not isinstance(samples, Mapping):
        return theirs
    chosen = dict(samples)
    for part in ("train", "validation"):
        if isinstance(sets := samples.get(part), list):
            translation.without += [f"data.{part}: {shown(other)}: only the first set is read" for other in sets[1:]]
            chosen[part] = sets[0] if sets else None
    return {**theirs, "data": chosen}


def data(theirs: Theirs, translation: Translation) -> None:
    """Translate the samples of training and validation, and the settings that name their keys."""
    sections = theirs.tree.get("data", {})
    for part in ("train", "validation"):
        if isinstance(sections.get(part), Mapping):
            _samples(theirs, translation, part)
        elif part == "validation":
            translation.values["data.validation"] = theirs.get("data.validation")
    if translation.generates:
        translation.values["data.prompt_template"] = None
        for key in ("data.train.prompt_file", "data.default.prompt_file"):
            if (file := theirs.get(key)) is not None:
                translation.without.append(
                    f"{key}: {file}: put its text into data.prompt_template, with {{prompt}} for {{}}"
                )
                break


def _samples(theirs: Theirs, translation: Translation, part: str) -> None:
    values = translation.values
    known = _dataset(theirs, translation, part)
    split = _of(theirs, part, "split") or known.split
    values[f"data.{part}.path"] = known.other_paths.get(split, known.path)
    values[f"data.{part}.split"] = known.split if split in known.other_paths else split
    if known.image_key is not None:
        values["data.image_key"] = known.image_key
    if translation.generates:
        values[f"data.{part}.num_items"] = None
    response = "data.completion_key" if translation.algorithm == "sft" else "data.answer_key"
    named = _of(theirs, part, "input_key"), _of(theirs, part, "output_key")
    if translation.generates or (translation.algorithm == "sft" and (any(named) or known.has_answers)):
        keys = (
            named[0] or known.prompt_key,
            named[1] or known.answer_key,
        )
        if part == "train":
            values |= {"data.prompt_key": keys[0], response: keys[1]}
        elif keys != (values.get("data.prompt_key"), values.get(response)):
            translation.without.append(
                f"data.{part}: keys {keys[0]} and {keys[1]}: the keys of the training data are used"
            )
        if known.system_key is not None and translation.generates:
            translation.without.append(f"data.{part}: {known.system_key}: a system turn in NeMo-RL, not read here")
        elif known.system_key is not None:
            values.setdefault("data.system_key", known.system_key)
    for theirs_key, ours in _NAMED.get(translation.algorithm, {}).items():
        if (key := _of(theirs, part, theirs_key)) is None:
            continue
        if values.setdefault(f"data.{ours}", key) != key:
            translation.without.append(f"data.{part}.{theirs_key}: {key}: the key of the training data is used")


def _dataset(theirs: Theirs, translation: Translation, part: str) -> KnownDataset:
    """Return the description of a set of samples, and report obstacles to reading it."""
    wanted, to_do = _WANTED.get(translation.algorithm, _ANSWERS)
    path = _of(theirs, part, "data_path")
    name = _of(theirs, part, "dataset_name")
    subject = f"data.{part}.dataset_name: {name}"
    if path is not None:
        if name == _RANKED and translation.algorithm in _OF_PAIRS:
            translation.obstacles.append(
                f"{subject}: its records rank `completions`: write `prompt`, `chosen` and `rejected`; where the better"
                " one always stands first, set data.prompt_key=context, data.chosen_key=completions.0.completion and"
                " data.rejected_key=completions.1.completion"
            )
        else:
            translation.changed.append(f"{subject}: records are read by their form: docs/data.md")
        if name == _IN_FILES:
            return KnownDataset(path, "input", "output", form=wanted)
        return KnownDataset(path, form=wanted)
    if name not in DATASETS:
        translation.obstacles.append(
            f"{subject}: a data set that only NeMo-RL knows by this name; name its file as data.{part}.path"
        )
        return KnownDataset(str(name), form=wanted)
    known = DATASETS[name]
    if translation.algorithm == "sft" and known.has_answers:
        return known
    if known.form != wanted or known.to_do:
        translation.obstacles.append(f"{subject}: {known.path}; {to_do if known.form != wanted else known.to_do}")
    return known


def _of(theirs: Theirs, part: str, name: str) -> Any:
    """Return the setting `name` of one set of samples or, if it has none, the setting for all sets."""
    return theirs.first(f"data.{part}.{name}", f"data.default.{name}")


_PASSED_ON = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""NeMo-RL's chat template if the configuration has `chat_template: null`."""


def chat_template(theirs: Theirs, translation: Translation) -> None:
    """Translate the chat template, which must be a file here, and its arguments."""
    if arguments := theirs.get("policy.tokenizer.chat_template_kwargs"):
        translation.values["data.chat_template_kwargs"] = {**arguments}
    key = "policy.tokenizer.chat_template"
    if not theirs.has(key):
        return
    template = theirs.get(key)
    if template is None:
        translation.obstacles.append(
            f"{key}: null: contents one after the other, as {_PASSED_ON} has them; write it into a file, and name that"
        )
    elif template.lower() == "default":
        translation.values[key] = None
    elif "{" in template:
        translation.obstacles.append(f"{key}: {shown(template)}: write it into a file, and name that")
    else:
        translation.values[key] = template


def environment_of(theirs: Theirs) -> str:
    """Return the name of the environment that scores the responses of the training data."""
    named = _of(theirs, "train", "env_name")
    if named is None:
        keys = ("data.train.dataset_name", "data.default.dataset_name", "data.dataset_name")
        named = next((name for key in keys if (name := theirs.get(key)) in IMAGE_ENVIRONMENTS), "math")
    return str(named)


DATA_RULES = (chat_template, data)
