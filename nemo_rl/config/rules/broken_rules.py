"""Report the findings of rules: one text per finding, with the given values, the rule and a fix.

A rule that holds in every section is here too.
"""

from collections.abc import Iterable, Iterator, Mapping

from nemo_rl.config.base.names import is_own_class
from nemo_rl.config.schema.named_part import NamedPartConfig
from nemo_rl.utils.errors import ConfigError

Findings = Iterator[str]


def report_findings(findings: Iterable[str]) -> None:
    """Raise one error with all findings if there are any.

    Raises:
        ConfigError: there is at least one finding.
    """
    found = list(findings)
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} problems:\n" + "\n".join(f"- {text}" for text in found))


def nearest_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` nearest to `value` as text: "Nearest values: 48, 64."."""
    below = value // step * step
    near = [below, below + step] if below else [step]
    return f"Nearest value{'s' if len(near) > 1 else ''}: {', '.join(map(str, near))}."


def nearest_divisors(value: int, total: int) -> str:
    """Return the two divisors of `total` nearest to `value` as text: "32, 64"."""
    divisors = [each for each in range(1, total + 1) if total % each == 0]
    near = sorted(divisors, key=lambda each: (abs(each - value), each))[:2]
    return ", ".join(map(str, sorted(near)))


def check_named_parts(parts: Mapping[str, NamedPartConfig]) -> Findings:
    """Check that only a user's classes have `kwargs`, for sections by their dotted keys."""
    for key, part in parts.items():
        if part.kwargs and not is_own_class(part.name):
            yield (
                f"{key}.kwargs={part.kwargs} are arguments of a class of your own, and {key}.name={part.name} is built "
                f"in. Take them away, or give {key}.name the dotted path of a class."
            )
