"""Shares of the time in which trainer, engines and environments have nothing to do, with a clock of our own."""

import math
from unittest import mock

import pytest

from nemo_rl.experience.idle_shares import BusySeconds, IdleShares

pytestmark = pytest.mark.fast


def test_shares_of_a_step_equal_hand_computed_values() -> None:
    busy = [BusySeconds([0.0, 5.0, math.nan], 2.0), BusySeconds([6.0, 13.0, math.nan], 5.0)]
    with mock.patch("time.perf_counter", side_effect=[100.0, 101.0, 105.0, 110.0]):
        shares = IdleShares(iter(busy).__next__)
        with shares.trainer_waits():
            pass
        found = shares.since_last_call()
    # Ten seconds: the trainer waited for 4, the running engines worked for 6 and 8, the environments for 3.
    assert found == pytest.approx({"trainer": 0.4, "engines": 0.3, "environments": 0.7})


def test_without_a_running_engine_there_is_no_share_of_engines() -> None:
    shares = IdleShares(lambda: BusySeconds([math.nan], 0.0))
    assert "engines" not in shares.since_last_call()
