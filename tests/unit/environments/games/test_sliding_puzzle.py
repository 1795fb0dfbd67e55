"""The sliding puzzle: rules, boards of both splits, metrics, against an exhaustive search."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from nemo_rl.config.schema.kits import SlidingPuzzleBoard
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.kits.games.sliding_puzzle import (
    SlidingPuzzleEnv,
    SlidingPuzzleGame,
    SlidingPuzzleGameLogic,
    is_held_out,
    random_solve_rate,
    shortest_solution,
    solution_lengths,
)
from nemo_rl.utils.errors import ConfigError

BOARD = SlidingPuzzleBoard.build(size=3, shuffle_moves=6, min_shuffle_moves=1)


def state_of(*rows):
    grid = [list(row) for row in rows]
    state = SlidingPuzzleGameLogic.generate({"size": len(grid), "shuffle_moves": 1}, seed=0)
    [empty] = [(row, line.index(0)) for row, line in enumerate(grid) if 0 in line]
    return {**state, "grid": grid, "empty_pos": empty}


def say(text):
    return [{"role": "user", "content": "board"}, {"role": "assistant", "content": text}]


def play(env, metadata, *texts):
    """Take turns in one episode; return the results of all turns."""
    results = []
    for text in texts:
        results.append(env.step([say(text)], [metadata]))
        [metadata] = results[-1].metadata
    return results


@pytest.fixture
def env():
    return SlidingPuzzleEnv({"cfg": {"game_config": {"size": 3, "shuffle_moves": 6}, "max_moves": 3}})


@pytest.mark.parametrize(
    ("action", "grid"),
    [
        ("up", [[1, 2, 3], [4, 8, 5], [7, 0, 6]]),
        ("down", [[1, 0, 3], [4, 2, 5], [7, 8, 6]]),
        ("left", [[1, 2, 3], [4, 5, 0], [7, 8, 6]]),
        ("right", [[1, 2, 3], [0, 4, 5], [7, 8, 6]]),
        ("slide 2 3", [[1, 2, 3], [4, 5, 0], [7, 8, 6]]),
        ("slide 3 2", [[1, 2, 3], [4, 8, 5], [7, 0, 6]]),
        ("view", [[1, 2, 3], [4, 0, 5], [7, 8, 6]]),
    ],
)
def test_actions_move_the_tile_they_name(action, grid):
    state = state_of((1, 2, 3), (4, 0, 5), (7, 8, 6))
    text, reward, over, after = SlidingPuzzleGameLogic.step(action, state)
    assert (after["grid"], reward, over) == (grid, 0.0, False)
    assert after["grid"][after["empty_pos"][0]][after["empty_pos"][1]] == 0
    assert text == SlidingPuzzleGameLogic.render(after)
    assert state["grid"] == [[1, 2, 3], [4, 0, 5], [7, 8, 6]], "a state is not changed in place"


@pytest.mark.parametrize("action", ["left", "up", "slide 1 1", "slide 9 9", "slide 3 3 3", "slide a b", "", "jump"])
def test_actions_that_the_rules_forbid_change_nothing(action):
    state = state_of((1, 2, 3), (4, 5, 6), (7, 8, 0))
    turn = SlidingPuzzleGame.turn(state, action)
    assert not turn.is_valid and turn.state is state and turn.reward == 0
    assert turn.text.startswith(f"Invalid action: {action}\n<environment>\n 1 2 3\n")


def test_the_last_move_is_rewarded():
    state = state_of((1, 2, 3), (4, 5, 6), (7, 0, 8))
    text, reward, over, after = SlidingPuzzleGameLogic.step("left", state)
    assert (text, reward, over) == ("The puzzle is solved.", 1.0, True)
    assert after["grid"] == after["solution"]


def test_generated_boards_need_at_most_their_shuffle_moves():
    """Of all boards of size 3, by an independent search from the solution."""
    lengths = solution_lengths(3)
    assert len(lengths) == 181440  # 9! / 2
    assert Counter(lengths.values())[31] == 2, "the two hardest boards need 31 moves"
    for seed in range(60):
        state = SlidingPuzzleGameLogic.generate({"size": 3, "shuffle_moves": 7}, seed)
        moves = lengths[tuple(map(tuple, state["grid"]))]
        assert 0 < moves <= 8 and (moves - 7) % 2 in (0, 1)
        assert shortest_solution(state["grid"], 31) == moves
        assert SlidingPuzzleGameLogic.generate({"size": 3, "shuffle_moves": 7}, seed) == state


def test_a_solution_beyond_the_limit_is_not_found():
    state = state_of((1, 2, 3), (4, 5, 6), (0, 7, 8))
    assert shortest_solution(state["grid"], 2) == 2
    assert shortest_solution(state["grid"], 1) is None


def test_random_play_solves_with_the_computed_probability():
    """Hand-computed: 2 moves to go in a corner, each chosen from the 2 or 3 that the rules allow."""
    grid = ((1, 2, 3), (4, 5, 0), (7, 8, 6))
    assert random_solve_rate(grid, 1) == pytest.approx(1 / 3)
    # Within 3 moves: there at once, or away (2 of 3), and back (1 of 2 in the corner, 1 of 4 in the middle), and there.
    assert random_solve_rate(grid, 3) == pytest.approx(
        1 / 3 + (1 / 3) * (1 / 2) * (1 / 3) + (1 / 3) * (1 / 4) * (1 / 3)
    )
    assert random_solve_rate(((1, 2, 3), (4, 5, 6), (7, 8, 0)), 0) == 1.0


def test_splits_share_no_board_and_have_all_difficulties():
    game = SlidingPuzzleGame(BOARD, max_moves=8)
    grids, moves = {}, {}
    for split in ("train", "validation"):
        states = [game.start(seed, split, 0).state for seed in range(200)]
        grids[split] = {str(state["grid"]) for state in states}
        moves[split] = Counter(state["optimal_moves"] for state in states)
        assert all(is_held_out(state["grid"]) == (split == "validation") for state in states)
        assert states == [game.start(seed, split, 1).state for seed in range(200)], "the seed alone decides"
    assert grids["train"].isdisjoint(grids["validation"])
    assert set(moves["train"]) == {1, 2, 3, 4, 5, 6} and len(moves["validation"]) >= 4
    assert len(grids["train"]) > 40 and len(grids["validation"]) > 5


def test_too_few_boards_are_refused_before_the_first_episode():
    with pytest.raises(ConfigError, match="too few to set some aside for validation. Increase shuffle_moves or size"):
        SlidingPuzzleEnv({"cfg": {"game_config": {"size": 2, "shuffle_moves": 1}}})


def test_an_episode_begins_with_rules_and_board(env):
    start = env.open_episode({"seed": 5, "split": "train", "episode_seed": 0})
    text = start.observation["content"]
    grid = start.metadata["game_state"]["grid"]
    assert text.startswith("Slide the tiles until the board is\n 1 2 3\n 4 5 6\n 7 8 _\nActions: up, down, ")
    assert text.endswith("</environment>\n3 moves are left.")
    assert SlidingPuzzleGameLogic.render(start.metadata["game_state"]) in text
    assert {tile for row in grid for tile in row} == set(range(9))


def test_rows_may_bring_their_own_board(env):
    state = state_of((1, 2, 3), (4, 5, 6), (7, 0, 8))
    start = env.open_episode({"game_state": state, "num_moves": 0, "max_moves": 7})
    assert start.observation is None and start.metadata["max_moves"] == 7
    [solved] = play(env, start.metadata, "It is <action>up</action>, no: <action> left </action>")
    assert (solved.rewards.tolist(), solved.terminateds.tolist()) == ([1.0], [True]), "the last action counts"


def test_a_row_without_a_game_is_an_error(env):
    with pytest.raises(ValueError, match="neither the seed of a game nor a game_state, only ground_truth. Use dataset"):
        env.open_episode({"ground_truth": "4"})


def test_moves_are_used_up_by_invalid_actions_too(env):
    state = state_of((1, 2, 3), (4, 5, 6), (0, 7, 8))
    start = env.open_episode({"game_state": state})
    first, second, third = play(env, start.metadata, "left", "<action>down</action> <action", "<action>fly</action>")
    assert first.observations[0]["content"] == "Invalid action: write one action between <action> and </action>."
    assert [result.terminateds.item() for result in (first, second, third)] == [False, False, True]
    assert first.next_stop_strings == [["</action>"]]
    [end] = third.metadata
    assert (end["result"], end["num_moves"], end["invalid_actions"]) == ("failed", 3, 2)


def test_results_are_told_apart_in_metrics(env):
    def end(result, moves, optimal=2, invalid=0):
        state = {**state_of((1, 2, 3), (4, 5, 6), (0, 7, 8)), "optimal_moves": optimal}
        return {
            "game_state": state, "num_moves": moves, "max_moves": 3, "invalid_actions": invalid, "result": result,
        }  # fmt: skip

    ends = [end("solved", 2), end("solved", 3), end("failed", 3, invalid=2), end(None, 1, invalid=1)]
    batch = BatchedDataDict(extra_env_info=ends, rewards=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    after, metrics = env.global_post_process_and_metrics(batch)
    assert after is batch
    assert metrics == {
        "solved": 0.5,
        "failed": 0.25,
        "truncated": 0.25,
        "num_moves": 2.25,
        "invalid_actions": 0.75,
        "moves_over_optimum": 0.5,
    }


def test_every_optimal_game_is_solved(env):
    """Follow the shortest solutions move by move through the environment."""
    lengths = solution_lengths(3)
    env = SlidingPuzzleEnv({"cfg": {"game_config": dict(BOARD), "max_moves": 8}})
    for seed in range(20):
        metadata = env.open_episode({"seed": seed, "split": "validation", "episode_seed": 0}).metadata
        left = [metadata["game_state"]["optimal_moves"]]
        while True:
            options = [play(env, metadata, f"<action>{a}</action>")[0] for a in ("up", "down", "left", "right")]
            best = min(options, key=lambda o: lengths[tuple(map(tuple, o.metadata[0]["game_state"]["grid"]))])
            [metadata] = best.metadata
            left.append(lengths[tuple(map(tuple, metadata["game_state"]["grid"]))])
            if best.terminateds.item():
                break
        assert best.rewards.item() == 1.0 and metadata["result"] == "solved"
        assert all(before - after == 1 for before, after in pairwise(left))
