"""Where a run's time goes: parts that do not overlap, the rest named, and the share that was overhead."""

import pytest

from rooflane.eval.campaign import team
from rooflane.eval.campaign.team import Spent, overhead_share


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(team, "monotonic", lambda: now[0])
    return now


def test_seconds_count_once_and_the_rest_is_named(clock):
    account = Spent(started=90.0)
    with account.on("measurement"):
        clock[0] += 6
        with account.on("verification"):
            clock[0] += 4
    with pytest.raises(ValueError), account.on("set-up"):
        clock[0] += 3
        raise ValueError
    with account.on("measurement"):
        clock[0] += 2
    # Ten seconds had passed before the first block.
    assert account.account() == {"measurement": 12, "set-up": 3, "other": 10}


def test_the_part_before_an_interruption_counts(clock):
    account = Spent(before={"measurement": 5.0, "other": 2.0, "start-up": 1.0})
    with account.on("measurement"):
        clock[0] += 4
    clock[0] += 3
    assert account.account() == {"measurement": 9, "other": 5, "start-up": 1}


@pytest.mark.parametrize(
    ("account", "share"),
    [
        ({"warm-up": 1, "measurement": 5, "verification": 2, "set-up": 1, "start-up": 0.5, "other": 0.5}, 0.2),
        ({"other": 3}, 1.0),
        ({"measurement": 3, "other": 0}, 0.0),
    ],
)
def test_overhead_is_what_was_neither_warm_up_measurement_nor_verification(account, share):
    assert overhead_share(account) == pytest.approx(share)
