"""The model of the example games: it writes what the rules allow, with the tokenizer that a run loads."""

import random
from pathlib import Path

import pytest
import torch
from make_tiny_player import allowed_share, make_games, weak_game
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.config import GRPOMasterConfig, load_config

EXAMPLES = Path(__file__).parents[4] / "examples"
FOLDER = EXAMPLES / "assets/tiny-player"
NUM_GAMES = 20

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_words_are_tokens_and_every_text_encodes_exactly(tokenizer):
    assert len(tokenizer("<action>down</action>")["input_ids"]) == 3
    for name, game in make_games().items():
        played = weak_game(name, game, random.Random(3))
        for text in (played.prompt, played.text, "Größe: 37 tiles"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", ["puzzle", "blackjack"])
def test_nearly_every_action_is_allowed(tokenizer, name):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    rng, game = random.Random(4), make_games()[name]
    games = [weak_game(name, game, rng) for _ in range(NUM_GAMES)]
    assert allowed_share(model, tokenizer, games) > 0.85


def test_invalid_actions_use_up_the_moves_of_blackjack_before_the_sequence_is_full(tokenizer):
    """Else a player is better off with an episode that is cut off, and has reward 0, than with a hand that it plays."""
    config = load_config(EXAMPLES / "configs/grpo_blackjack_cpu.yaml", schema=GRPOMasterConfig)
    game = make_games()["blackjack"]
    for seed in range(100):
        start = game.start(seed, "validation", seed)
        invalid = "up" * config.policy.generation.max_new_tokens
        answer = game.play(start.state, invalid)
        turns = [{"role": "assistant", "content": invalid}, {"role": "user", "content": answer.text}]
        chat = [{"role": "user", "content": start.text}, *turns * config.env["blackjack"].max_moves]
        assert len(tokenizer.apply_chat_template(chat)["input_ids"]) <= config.policy.max_total_sequence_length
