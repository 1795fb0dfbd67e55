"""Best play of the games, computed exactly: what a trained model is compared with.

Invariant: nothing here samples; results are those of a complete search.
"""

from collections.abc import Iterator, Sequence
from functools import cache

Grid = tuple[tuple[int, ...], ...]


def shortest_solution(grid: Sequence[Sequence[int]], limit: int) -> int | None:
    """Return the fewest moves that solve a board, found by breadth-first search from both ends.

    Args:
        grid: tiles by row; 0 is the empty cell.
        limit: largest number of moves to search.

    Returns:
        The number of moves; None if it is above `limit`.
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
    """Return the fewest moves to the solution of every board that can be solved, for `size` 2 or 3."""
    tiles = (*range(1, size * size), 0)
    goal = tuple(tiles[row * size : (row + 1) * size] for row in range(size))
    lengths, front = {goal: 0}, [goal]
    while front:
        front = [after for board in front for after in _reached(board, lengths)]
    return lengths


def random_solve_rate(grid: Sequence[Sequence[int]], max_moves: int) -> float:
    """Return the probability that random moves among those that the rules allow solve a board in time.

    Args:
        grid: tiles by row; 0 is the empty cell.
        max_moves: number of moves.
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
        """Return the sum of the ways of all tiles to their places, at most the number of moves needed."""
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
