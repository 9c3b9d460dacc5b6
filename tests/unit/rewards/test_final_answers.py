# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gold answers in the formats of published sets, and answers of models to them."""

from typing import Any

import pytest

from nemo_rl_moe.rewards.exact import ExactReward
from nemo_rl_moe.rewards.final_answers import (
    SEVERAL,
    stated_choice,
    states_the_words,
    with_numbers_written_out,
    with_words_marked,
)
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rewards.math import MathReward

GSM8K = (
    "Each of the 8 boxes costs $3, so $8*3=$<<8*3=24>>24.\nWith 50 more crates: $24*50=<<24*50=1200>>1200.\n#### 1,200"
)
MATH = r"Since $x + 2 = 5$, not $\boxed{4}$ but $x = 3$. The answer is $\boxed{3}$."
GPQA = "Replication of DNA, in S phase"


@pytest.fixture(scope="module")
def math() -> MathReward:
    return MathReward()


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (GSM8K, r"\boxed{1200}", 1.0),
        (GSM8K, "That is 1,200 in all.\n#### 1,200", 1.0),
        (GSM8K, r"\boxed{24}", 0.0),
        (MATH, r"\boxed{3}", 1.0),
        (MATH, r"\boxed{4}", 0.0),
        ("025", r"\boxed{25}", 1.0),
        ("25", r"\boxed{025}", 1.0),
        ("025", r"\boxed{250}", 0.0),
        ("(A)", r"\boxed{A}", 1.0),
        ("A", r"\boxed{\text{(A)}}", 1.0),
        ("B", "The answer is B.", 1.0),
        ("B", "The answer is (B), as shown.", 1.0),
        ("B", "**Answer:** B", 1.0),
        ("B", "B.", 1.0),
        ("(B)", "(B)", 1.0),
        ("B", "The answer is C.", 0.0),
        ("B", "$B$ is tempting. The answer is C.", 0.0),
        ("A", "$B$ is tempting. The answer is A.", 1.0),
        ("B", r"The answer is B. No: \boxed{C}", 0.0),
        ("A", "The answer is a matter of taste.", 0.0),
        ("B", r"\boxed{A}, \boxed{B}", 0.0),
        (GPQA, rf"\boxed{{\text{{{GPQA}}}}}", 1.0),
        (GPQA, r"\boxed{\text{Replication of RNA, in S phase}}", 0.0),
        ("2", r"\boxed{1} and \boxed{2}", 0.0),
        # The choice's text behind its letter, and several letters.
        ("A", r"\boxed{\textbf{(A)}\ 12}", 1.0),
        ("A", r"$\boxed{\textbf{(A)}~12}$", 1.0),
        ("B", r"\boxed{\textbf{(A)}\ 12}", 0.0),
        ("C", r"\boxed{C. 12}", 1.0),
        ("A", r"\boxed{(A), (B)}", 0.0),
        ("A", r"\boxed{\textbf{(A) or (B)}}", 0.0),
        ("A", r"\boxed{A or B}", 0.0),
        ("A", "Answer: A, B, C, D", 0.0),
        ("A", "The answer is A or B.", 0.0),
        ("A", "**Answer:** (A) and (C)", 0.0),
        ("C", "The answer is C, not B.", 1.0),
        ("C", "The answer is C, I think.", 1.0),
        ("C", "The answer is C, and B is wrong.", 1.0),
        ("A", r"Answer: \textbf{A}", 1.0),
        ("C", "the answer is option C", 1.0),
        # Words.
        ("DACB", r"\boxed{ABCD}", 0.0),
        ("DACB", "The order is $ABCD$.", 0.0),
        ("DACB", r"\boxed{DACB}", 1.0),
        ("DACB", "The order is $DACB$.", 1.0),
        ("no", r"\boxed{on}", 0.0),
        ("Yes", r"\boxed{\text{yes}}", 1.0),
        (r"\text{Saturday}", "Saturday", 1.0),
        (r"\text{Saturday}", r"\boxed{Saturday}", 1.0),
        ("Saturday", "The answer is Saturday.", 1.0),
        ("Saturday", "The answer is Sunday.", 0.0),
        ("red and blue", r"\boxed{red} and \boxed{blue}", 1.0),
        ("xy", r"\boxed{yx}", 1.0),
        (r"\infty", r"\boxed{infinity}", 1.0),
        # Numbers.
        ("1e3", "1000", 1.0),
        ("1000", r"\boxed{1e3}", 1.0),
        ("1.5e3", r"\boxed{1500}", 1.0),
        ("1e3", r"\boxed{3e}", 0.0),
        ("0.001", "1e-3", 1.0),
        ("2e-5", r"\boxed{-5+2e}", 1.0),
        ("3 1/2", r"\boxed{3.5}", 1.0),
        ("3 1/2", r"\boxed{\frac{31}{2}}", 0.0),
        ("-3 1/2", "-7/2", 1.0),
        ("3.5", "The answer is 3 1/2.", 1.0),
        ("1/2", "The answer is 3 1/2.", 0.0),
        (r"\(3\frac{1}{2}\)", "3.5", 1.0),
        ("3.5", "$3 1/0$", 0.0),
        ("It is five.\n#### 5.", "5", 1.0),
        ("5", r"\boxed{5.}", 1.0),
        # Of an answer with its working the last box, as of a response.
        (r"We get $\boxed{3}$ so $\boxed{5}$.", r"\boxed{5}", 1.0),
        (r"We get $\boxed{3}$ so $\boxed{5}$.", r"\boxed{3,5}", 0.0),
        (r"We get $\boxed{3}$ so $\boxed{5}$.", r"\boxed{3}", 0.0),
        (r"so \boxed{1} then \boxed{2}", r"\boxed{2}", 1.0),
        (r"Not \boxed{7} but \boxed{1}, \boxed{2}", r"\boxed{1,2}", 1.0),
        ("606", "606", 1.0),
        ("606", r"so it is \boxed{606}", 1.0),
        (r"-\frac{2}{3}", "the value is $-2/3$.", 1.0),
        ("0.5", r"\boxed{\frac12}", 1.0),
        (r"\boxed{1/2}", "$0.5$", 1.0),
        ("$x=5$", r"\boxed{5}", 1.0),
        ("1,234", "The answer is 1234", 1.0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"$(3, \pi/2)$", 1.0),
        ("2^{10}", "1024", 1.0),
        # Answers of published sets: money, matrices, percent, degrees, text, choices, intervals, GSM8K's working.
        (r"\$18", r"\boxed{18}", 1.0),
        (r"\$18", r"\boxed{\$18}", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 1.0),
        (r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\[2pt]2\end{pmatrix}}", 1.0),
        (r"50\%", r"\boxed{0.5}", 1.0),
        (r"90^\circ", r"\boxed{90}", 1.0),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1.0),
        ("B", r"\boxed{B}", 1.0),
        ("[0, 1)", r"\boxed{[0,1)}", 1.0),
        ("x=5", r"\boxed{5}", 1.0),
        (r"\(18\)", r"\boxed{18}", 1.0),
        (r"\[18\]", r"\boxed{18}", 1.0),
        ("He sold 48/2 = <<48/2=24>>24, and then 24+48 = 72.\n#### 72", r"\boxed{72}", 1.0),
        # The last box, and boxes that are one answer.
        ("3", r"First I thought \boxed{2}. Wait, so it is \boxed{3}.", 1.0),
        ("3", r"First $\boxed{2}$. Wait, so it is $\boxed{3}$.", 1.0),
        ("3", r"\boxed{2 is wrong. It is \boxed{3}.", 1.0),
        ("1,2", r"So \boxed{1} and \boxed{2}.", 1.0),
        ("1,2", r"Not \boxed{7}; it is \boxed{1}, \boxed{2}", 1.0),
        # Other values.
        ("606", "607", 0.0),
        ("606", "6060", 0.0),
        ("606", "-606", 0.0),
        ("606", "606 at first, then 607", 0.0),
        ("606", r"\boxed{", 0.0),
        ("606", "no idea", 0.0),
        ("606", "", 0.0),
        ("(1, 2)", r"\boxed{(2, 1)}", 0.0),
        ("2", r"First I thought \boxed{2}. Wait, so it is \boxed{3}.", 0.0),
        (r"\$18", r"\boxed{19}", 0.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", 0.0),
        ("B", r"\boxed{C}", 0.0),
    ],
)
def test_mathematics_and_choices(math: MathReward, answer: str, response: str, reward: float) -> None:
    found = math.score(ScoringItem("f:1", "?", response, False, {"answer": answer}))
    assert found == Score(reward, is_correct=reward == 1.0)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (GSM8K, "1200", 1.0),
        (GSM8K, "24", 0.0),
        (MATH, "3", 1.0),
        (MATH, "4", 0.0),
        ("025", "25", 1.0),
        ("72.0", "72", 1.0),
        ("72", "72.", 1.0),
        ("1,000", "1000", 1.0),
        ("0.5", "0.50", 1.0),
        ("1e-7", "0.0000001", 1.0),
        ("-3", "+3", 0.0),
        ("1,0", "10", 0.0),
        ("1000", "1e3000", 0.0),
        ("(A)", "A", 1.0),
        ("B", "B.", 1.0),
        ("B", "b", 0.0),
        # A sentence is another text: `env.answer_after` says where the answer begins.
        ("B", "The answer is B.", 0.0),
        (GPQA, f"{GPQA}\n", 1.0),
        ("v1.0", "v1", 0.0),
        (r"Not \boxed{7} but \boxed{5}.", "5", 1.0),
        (r"Not \boxed{7} but \boxed{5}.", "7", 0.0),
        # Words.
        ("left", "left", 1.0),
        ("left", " left\n", 1.0),
        ("light blue", "light  blue", 1.0),
        ("4", "4", 1.0),
        ("left", "Left", 0.0),
        ("left", "left left", 0.0),
        ("light blue", "lightblue", 0.0),
        ("4", "4.0", 1.0),
        ("4", "4.1", 0.0),
        ("left", "", 0.0),
    ],
)
def test_texts_numbers_and_choices(answer: str, response: str, reward: float) -> None:
    found = ExactReward().score(ScoringItem("f:1", "?", response, False, {"answer": answer}))
    assert found == Score(reward, is_correct=reward == 1.0)


@pytest.mark.parametrize("make", [MathReward, ExactReward])
def test_no_answer_is_an_error_of_the_record(make: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.jsonl:7: the record's answer is null"):
        make().score(ScoringItem("data.jsonl:7", "?", "None", False, {"answer": None}))


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("I think so. The answer is: (D)", "D"),
        ("Answer: B\nNo, the answer is C", "C"),
        ("It is B", None),
        ("", None),
        ("Answer: A, B", SEVERAL),
    ],
)
def test_stated_choices(response: str, choice: str | None) -> None:
    assert stated_choice(response) == choice


def test_long_blank_space_is_read_once() -> None:
    """A pattern with two ways to take a space would try all pairs of places."""
    blank = " " * 400_000
    assert stated_choice(f"The answer is{blank}unknown.") is None
    assert not states_the_words(f"The answer is{blank}unknown.", "known")
    assert with_numbers_written_out(f"={blank}3{blank}.") == f"={blank}3{blank}."
    assert with_words_marked(f"${blank}{'ab ' * 100_000}") == f"${blank}{'ab ' * 100_000}"


@pytest.mark.parametrize(
    ("kind", "responses"),
    [
        ("exact", ["1,000", "1000", "1e3", "1000.0"]),
        ("exact", ["0", "-0.0"]),
        ("exact", [" light  blue", "light blue\n"]),
        ("exact", ["(B)", "B."]),
        ("math", ["\\boxed{\\frac{1}{2}}", "0.5", "the value is $1/2$."]),
        ("math", ["The answer is (C).", "**Answer:** C"]),
    ],
)
def test_equal_answers_are_equal_texts(kind: str, responses: list[str]) -> None:
    reward = ExactReward() if kind == "exact" else MathReward()
    gold = "B" if "C" in responses[-1] else "7"
    answers = {
        reward.score(ScoringItem("f:1", "?", response, False, {"answer": gold})).answer for response in responses
    }
    assert len(answers) == 1
    assert "" not in answers
    assert reward.score(ScoringItem("f:1", "?", "9", False, {"answer": gold})).answer not in answers


def test_right_answers_have_one_vote_and_several_choices_none() -> None:
    def answers(gold: str, *responses: str) -> set[str]:
        items = [ScoringItem("f:1", "?", response, False, {"answer": gold}) for response in responses]
        return {MathReward().score(item).answer for item in items}

    assert answers(r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", r"\boxed{\frac12}", r"\boxed{0.5}", r"\boxed{50\%}") == {
        r"\frac{1}{2}"
    }
    assert answers(r"2\sqrt{3}", r"\boxed{2 \sqrt{3}}", r"\boxed{\sqrt{12}}") == {r"2\sqrt{3}"}
    assert answers("A", "The answer is A or B.", "The answer is C or D.") == {""}
    large = ExactReward().score(ScoringItem("f:1", "?", "1" * 33, False, {"answer": "7"})).answer
    assert large == "1" * 33
