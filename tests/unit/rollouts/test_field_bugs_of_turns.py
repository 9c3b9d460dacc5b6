# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Bugs that other frameworks had with trajectories of several turns, as scripts.

Each fails on its planted bug. The numbers are those of the project's list; those that concern an endpoint alone are in
`agents/test_agent_conversations.py`, those of routes in `test_field_bugs_of_routes.py`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses import policy_gradient
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.data import continuation
from nemo_rl_moe.data.continuation import SampledTurn
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.distributed.batch import per_token
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.models.images import IS_IMAGE, ModelImage, image_inputs
from nemo_rl_moe.models.interfaces import LossInputs
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.growing_sequence import GrowingSequence
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED
from tests.support.chat_templates import make_byte_tokenizer
from tests.support.conversations import ALL, LOGPROB, WEIGHT_VERSION, Family, script_of, scripted_session
from tests.support.scripted_rollouts import red_on
from tests.support.tool_templates import FAMILIES
from tests.unit.algorithms.policy_loss_reference import config_of
from tests.unit.rollouts.test_messages import ASKED, CHATML, RIGHT, THOUGHT, USER, texts_of

Patch = pytest.MonkeyPatch
THINKING = ALL["THINKING"]


def renders_earlier_turns_again(patch: Patch) -> None:
    """The sequence goes on although the template has dropped the thinking."""
    patch.setattr(continuation, "require_unchanged", lambda *arguments: None)


def trains_what_is_repeated(patch: Patch) -> None:
    right = GrowingSequence.__init__

    def begin(self: GrowingSequence, token_ids: Sequence[int]) -> None:
        right(self, token_ids)
        self._versions = [0] * len(token_ids)

    patch.setattr(GrowingSequence, "__init__", begin)


@red_on(renders_earlier_turns_again, trains_what_is_repeated)
async def test_t02_thinking_that_the_template_drops_is_trained_on_where_it_was_sampled() -> None:
    """Another sequence begins with the rendering that the model will read when it is used (verl#6854)."""
    requests: list[list[int]] = []
    session = scripted_session(THINKING, ASKED, [THOUGHT, "second<|end|>"], requests=requests)
    await session.generate()
    session.append_message(USER)
    await session.generate()
    found = session.finish(RIGHT)
    whole = [*ASKED, {"role": "assistant", "content": THOUGHT.removesuffix("<|end|>")}, USER]
    assert requests == [THINKING.encode(THINKING.render(messages, None)) for messages in (ASKED, whole)]
    assert [trained for _, trained in texts_of(THINKING, found)] == [THOUGHT, "second<|end|>"]


def knows_one_end_token(patch: Patch) -> None:
    def end_token_id(turn: SampledTurn) -> int | None:
        return turn.token_ids[-1] if turn.token_ids[-1] == turn.stop_token_ids[0] else None

    patch.setattr(SampledTurn, "end_token_id", property(end_token_id))


@red_on(knows_one_end_token)
async def test_t05_any_of_several_end_tokens_ends_a_turn_once() -> None:
    """As where `eos_token_id` is a list: the end is trained on, is no part of the text, and stands there once."""
    published = FAMILIES["Llama 3.1"]
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    more_special = [each for each in (*published.special_tokens, *ends) if each != published.end_token]
    family = Family(make_byte_tokenizer(published.template, more_special=more_special, eos_token="<|eot_id|>"), ends)
    whole = family.render([*ASKED, {"role": "assistant", "content": "first"}, USER], None)
    for end in ends:
        requests: list[list[int]] = []
        session = scripted_session(family, ASKED, [f"first{end}", "second<|eot_id|>"], requests=requests)
        turn = await session.generate()
        assert turn.text == "first"
        session.append_message(USER)
        await session.generate()
        trained = [trained for _, trained in texts_of(family, session.finish(RIGHT))]
        assert "".join(trained) == f"first{end}second<|eot_id|>"
        assert family.tokenizer.decode(requests[1]) == whole


def trains_on_observations(patch: Patch) -> None:
    right = GrowingSequence.add_given

    def add(self: GrowingSequence, token_ids: Sequence[int]) -> None:
        right(self, token_ids)
        self._versions = [0] * len(self)

    patch.setattr(GrowingSequence, "add_given", add)


def lets_the_environment_speak_for_the_model(patch: Patch) -> None:
    patch.setattr(continuation, "ANSWERING_ROLES", (*continuation.ANSWERING_ROLES, "assistant"))


@red_on(trains_on_observations, lets_the_environment_speak_for_the_model)
async def test_t10_nothing_but_what_was_sampled_is_trained_on() -> None:
    """No end token that the framework appends (SkyRL#758), and no turn that is made up for the model (Gym#2254)."""
    session = scripted_session(CHATML, ASKED, ["cut", "second<|im_end|>"])
    await session.generate()
    with contextlib.suppress(RecordError):
        session.append_message({"role": "assistant", "content": "made up"})
    assert [message["content"] for message in session.messages] == ["q", "cut"]
    session.append_message(USER)
    await session.generate()
    found = session.finish(RIGHT)
    assert texts_of(CHATML, found)[0][1] == "cutsecond<|im_end|>"
    (sequence,) = found.sequences
    assert (sequence.logprobs == np.where(sequence.loss_mask, LOGPROB, 0)).all()
    assert (sequence.weight_versions == np.where(sequence.loss_mask, WEIGHT_VERSION, NOT_SAMPLED)).all()


def compares_whole_sequences(patch: Patch) -> None:
    def ratio(new: Tensor, old: Tensor, mask: Tensor, *, of_sequences: bool) -> Tensor:
        return (new - old).mean(1, keepdim=True).exp().expand_as(new)

    patch.setattr(policy_gradient, "probability_ratio", ratio)
    patch.setattr(policy_gradient, "_valid", lambda values, mask: values)


@red_on(trains_on_observations, compares_whole_sequences)
async def test_t11_observations_have_no_ratio() -> None:
    """Their log-probability is 0 in the batch, and below 0 by the model: that is no ratio of e^-1 (Flash-RL#19)."""
    session = scripted_session(CHATML, ASKED, ["first<|im_end|>", "second<|im_end|>"])
    await session.generate()
    session.append_message(USER)
    await session.generate()
    batch = training_batch([session.finish(RIGHT)], torch.tensor([[2.0]]), 0, leave_out_truncated=False)
    mask = batch.token_mask[:, 1:]
    logprobs = torch.where(mask, LOGPROB, -1.0).requires_grad_()
    columns = {name: column.of_targets() for name, column in batch.columns.items()}
    for of_sequences in (False, True):
        config = config_of(
            sequence_level_importance_ratios=of_sequences,
            importance_sampling_correction="truncated",
            importance_sampling_level="sequence" if of_sequences else "token",
        )
        loss = PolicyGradientLoss(config, prev_is_current=False, ratio_to_generation=True)
        prev = columns | {"prev_logprobs": per_token(logprobs.detach())}
        found = loss(LossInputs(logprobs, mask, int(mask.sum()), 1, None, prev)).loss
        torch.testing.assert_close(found.detach(), torch.tensor(-2.0))
        (gradient,) = torch.autograd.grad(found, logprobs)
        assert torch.equal(gradient != 0, mask)


def tokenizes_again(patch: Patch) -> None:
    right = Session._request

    def request(self: Session, token_ids: Sequence[int], room: int, seed: int) -> GenerationRequest:
        again = tuple(self.encode(self.decode(token_ids)))
        return replace(right(self, again, room, seed), token_ids=again)

    patch.setattr(Session, "_request", request)


@red_on(tokenizes_again)
async def test_t16_tokens_of_images_are_expanded_once() -> None:
    """The second request has the ids of the first, and its images: no text becomes tokens again (sglang#26555)."""
    (image_token,) = CHATML.encode("#")
    images = [ModelImage(np.full((2, 2, 3), value, dtype=np.uint8)) for value in range(2)]
    prompt_ids = [*CHATML.encode("a"), *[image_token] * 4, *CHATML.encode("b"), *[image_token] * 4]
    inputs = image_inputs(images, np.array(prompt_ids) == image_token)

    def encode(text: str) -> list[int]:
        """As a processor of images does, which finds one token in a text for each image."""
        return [id_ for token in CHATML.encode(text) for id_ in [token] * (4 if token == image_token else 1)]

    scripted = scripted_session(CHATML, ASKED, ["first<|im_end|>", "second<|im_end|>"])
    prompt = replace(scripted.prompt, token_ids=tuple(prompt_ids))
    session = replace(scripted, prompt=prompt, encode=encode, model_inputs=inputs)
    requests: list[GenerationRequest] = []
    submit = script_of(session).answer

    async def noted(request: GenerationRequest) -> GeneratedSequence:
        requests.append(request)
        return await submit(request)

    script_of(session).answer = noted
    turn = await session.generate()
    session.append_text("more")
    await session.generate()
    found = session.finish(RIGHT)
    first, second = (list(request.token_ids) for request in requests)
    assert first == prompt_ids
    assert second == [*first, *turn.token_ids, *CHATML.encode("more")]
    assert [request.model_inputs for request in requests] == [inputs, inputs]
    assert [image.digest for image in found.images] == [image.digest for image in images]
    batch = training_batch([found], torch.ones(1, 1), 0, leave_out_truncated=False)
    assert batch.columns[IS_IMAGE].values[0].nonzero().flatten().tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
