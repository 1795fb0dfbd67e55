"""Make `examples/assets/tiny-player`: a small chat model that plays the example games at random.

It trains a small Qwen2 with plain supervised steps on the CPU on games of a player who draws each action at random
among those that the rules allow. So the model knows how a turn is written and how the games answer, and nothing about
which action is good: that is left to reinforcement learning. Invariant: one seed gives one model; no situation that
starts an episode of validation starts a game of its training data.

    uv run --extra cpu python tools/make_tiny_player.py --output examples/assets/tiny-player --steps 130
"""

import argparse
import logging
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from make_tiny_chat_model import Recipe, train_on
from tiny_models import (
    CHAT_TEMPLATE,
    NUM_RESERVED_TOKENS,
    PAD_TOKEN,
    TURN_END,
    TURN_START,
    TinyShape,
    make_tiny_model,
    save_tiny_checkpoint,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl.config.schema.games import SlidingPuzzleBoard
from nemo_rl.environments.games.blackjack import BlackjackGame
from nemo_rl.environments.games.sliding_puzzle import SlidingPuzzleGame
from nemo_rl.environments.games.text_game import TextGame

logger = logging.getLogger("make_tiny_player")

WORD = r"</?\w+>| ?[A-Za-z]+|\d+|\s|[^\w\s]|_"
"""A token: a tag, a word with the space before it, a number, one other character."""
ACTIONS = {"puzzle": ("up", "down", "left", "right"), "blackjack": ("hit", "stand")}
MAX_MOVES = 8
NUM_TURNS = 5
"""Turns of a game in the training data."""
NUM_TEXTS = 300
"""Games whose words become tokens."""
SHAPE = TinyShape(hidden_size=96, intermediate_size=384, num_layers=3, num_heads=3, num_kv_heads=1, max_positions=1024)


def make_games() -> dict[str, TextGame]:
    """Return the games of the example configurations."""
    board = SlidingPuzzleBoard.build(size=3, shuffle_moves=6, min_shuffle_moves=1)
    return {"puzzle": SlidingPuzzleGame(board, MAX_MOVES), "blackjack": BlackjackGame()}


def random_game(name: str, game: TextGame, rng: random.Random) -> tuple[str, str]:
    """Play the first turns of a game at random; return the first message, and what follows it."""
    seed = rng.randrange(2**31)
    start = game.start(seed, "train", seed)
    state, words = start.state, []
    for number in range(NUM_TURNS):
        options = [(action, game.play(state, action)) for action in ACTIONS[name]]
        action, turn = rng.choice([option for option in options if option[1].is_valid])
        words.append(f"<action>{action}</action>")
        if turn.result is not None or number == NUM_TURNS - 1:
            break
        words.append(f"{TURN_END}\n{TURN_START}user\n{turn.text}{TURN_END}\n{TURN_START}assistant\n")
        state = turn.state
    return start.text, "".join(words)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte and for each word of `texts`; every string encodes exactly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [PAD_TOKEN, TURN_START, TURN_END]
    specials += [f"<|reserved_{index}|>" for index in range(NUM_RESERVED_TOKENS)]
    plain = sorted({word for text in texts for word in re.findall(WORD, text) if len(word) > 1})
    words = [word.replace(" ", "Ġ") for word in plain]
    pieces = [(symbol, -10.0) for symbol in alphabet + specials] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, None, False))
    split = pre_tokenizers.Split(Regex(WORD), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        padding_side="right",
        model_max_length=SHAPE.max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=130, help="optimizer steps")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Train on random games and store the model in bfloat16."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(arguments.seed, arguments.steps, 0, batch_size=24)
    games, rng = make_games(), random.Random(recipe.seed)
    played = [random_game(name, game, rng) for name, game in games.items() for _ in range(NUM_TEXTS)]
    tokenizer = make_tokenizer([f"{start} {rest} user assistant" for start, rest in played])
    vocab_size = -(-len(tokenizer) // 8) * 8
    model = make_tiny_model("qwen2", TinyShape(**{**vars(SHAPE), "vocab_size": vocab_size}), seed=recipe.seed)
    logger.info("%d tokens, %d parameters", len(tokenizer), model.num_parameters())
    started = time.monotonic()

    def draw(step: int, generator: random.Random) -> list[tuple[str, str]]:
        names = generator.choices(list(games), weights=(3, 1), k=recipe.batch_size)
        return [random_game(name, games[name], generator) for name in names]

    train_on(model, tokenizer, recipe, draw)
    logger.info("trained in %.0f s", time.monotonic() - started)
    save_tiny_checkpoint(arguments.output, model.to(torch.bfloat16), tokenizer)


if __name__ == "__main__":
    main()
