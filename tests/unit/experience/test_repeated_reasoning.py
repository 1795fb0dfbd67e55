"""Repeated reasoning against counts by hand, and what is no repetition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.experience.penalties import repeats

pytestmark = pytest.mark.fast


def words(first, end):
    return " ".join(f"w{number}" for number in range(first, end))


def test_an_answer_that_copies_its_reasoning_repeats_it():
    thought = words(0, 60)  # 53 runs of 8 words
    assert repeats([thought], thought)
    assert repeats([thought], f"So: {thought.upper()}.\n\nThe answer is 4.")
    assert repeats([thought], thought.replace(" ", ",  \n"))
    assert repeats([words(0, 30), words(30, 60)], thought)


def test_the_share_of_copied_runs_decides():
    """Of 53 runs 43 (81 %) are in the first 50 words, and 42 (79 %) in the first 49."""
    assert repeats([words(0, 60)], words(0, 50))
    assert not repeats([words(0, 60)], words(0, 49))
    assert repeats([words(0, 42)], words(0, 35)), "28 of 35 runs are 80 %"


def test_reasoning_that_says_everything_twice_repeats_itself():
    """Of a passage of 20 words said twice 13 of 33 runs (39 %) occur earlier, after 60 other words 13 of 93 (14 %)."""
    assert repeats([f"{words(0, 20)} {words(0, 20)}"], "4")
    assert repeats([words(0, 20), words(0, 20)], "4")
    assert repeats(["wait, no. " * 50], "4")
    assert not repeats([f"{words(100, 160)} {words(0, 20)} {words(0, 20)}"], "4")


def test_scripts_without_spaces_are_compared_by_character():
    thought = "".join(chr(0x4E00 + number) for number in range(60))
    assert repeats([thought], thought)
    assert not repeats([thought], "答案是四")


@pytest.mark.parametrize("thought", ["", "2+2=4", "yes " * 39, words(0, 39)])
def test_short_reasoning_is_no_repetition(thought):
    assert not repeats([thought], thought)


def test_an_answer_without_reasoning_repeats_nothing():
    assert not repeats([], words(0, 100))


@settings(max_examples=50, deadline=None)
@given(st.integers(40, 300), st.integers(0, 300), st.randoms())
def test_different_words_are_no_repetition(num_thought, num_said, random):
    numbers = random.sample(range(1000), num_thought + num_said)
    thought, said = (" ".join(f"w{n}" for n in part) for part in (numbers[:num_thought], numbers[num_thought:]))
    assert not repeats([thought], said)
