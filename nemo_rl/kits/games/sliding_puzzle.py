"""The sliding puzzle, in which numbered tiles are moved into order with the help of one empty cell.

A move names the direction in which a tile slides into the empty cell. Invariant: every board can be solved, because it
is made by shuffling the solution, and no episode starts with a solved board.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypedDict, override

from nemo_rl.config.schema.kits import SlidingPuzzleBoard, SlidingPuzzleConfig
from nemo_rl.kits.games.text_game import (
    GameEnvironment,
    GameMetadata,
    GameStart,
    GameTurn,
    TextGame,
    observed,
    settings_of,
)
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.seed import derive_seed

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import TokenizerType

Grid = tuple[tuple[int, ...], ...]


def shortest_solution(grid: Sequence[Sequence[int]], limit: int) -> int | None:
    """Return the smallest number of moves that solve a board, by breadth-first search from both ends.

    Args:
        grid: tiles by row; 0 is the empty cell.
        limit: largest number of moves to search.

    Returns:
        The number of moves, or None if it is above `limit`.
    """
    start = tuple(tuple(row) for row in grid)
    size = len(start)
    tiles = (*range(1, size * len(start[0])), 0)
    goal = tuple(tiles[row * len(start[0]) : (row + 1) * len(start[0])] for row in range(size))
    fronts, seen = [{start}, {goal}], [{start}, {goal}]
    for moves in range(limit + 1):
        if fronts[0] & seen[1] or fronts[1] & seen[0]:
            return moves
        side = int(len(fronts[1]) < len(fronts[0]))
        fronts[side] = {after for board in fronts[side] for after in _neighbours(board)} - seen[side]
        seen[side] |= fronts[side]
    return None


def solution_lengths(size: int) -> dict[Grid, int]:
    """Return the smallest number of moves to the solution for each board that can be solved, for `size` 2 or 3."""
    tiles = (*range(1, size * size), 0)
    goal = tuple(tiles[row * size : (row + 1) * size] for row in range(size))
    lengths, front = {goal: 0}, [goal]
    while front:
        front = [after for board in front for after in _reached(board, lengths)]
    return lengths


def random_solve_rate(grid: Sequence[Sequence[int]], max_moves: int) -> float:
    """Return the probability that random allowed moves solve a board within `max_moves` moves.

    Args:
        grid: tiles by row; 0 is the empty cell.
    """

    @cache
    def rate(board: Grid, moves: int) -> float:
        if board == goal:
            return 1.0
        if moves == 0 or distance(board) > moves:
            return 0.0
        after = list(_neighbours(board))
        return sum(rate(other, moves - 1) for other in after) / len(after)

    @cache
    def distance(board: Grid) -> int:
        """Return the sum of the tiles' distances from their places, a lower bound of the number of moves."""
        width = len(board[0])
        places = [(tile - 1, row, column) for row, line in enumerate(board) for column, tile in enumerate(line) if tile]
        return sum(abs(tile // width - row) + abs(tile % width - column) for tile, row, column in places)

    start = tuple(tuple(row) for row in grid)
    tiles = (*sorted(tile for row in start for tile in row if tile), 0)
    goal = tuple(tiles[row * len(start[0]) : (row + 1) * len(start[0])] for row in range(len(start)))
    return rate(start, max_moves)


def _reached(board: Grid, lengths: dict[Grid, int]) -> Iterator[Grid]:
    for after in _neighbours(board):
        if after not in lengths:
            lengths[after] = lengths[board] + 1
            yield after


def _neighbours(board: Grid) -> Iterator[Grid]:
    """Yield the boards after each move that the rules allow."""
    height, width = len(board), len(board[0])
    empty = next((row, line.index(0)) for row, line in enumerate(board) if 0 in line)
    for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        row, column = empty[0] + down, empty[1] + right
        if 0 <= row < height and 0 <= column < width:
            cells = [list(line) for line in board]
            cells[empty[0]][empty[1]], cells[row][column] = cells[row][column], 0
            yield tuple(tuple(line) for line in cells)


__all__ = [
    "SlidingPuzzleConfig",
    "SlidingPuzzleEnv",
    "SlidingPuzzleGameLogic",
    "SlidingPuzzleMetadata",
]

SlidingPuzzleMetadata = GameMetadata
"""Name of the type of an episode's state in NeMo RL."""

HELD_OUT_ONE_IN = 10
"""One board in this number of boards is used only for validation."""
MAX_SHUFFLES_TO_SOLVE = 16
"""Largest number of shuffle moves for which the shortest solution is searched, among a few thousand boards at most."""
_MAX_TRIES = 40
"""Number of boards that are drawn for each number of moves to find one of the split. Few moves lead to few boards."""

_STEPS = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Place of the tile that each action moves, relative to the empty cell."""


class BoardState(TypedDict):
    """State of a game, which is `game_state` in the metadata."""

    size: int
    """Number of rows and of columns."""
    grid: list[list[int]]
    """Tiles by row; 0 is the empty cell."""
    solution: list[list[int]]
    """The grid of a solved board."""
    empty_pos: tuple[int, int]
    """Row and column of the empty cell, from 0."""
    commands: dict[str, str]
    """Meaning of each action."""
    optimal_moves: int | None
    """Smallest number of moves that solves the board at the start, or None if it was not searched."""


class SlidingPuzzleGameLogic:
    """Rules of the puzzle, as functions that return a new state and never change their arguments."""

    @staticmethod
    def generate(config: Mapping[str, Any], seed: int | None = None) -> dict[str, Any]:
        """Shuffle a solved board.

        Each move is drawn at random among the moves that do not undo the previous move.

        Args:
            config: `size`, `shuffle_moves` and `min_shuffle_moves`. The number of moves is drawn between the two
                limits, and is `shuffle_moves` if `min_shuffle_moves` is null.
            seed: seed of the moves. If None, each call returns another board.
        """
        board, rng = SlidingPuzzleBoard.of(config), random.Random(seed)
        return _shuffled(_solved(board.size), rng.choice(_numbers_of_moves(board)), rng)

    @staticmethod
    def init(game_state: dict[str, Any]) -> str:
        """Return the rules and the board, for the prompt."""
        solution, actions = _grid_text(game_state["solution"]), ", ".join(game_state["commands"])
        return (
            f"Slide the tiles until the board is\n{solution}\nActions: {actions}. up slides the tile below _ up.\n"
            f"Answer with one action, for example <action>up</action>\n{SlidingPuzzleGameLogic.render(game_state)}"
        )

    @staticmethod
    def step(action: str, game_state: dict[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        """Take one action.

        Args:
            action: `up`, `down`, `left`, `right`, `slide ROW COLUMN` (from 1) or `view`.
            game_state: the state before the action.

        Returns:
            Message, reward (1.0 if the board is solved now), whether the game is over, and the state after the action.
        """
        turn = SlidingPuzzleGame.turn(game_state, action)
        return turn.text, turn.reward, turn.result is not None, turn.state

    @staticmethod
    def render(game_state: dict[str, Any]) -> str:
        """Return the board as text: a line for each row, `_` for the empty cell."""
        return observed(_grid_text(game_state["grid"]))


class SlidingPuzzleGame(TextGame):
    """The puzzle with boards of one kind.

    Args:
        board: size and shuffle moves.
        max_moves: limit of moves that the rules in the prompt state.

    Raises:
        ConfigError: no board belongs to training, or none to validation.
    """

    def __init__(self, board: SlidingPuzzleBoard, max_moves: int) -> None:
        self._board = board
        self._max_moves = max_moves
        for split in ("train", "validation"):
            self._generate(0, split)

    def start(self, seed: int, split: str, episode_seed: int) -> GameStart:
        """Generate the board of a seed. One board in ten belongs to validation, and all others belong to training."""
        state = self._generate(seed, split)
        most = self._board.shuffle_moves
        if most <= MAX_SHUFFLES_TO_SOLVE:
            state["optimal_moves"] = shortest_solution(state["grid"], most)
        return GameStart(state, f"{SlidingPuzzleGameLogic.init(state)}\n{self._max_moves} moves are left.")

    @override
    def play(self, state: dict[str, Any], action: str) -> GameTurn:
        return self.turn(state, action)

    @staticmethod
    def turn(state: dict[str, Any], action: str) -> GameTurn:
        """Take one action (`SlidingPuzzleGameLogic.step`)."""
        if action == "view":
            return GameTurn(state, SlidingPuzzleGameLogic.render(state))
        place = _tile_to_move(state, action)
        if place is None:
            board = SlidingPuzzleGameLogic.render(state)
            return GameTurn(state, f"Invalid action: {action[:40]}\n{board}", is_valid=False)
        after = _moved(state, place)
        if after["grid"] == after["solution"]:
            return GameTurn(after, "The puzzle is solved.", reward=1.0, result="solved")
        return GameTurn(after, SlidingPuzzleGameLogic.render(after))

    def metrics(self, states: Sequence[GameMetadata]) -> dict[str, float]:
        """Return `moves_over_optimum`, the mean number of moves of solved games beyond the shortest solution."""
        best = [(state["num_moves"], state["game_state"].get("optimal_moves")) for state in states if _is_solved(state)]
        extra = [moves - fewest for moves, fewest in best if fewest is not None]
        return {"moves_over_optimum": fmean(extra)} if extra else {}

    def _generate(self, seed: int, split: str) -> dict[str, Any]:
        """Generate a board of a split. Its number of moves is drawn first, so that both splits are equally hard."""
        rng, solved = random.Random(derive_seed(seed, "board")), _solved(self._board.size)
        numbers = _numbers_of_moves(self._board)
        for number, _ in product(rng.sample(numbers, len(numbers)), range(_MAX_TRIES)):
            state = _shuffled(solved, number, rng)
            if is_held_out(state["grid"]) == (split == "validation"):
                return state
        raise ConfigError(
            f"env.sliding_puzzle_game.cfg.game_config: boards with size={self._board.size} and "
            f"shuffle_moves={self._board.shuffle_moves} are too few to set some aside for {split}. "
            "Increase shuffle_moves or size."
        )


class SlidingPuzzleEnv(GameEnvironment):
    """The environment `sliding_puzzle_game`. The move that solves the board gets 1.0, and every other move gets 0.0.

    Args:
        cfg: the section `env.sliding_puzzle_game` or the mapping below its key `cfg`, or None for the defaults.
    """

    continues_episodes = True

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        settings = SlidingPuzzleConfig.build(**settings_of(cfg))
        super().__init__(SlidingPuzzleGame(settings.game_config, settings.max_moves), settings.max_moves)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """Check the section by generating a board of each split (`EnvironmentInterface.check_section`)."""
        cls(section)


def is_held_out(grid: Sequence[Sequence[int]]) -> bool:
    """Return whether a board starts episodes of validation. The answer depends only on the tiles."""
    return derive_seed(0, "sliding_puzzle", *[tile for row in grid for tile in row]) % HELD_OUT_ONE_IN == 0


def _is_solved(state: GameMetadata) -> bool:
    return state.get("result") == "solved"


def _solved(size: int) -> dict[str, Any]:
    tiles = [*range(1, size * size), 0]
    grid = [tiles[row * size : (row + 1) * size] for row in range(size)]
    commands = {
        "up": "slide the tile below the empty cell up",
        "down": "slide the tile above the empty cell down",
        "left": "slide the tile to the right of the empty cell to the left",
        "right": "slide the tile to the left of the empty cell to the right",
        "slide ROW COLUMN": "slide the tile in this row and column, counted from 1",
        "view": "show the board",
    }
    state = BoardState(
        size=size,
        grid=grid,
        solution=[list(row) for row in grid],
        empty_pos=(size - 1, size - 1),
        commands=commands,
        optimal_moves=None,
    )
    return dict(state)


def _numbers_of_moves(board: SlidingPuzzleBoard) -> list[int]:
    least = board.shuffle_moves if board.min_shuffle_moves is None else board.min_shuffle_moves
    return [*range(least, board.shuffle_moves + 1)]


def _shuffled(state: dict[str, Any], num_moves: int, rng: random.Random) -> dict[str, Any]:
    """Return the state after random moves. If these moves solve the board, one more move is made."""
    before = None
    for _ in range(num_moves):
        row, column = state["empty_pos"]
        places = [(row + down, column + right) for down, right in _STEPS.values()]
        allowed = [place for place in places if _is_on_board(state, place) and place != before]
        before = state["empty_pos"]
        state = _moved(state, rng.choice(allowed))
    return _shuffled(state, 1, rng) if state["grid"] == state["solution"] else state


def _is_on_board(state: dict[str, Any], place: tuple[int, int]) -> bool:
    return all(0 <= number < state["size"] for number in place)


def _tile_to_move(state: dict[str, Any], action: str) -> tuple[int, int] | None:
    """Return the row and column of the tile that an action moves, or None if the rules do not allow the action."""
    row, column = state["empty_pos"]
    name, *numbers = action.split() or [""]
    if name in _STEPS and not numbers:
        down, right = _STEPS[name]
        place = (row + down, column + right)
        return place if _is_on_board(state, place) else None
    if name == "slide" and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        place = (int(numbers[0]) - 1, int(numbers[1]) - 1)
        is_next = abs(place[0] - row) + abs(place[1] - column) == 1
        return place if is_next and _is_on_board(state, place) else None
    return None


def _moved(state: dict[str, Any], place: tuple[int, int]) -> dict[str, Any]:
    """Return the state after the tile at `place` slid into the empty cell."""
    grid = [list(row) for row in state["grid"]]
    row, column = state["empty_pos"]
    grid[row][column], grid[place[0]][place[1]] = grid[place[0]][place[1]], 0
    return {**state, "grid": grid, "empty_pos": place}


def _grid_text(grid: Sequence[Sequence[int]]) -> str:
    """Return the rows as lines, with a space before each tile, so that a tile is the same token in every column."""
    width = len(str(len(grid) ** 2 - 1)) + 1
    return "\n".join("".join((str(tile) if tile else "_").rjust(width) for tile in row) for row in grid)
