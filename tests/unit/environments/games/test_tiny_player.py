"""The model of the example games: it writes what the rules allow, with the tokenizer that a run loads."""

import random
from pathlib import Path

import pytest
import torch
from make_tiny_player import allowed_share, make_games, random_game
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[4] / "examples/assets/tiny-player"
NUM_GAMES = 20

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_words_are_tokens_and_every_text_encodes_exactly(tokenizer):
    assert len(tokenizer("<action>down</action>")["input_ids"]) == 3
    for name, game in make_games().items():
        played = random_game(name, game, random.Random(3))
        for text in (played.prompt, played.text, "Größe: 37 tiles"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", ["puzzle", "blackjack"])
def test_nearly_every_action_is_allowed(tokenizer, name):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    rng, game = random.Random(4), make_games()[name]
    games = [random_game(name, game, rng) for _ in range(NUM_GAMES)]
    assert allowed_share(model, tokenizer, games) > 0.85
