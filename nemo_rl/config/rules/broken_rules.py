"""Report the findings of rules: one text per finding, with the given values, the rule and a fix."""

from collections.abc import Iterable, Iterator

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
