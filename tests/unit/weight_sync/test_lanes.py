"""Lanes of a sync: who shares one, who sends, and when parts are sent."""

from nemo_rl.distributed.ranks.tensor_block import TensorBlock
from nemo_rl.weight_sync.lanes import LaneChoice, plan_lanes
from nemo_rl.weight_sync.parts import BlocksByName
from nemo_rl.weight_sync.transport import TransportSpec

UPPER: BlocksByName = {"w": (TensorBlock((0, 0), (2, 4)),), "norm": (TensorBlock((0,), (4,)),)}
LOWER: BlocksByName = {"w": (TensorBlock((2, 0), (2, 4)),), "norm": (TensorBlock((0,), (4,)),)}
COLLECTIVE = TransportSpec("collective", run_id="test")


class FakeTrainers:
    """Trainer ranks that count the ports they reserved."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.ports = 0

    def meeting_point(self, rank: int) -> tuple[str, int]:
        self.ports += 1
        return f"host-{rank}", self.ports


def test_equal_places_of_all_engines_share_a_lane_and_senders_are_spread() -> None:
    plans = plan_lanes([UPPER, LOWER], num_workers=6, num_senders=8)
    assert [(plan.workers, plan.sender, plan.parts) for plan in plans] == [
        ((0, 2, 4), 0, UPPER),
        ((1, 3, 5), 4, LOWER),
    ]
    assert [plan.sender for plan in plan_lanes([UPPER, LOWER], 2, num_senders=1)] == [0, 0]
    (both,) = plan_lanes([UPPER, dict(UPPER)], 4, 2)
    assert both.workers == (0, 1, 2, 3)


def test_parts_are_sent_after_a_trial_and_to_new_engines_too() -> None:
    trainers = FakeTrainers(2)
    lanes = LaneChoice(COLLECTIVE, trainers, workers_per_engine=2, send_parts=True)
    assert lanes.must_meet(4, 0)
    (first,) = lanes.of(4, membership=0)
    assert not lanes.must_meet(4, 0) and lanes.must_meet(4, 1)
    assert (first.workers, first.lane.parts, first.lane.spec.world_size) == ((0, 1, 2, 3), None, 5)
    assert lanes.of(4, 0)[0] is first, "the processes of a group meet once"
    assert lanes.wants_reads
    assert lanes.learn([UPPER, LOWER, UPPER, LOWER])
    assert lanes.wants_reads, "a trial that is interrupted starts over"
    lanes.accept()
    assert not lanes.wants_reads
    of_parts = lanes.of(4, 0)
    assert [(each.lane.spec.master_address, each.lane.spec.receivers) for each in of_parts] == [
        ("host-0", (0, 2)),
        ("host-1", (1, 3)),
    ]
    assert lanes.of(4, 0) is of_parts
    after_a_death = lanes.of(4, 1)
    assert [each.lane.parts for each in after_a_death] == [UPPER, LOWER]
    assert {each.lane.spec.extra["epoch"] for each in of_parts}.isdisjoint(
        each.lane.spec.extra["epoch"] for each in after_a_death
    )


def test_whole_tensors_are_sent_where_parts_cannot_be() -> None:
    refused = LaneChoice(COLLECTIVE, FakeTrainers(2), 2, send_parts=True)
    assert refused.learn([UPPER, LOWER])
    refused.refuse("they differ")
    blind = LaneChoice(COLLECTIVE, FakeTrainers(2), 2, send_parts=True)
    assert not blind.learn([UPPER, {}]), "a worker has read nothing, as far as it can tell"
    for lanes in (
        refused,
        blind,
        LaneChoice(COLLECTIVE, FakeTrainers(2), 2, send_parts=False),
        LaneChoice(COLLECTIVE, FakeTrainers(2), 1, send_parts=True),
        LaneChoice(TransportSpec("shared_memory", run_id="test"), FakeTrainers(2), 2, send_parts=True),
    ):
        assert not lanes.wants_reads
        (only,) = lanes.of(4, 0)
        assert (tuple(only.workers), only.lane.parts) == ((0, 1, 2, 3), None)
