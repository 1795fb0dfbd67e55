"""Removes the nulls that Arrow adds to nested values.

Arrow gives all structs of a column the same fields, so a tool call gets the arguments of all other calls, as nulls.
Invariant: a row of a table has the nested keys that the row had before it was written, except keys that were null.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import pyarrow


class ArrowNulls:
    """Removes added nulls from the rows of one table.

    A null stays if its field is null in every row: then no other row can have caused it, so it was written on purpose
    (`"default": null`).
    """

    def __init__(self, rows: "datasets.Dataset") -> None:
        import pyarrow

        self._nested: dict[str, pyarrow.DataType] = {
            field.name: field.type for field in rows.data.schema if pyarrow.types.is_nested(field.type)
        }

    def removed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row without added nulls; columns without structs and lists stay as they are."""
        if not self._nested:
            return row
        return {key: _without(value, self._nested[key]) if key in self._nested else value for key, value in row.items()}


def _without(value: Any, kind: "pyarrow.DataType") -> Any:
    from pyarrow import types

    if isinstance(value, dict) and types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {
            key: _without(below, fields[key]) if key in fields else below
            for key, below in value.items()
            if below is not None or key not in fields or types.is_null(fields[key])
        }
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if isinstance(value, list) and is_list:
        return [_without(below, kind.value_type) for below in value]
    return value
