"""Types of keys that hold numbers, by what they count; each has bounds.

Invariant: no number of the schema is without an upper bound. The bounds are far above what any run uses, so a value
beyond them is a mistake: a wrong unit, or a zero too many.
"""

from typing import Annotated

from pydantic import Field

_MOST_WORKERS = 4096
_MOST = 10**6
_MOST_STORED = 10**12
_LARGEST = 1e9

Workers = Annotated[int, Field(gt=0, le=_MOST_WORKERS)]
"""Processes or threads of one machine."""
WorkersOrNone = Annotated[int, Field(ge=0, le=_MOST_WORKERS)]
"""The same; 0: none."""
Count = Annotated[int, Field(gt=0, le=_MOST)]
"""Things that are handled together or one after another: samples of a step, machines, ranks, layers, attempts."""
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
"""The same; 0: none."""
CountOrMinusOne = Annotated[int, Field(ge=-1, le=_MOST)]
"""The same; -1 has a meaning of its own."""
Amount = Annotated[int, Field(gt=0, le=_MOST_STORED)]
"""Things that add up over a run or fill memory: steps, rows of a data set, bytes, characters."""
AmountOrZero = Annotated[int, Field(ge=0, le=_MOST_STORED)]
"""The same; 0: none."""
AmountOrMinusOne = Annotated[int, Field(ge=-1, le=_MOST_STORED)]
"""The same; -1 has a meaning of its own."""
Tokens = Annotated[int, Field(gt=0, lt=2**31)]
"""Tokens; engines and kernels number them with 32 bits."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
"""The number of a token in a vocabulary."""
Mebibytes = Annotated[int, Field(gt=0, le=2**26)]
"""Memory in MiB, at most 64 TiB."""
ProgramMebibytes = Annotated[int, Field(ge=16, le=2**26)]
"""Memory of a program in MiB; Python does not start with less."""
Gibibytes = Annotated[float, Field(ge=0.0625, le=2.0**16)]
"""Memory in GiB; a process of the library does not start with less than 64 MiB."""
Seconds = Annotated[float, Field(gt=0, le=_LARGEST)]
"""Seconds."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole."""
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
"""A reward, a limit of one, or another number with a sign."""
Factor = Annotated[float, Field(gt=0, le=_LARGEST)]
"""A number that something is multiplied with, or a norm."""
FactorOrZero = Annotated[float, Field(ge=0, le=_LARGEST)]
"""The same; 0 switches the term off."""
LearningRate = Annotated[float, Field(gt=0, le=1000)]
"""A learning rate."""
LearningRateOrZero = Annotated[float, Field(ge=0, le=1000)]
"""The same; 0: none."""
Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""
