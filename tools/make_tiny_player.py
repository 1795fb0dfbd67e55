"""Make `examples/assets/tiny-player`: a small chat model that plays the example games badly.

It trains a small Qwen3 with plain supervised steps on the CPU on games of a weak player: a quarter of the actions are
the best ones, the others are drawn at random among those that the rules allow. So the model knows how a turn is written
and how the games answer, and it has seen good actions without preferring them much: that is left to reinforcement
learning. Invariant: one seed gives one model. No situation that starts an episode of validation starts a game of its
training data, and where a board of validation occurs later, the action is random.

    uv run --extra cpu python tools/make_tiny_player.py --output examples/assets/tiny-player
"""

import argparse
import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from make_tiny_chat_model import Recipe, prompt_ids, train_on
from tiny_models import (
    CHAT_TEMPLATE,
    PAD_TOKEN,
    TURN_END,
    TURN_START,
    TinyArch,
    TinyShape,
    make_char_tokenizer,
    make_tiny_model,
    save_tiny_checkpoint,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from nemo_rl.config.schema.kits import SlidingPuzzleBoard
from nemo_rl.kits.games.blackjack import BlackjackGame, Hands, hand_value, optimal_policy
from nemo_rl.kits.games.sliding_puzzle import Grid, SlidingPuzzleGame, is_held_out, solution_lengths
from nemo_rl.kits.games.text_game import GameTurn, TextGame

logger = logging.getLogger("make_tiny_player")

WORD = r"<environment>\n|\n</environment>|</?\w+>|(?:user|assistant)\n| ?[A-Za-z]+| ?\d+| ?_|\s|[^\w\s]"
"""A token: a tag with its line break, a word, number or empty cell with the space before it, one other character."""
ACTIONS = {"puzzle": ("up", "down", "left", "right"), "blackjack": ("hit", "stand")}
MAX_MOVES = 6
SHUFFLE_MOVES = 8
"""Twice as many as in the example configuration: from few boards the player would learn the boards by heart."""
FIRST_TURNS = 3
"""Turns of the games of the first two thirds of the steps, which are cheap; then up to `MAX_MOVES`."""
SKILL = 0.25
"""Share of the best actions in the training data; all others are random."""
NUM_TEXTS = 300
"""Games whose words become tokens."""
NUM_MEASURED = 50
"""Games in which the finished model is measured."""
ARCH: TinyArch = "qwen3"
"""transformers loads the stored tokenizer of this one; for qwen2 it makes another from the vocabulary."""
SHAPE = TinyShape(
    hidden_size=96,
    intermediate_size=192,
    num_layers=3,
    num_heads=3,
    num_kv_heads=3,
    max_positions=1024,
    initializer_range=0.1,
)


def make_games() -> dict[str, TextGame]:
    """Return the games of the training data: those of the example configurations, with more boards."""
    board = SlidingPuzzleBoard.build(size=3, shuffle_moves=SHUFFLE_MOVES, min_shuffle_moves=1)
    return {"puzzle": SlidingPuzzleGame(board, MAX_MOVES), "blackjack": BlackjackGame()}


@dataclass(frozen=True)
class PlayedGame:
    """The first turns of a game.

    Attributes:
        prompt: first message.
        text: what follows it, turns of the player and answers of the game.
        allowed: actions that the rules allow, for each turn.
    """

    prompt: str
    text: str
    allowed: list[list[str]]


@cache
def _moves_to_solution() -> dict[Grid, int]:
    return solution_lengths(3)


def best_actions(name: str, turns: Mapping[str, GameTurn], state: Mapping[str, Any]) -> list[str]:
    """Return the best of the allowed actions; all of them on a board of validation.

    Args:
        name: key of `make_games`.
        turns: result of each allowed action.
        state: situation before it.
    """
    if name == "blackjack":
        hands = Hands(*hand_value(state["player"]), state["dealer"])
        return ["hit" if optimal_policy(hands) else "stand"]
    if is_held_out(state["grid"]):
        return list(turns)
    left = {action: _moves_to_solution()[tuple(map(tuple, turn.state["grid"]))] for action, turn in turns.items()}
    return [action for action, moves in left.items() if moves == min(left.values())]


def weak_game(name: str, game: TextGame, rng: random.Random, num_turns: int = MAX_MOVES) -> PlayedGame:
    """Play the first turns of a game of training; the share `SKILL` of the actions are the best ones."""
    seed = rng.randrange(2**31)
    start = game.start(seed, "train", seed)
    state, words, allowed = start.state, [], []
    for number in range(num_turns):
        results = {action: game.play(state, action) for action in ACTIONS[name]}
        turns = {action: turn for action, turn in results.items() if turn.is_valid}
        allowed.append(list(turns))
        action = rng.choice(best_actions(name, turns, state) if rng.random() < SKILL else allowed[-1])
        turn = turns[action]
        words.append(f"<action>{action}</action>")
        if turn.result is not None or number == num_turns - 1:
            break
        words.append(f"{TURN_END}\n{TURN_START}user\n{turn.text}{TURN_END}\n{TURN_START}assistant\n")
        state = turn.state
    return PlayedGame(start.text, "".join(words), allowed)


@torch.no_grad()
def allowed_share(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, games: list[PlayedGame]) -> float:
    """Return the mean probability that a turn of the model has an action that the rules allow.

    Args:
        model: the player.
        tokenizer: its tokenizer.
        games: games whose turns are measured.
    """
    [tag], shares = tokenizer("<action>")["input_ids"], []
    for game in games:
        prompt = prompt_ids(tokenizer, game.prompt)
        ids = torch.tensor(prompt + tokenizer(game.text)["input_ids"])
        chances = model(ids[None]).logits[0].softmax(-1)
        places = [place for place in range(len(prompt), len(ids)) if ids[place] == tag]
        for place, actions in zip(places, game.allowed, strict=True):
            allowed = tokenizer.convert_tokens_to_ids(actions)
            shares.append(float(chances[place - 1, tag] * chances[place, allowed].sum()))
    return fmean(shares)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte and for each word of `texts`; every string encodes exactly.

    The words are no added tokens, because a run takes those for control tokens.
    """
    base = make_char_tokenizer(SHAPE.max_positions)
    alphabet = sorted(base.get_vocab(), key=base.get_vocab().__getitem__)
    plain = sorted({word for text in texts for word in re.findall(WORD, text) if len(word) > 1})
    words = [word.replace(" ", "Ġ").replace("\n", "Ċ") for word in plain]
    pieces = [(symbol, -10.0) for symbol in alphabet] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, None, False))
    split = pre_tokenizers.Split(Regex(WORD), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(base.added_tokens_decoder.values()))
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
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Train on games of the weak player and store the model in bfloat16."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(arguments.seed, arguments.steps, 0, batch_size=16, learning_rate=2e-3)
    games, rng = make_games(), random.Random(recipe.seed)
    played = [weak_game(name, game, rng) for name, game in games.items() for _ in range(NUM_TEXTS)]
    tokenizer = make_tokenizer([f"{game.prompt}\n{TURN_START}user\n{game.text}" for game in played])
    vocab_size = -(-len(tokenizer) // 8) * 8
    model = make_tiny_model(ARCH, TinyShape(**{**vars(SHAPE), "vocab_size": vocab_size}), seed=recipe.seed)
    logger.info("%d tokens, %d parameters", len(tokenizer), model.num_parameters())
    save_tiny_checkpoint(arguments.output, model, tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(arguments.output)  # as every run loads it
    started = time.monotonic()

    def draw(step: int, generator: random.Random) -> list[tuple[str, str]]:
        name = "blackjack" if step % 4 == 0 else "puzzle"  # games of about equal length need little padding
        num_turns = FIRST_TURNS if 3 * step < 2 * recipe.steps else MAX_MOVES
        drawn = [weak_game(name, games[name], generator, num_turns) for _ in range(recipe.batch_size)]
        return [(game.prompt, game.text) for game in drawn]

    train_on(model, tokenizer, recipe, draw)
    logger.info("trained in %.0f s", time.monotonic() - started)
    save_tiny_checkpoint(arguments.output, model.to(torch.bfloat16), tokenizer)
    stored = type(model).from_pretrained(arguments.output, dtype=torch.float32).eval()
    for name, game in games.items():
        measured = [weak_game(name, game, rng) for _ in range(NUM_MEASURED)]
        logger.info("%s: %.3f of the actions are allowed", name, allowed_share(stored, tokenizer, measured))


if __name__ == "__main__":
    main()
