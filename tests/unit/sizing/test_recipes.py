"""`nemo_rl size` on every recipe: proposals fit and are estimated no slower, and the page of tables is current."""

from pathlib import Path

import pytest

from nemo_rl.algorithms.setup.memory_forecast import USABLE_SHARE
from nemo_rl.commands.dry_run import describe
from nemo_rl.commands.size.candidates import candidate_of
from nemo_rl.commands.size.report import changed_values, overrides_of
from nemo_rl.commands.size.run import own_train_seconds
from nemo_rl.commands.size.search import TIE
from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import ALGORITHMS
from tools import generate_sizing_table as tool

RECIPES = sorted(tool.RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_proposal_fits_and_is_no_slower(path: Path) -> None:
    """Pasted after the recipe, the overrides pass its rules and its dry run, with the same memory."""
    found = tool.sized(path)
    schema = ALGORITHMS[path.stem.split("-")[0]]
    own = load_config(path, schema=schema)
    overrides = overrides_of(changed_values(own, found.proposal.values))
    checked = describe(load_config(path, overrides, schema=schema))
    assert checked.forecast.shortfalls == []
    peaks = {name: plan.peak for name, plan in checked.forecast.groups.items()}
    assert peaks == pytest.approx({name: plan.peak for name, plan in found.proposal.forecast.groups.items()})
    assert max(peaks.values()) <= tool.GPU_GB * 2**30 * USABLE_SHARE
    offloads = candidate_of(found.proposal.searches["policy"].job).offload
    if not offloads:
        assert found.proposal.train_seconds <= own_train_seconds(found.own, found.gpu) * (1 + TIE)


def test_the_page_of_proposals_is_current() -> None:
    assert tool.DEFAULT_PAGE.read_text(encoding="utf-8") == tool.page(), "run python tools/generate_sizing_table.py"
