"""Draw the rewards and validations of a run as an SVG picture: docs/images/learning-curve.svg is that of README's run.

    python tools/draw_learning_curve.py logs/exp_001 docs/images/learning-curve.svg

The background is transparent and the colours have enough contrast on white and on black, so the picture fits a page in
either theme. Invariant: every point is a value of the run's metrics; nothing is smoothed.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_rl.commands.report.curves import Curves
from nemo_rl.commands.report.run_files import RunFiles

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 20, 40, 44
GREY, BLUE, ORANGE = "#808080", "#3b82c4", "#d9730d"

type Points = list[tuple[int, float]]


def picture(rewards: Points, accuracies: Points, held_out: str) -> str:
    """Return the SVG.

    Args:
        rewards: training step and mean reward of its samples, between 0 and 1.
        accuracies: step and accuracy of each validation, between 0 and 1.
        held_out: what validations measure.
    """
    last = max(step for step, _ in [*rewards, *accuracies])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>Reward and validation accuracy over {last} steps</title>",
        *_axes(last),
        f'<polyline fill="none" stroke="{BLUE}" stroke-width="2" points="{_path(rewards, last)}"/>',
        f'<polyline fill="none" stroke="{ORANGE}" stroke-dasharray="5 4" points="{_path(accuracies, last)}"/>',
        *(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{ORANGE}"/>'
            for x, y in (_place(point, last) for point in accuracies)
        ),
        f'<text x="{LEFT}" y="20" fill="{BLUE}">reward of the step</text>',
        f'<text x="{LEFT + 140}" y="20" fill="{ORANGE}">validation accuracy, on {held_out} that are not trained on'
        "</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _place(point: tuple[int, float], last: int) -> tuple[float, float]:
    """Return x and y of a step and a value, in pixels from the upper left corner."""
    step, value = point
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value


def _path(points: Points, last: int) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (_place(point, last) for point in points))


def _axes(last: int) -> Iterator[str]:
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = _place((0, value), last), _place((last, value), last)
        yield f'<line x1="{x}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="{GREY}" stroke-opacity="0.3"/>'
        yield f'<text x="{x - 8}" y="{y + 4:.1f}" fill="{GREY}" text-anchor="end">{value:g}</text>'
    for step in range(0, last + 1, max(1, last // 8)):
        x, y = _place((step, 0.0), last)
        yield f'<text x="{x:.1f}" y="{y + 20:.1f}" fill="{GREY}" text-anchor="middle">{step}</text>'
    x, y = _place((last, 0.0), last)
    yield f'<text x="{x:.1f}" y="{y + 38:.1f}" fill="{GREY}" text-anchor="end">step</text>'


def main() -> int:
    """Write the picture; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="log folder of a run, exp_NNN")
    parser.add_argument("picture", type=Path, help="file to write")
    parser.add_argument("--held-out", default="sums", help="what validations measure; default: sums")
    given = parser.parse_args()
    curves = Curves(RunFiles(given.run))
    curves.read()
    rewards, accuracies = curves.get("train/reward").known, curves.get("validation/accuracy").known
    if not rewards or not accuracies:
        print(f"{given.run} has no train/reward or no validation/accuracy in its metrics.jsonl.", file=sys.stderr)
        return 1
    given.picture.write_text(picture(rewards, accuracies, given.held_out), encoding="utf-8")
    print(f"wrote {given.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
