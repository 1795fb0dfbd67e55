"""Tables of comparisons on a page: what is measured again takes its place among cells that stay."""

from collections.abc import Iterable

NONE = "–"
"""In the place of a comparison that was not made."""

type Table = dict[tuple[str, str], dict[str, str]]
"""What cells show: by mesh and rows, then by architecture."""


def read_table(text: str, title: str) -> Table:
    """The table below a heading of a page."""
    _, _, section = text.partition(f"## {title}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cut = [[value.strip() for value in line.strip("|").split("|")] for line in lines]
    return {
        (mesh, rows): {name: value for name, value in zip(cut[0][2:], values, strict=True) if value != NONE}
        for mesh, rows, *values in cut[2:]
    }


def drawn(table: Table, architectures: Iterable[str], meshes: Iterable[str]) -> str:
    """One row for each mesh, one column for each architecture, in these orders."""
    order = list(meshes)
    columns = [name for name in architectures if any(name in row for row in table.values())]
    lines = [f"| mesh | rows | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for mesh, rows in sorted(table, key=lambda row: (order.index(row[0]), row[1])):
        values = [table[mesh, rows].get(name, NONE) for name in columns]
        lines.append(f"| {mesh} | {rows} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"
