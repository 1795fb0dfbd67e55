"""Check that an engine keeps the contract of `generation.interfaces.Engine`, with one function for each property.

`check_engine` runs the whole suite in a process of its own and returns a table; `check_property` runs one property on
an engine of the caller. `python -m nemo_rl.commands.conformance` is the command line for it.
"""

from nemo_rl.commands.conformance.case import Case, ContractError, NotOffered
from nemo_rl.commands.conformance.run import DECLARED, PROPERTIES, Report, check_engine, check_property, table

__all__ = [
    "DECLARED",
    "PROPERTIES",
    "Case",
    "ContractError",
    "NotOffered",
    "Report",
    "check_engine",
    "check_property",
    "table",
]
