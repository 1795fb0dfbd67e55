"""Update tables of comparisons on a page: new cells replace old ones, other cells are kept."""

from collections.abc import Iterable

NONE = "–"
"""Text of a cell without a comparison."""

type Table = dict[tuple[str, str], dict[str, str]]
"""Texts of cells: (mesh, rows) -> architecture -> text."""


def read_table(text: str, title: str) -> Table:
    """Read the table below a heading of a page."""
    _, _, section = text.partition(f"## {title}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cut = [[value.strip() for value in line.strip("|").split("|")] for line in lines]
    return {
        (mesh, rows): {name: value for name, value in zip(cut[0][2:], values, strict=True) if value != NONE}
        for mesh, rows, *values in cut[2:]
    }


def drawn(table: Table, architectures: Iterable[str], meshes: Iterable[str]) -> str:
    """Format the table with one row per mesh and one column per architecture, in these orders."""
    order = list(meshes)
    columns = [name for name in architectures if any(name in row for row in table.values())]
    lines = [f"| mesh | rows | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for mesh, rows in sorted(table, key=lambda row: (order.index(row[0]), row[1])):
        values = [table[mesh, rows].get(name, NONE) for name in columns]
        lines.append(f"| {mesh} | {rows} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"
