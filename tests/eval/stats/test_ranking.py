"""The ranking of candidates: an order only where the paired interval shows one."""

import pytest

from rooflane.eval.report.tables import all_tables, ranking_table
from rooflane.eval.stats.summary import summarise
from rooflane.shapes import Shape

SHAPES = [Shape("a", 2, 8, 16, 2, 16, 1), Shape("b", 1, 16, 16, 2, 16, 1)]
NAMES = ("one", "two", "three")
# Each process's factor on a candidate's time: what the interval is made of.
STEADY, WAVERING = (1.0, 1.01, 0.99), (1.2, 0.8, 1.0)


@pytest.fixture
def ranked(make_meta, make_record):
    """Return a function that ranks candidates given `name: (microseconds, factor of each process)`."""

    def run(times, processes=3, drop=(), wrong=()):
        meta = make_meta(SHAPES, candidates=tuple(times), processes=processes, controls=("identity",))
        rows = []
        for shape in SHAPES:
            for process in range(processes):
                for arm in ("eager", "identity"):
                    rows.append(make_record(shape, process, arm, (9_000_000, 9_000_000)))
                for arm, (micros, factors) in times.items():
                    if (arm, process) in drop:
                        continue
                    time = round(micros * 1000 * factors[process])
                    status = "incorrect" if (arm, shape.id) in wrong else "ok"
                    rows.append(make_record(shape, process, arm, (time, time), status=status))
        return summarise(meta, rows)

    return run


def test_a_clear_order_is_ranked_whatever_the_order_given(ranked):
    summary = ranked({"slow": (300, STEADY), "fast": (100, STEADY), "middle": (200, STEADY)})
    assert [(p.candidate, p.rank, p.shared) for p in summary.ranking] == [
        ("fast", 1, False),
        ("middle", 2, False),
        ("slow", 3, False),
    ]
    assert summary.ranking[0].behind is None
    # Equal factors in every process: the ratio is exact, its interval a point.
    assert summary.ranking[2].behind.low == pytest.approx(3) == summary.ranking[2].behind.high


def test_those_whose_paired_interval_holds_one_share_a_rank_and_the_next_counts_them(ranked):
    summary = ranked({"a": (100, STEADY), "b": (104, WAVERING), "c": (300, STEADY)})
    assert [(p.candidate, p.rank, p.shared, p.like) for p in summary.ranking] == [
        ("a", 1, True, ("b",)),
        ("b", 1, True, ("a",)),
        ("c", 3, False, ()),
    ]
    assert [row[0] for row in ranking_table(summary).rows] == ["1=", "1=", "3"]


def test_pairing_tells_apart_what_moves_together(ranked):
    # Both waver by 20 % between processes, and one is 3 % slower in each. Without pairs the difference would be lost.
    summary = ranked({"a": (100, WAVERING), "b": (103, WAVERING)})
    assert [place.rank for place in summary.ranking] == [1, 2]


def test_being_alike_does_not_carry_over(ranked):
    # b wavers so that it is like both; a and c stand clearly apart, and the table says so.
    summary = ranked({"a": (100, STEADY), "b": (105, (1.08, 0.92, 1.0)), "c": (110, STEADY)})
    assert [(p.candidate, p.rank) for p in summary.ranking] == [("a", 1), ("b", 1), ("c", 3)]
    assert summary.ranking[1].like == ("a", "c")
    assert summary.ranking[2].like == ("b",)


def test_one_process_orders_nothing(ranked):
    summary = ranked({"a": (100, STEADY), "b": (300, STEADY)}, processes=1)
    assert [(p.rank, p.shared) for p in summary.ranking] == [(1, True), (1, True)]


def test_a_wrong_or_missing_output_takes_the_rank_away(ranked):
    times = {"right": (200, STEADY), "wrong": (100, STEADY), "gone": (100, STEADY)}
    summary = ranked(times, drop=[("gone", 1)], wrong=[("wrong", "b")])
    assert [(p.candidate, p.rank) for p in summary.ranking] == [("right", 1), ("wrong", None), ("gone", None)]
    assert "b" in summary.ranking[1].why and "every process" in summary.ranking[2].why
    assert [row[0] for row in ranking_table(summary).rows] == ["1", "-", "-"]


def test_a_run_of_one_candidate_has_no_ranking(ranked):
    summary = ranked({"alone": (100, STEADY)})
    assert summary.ranking == ()
    assert "Ranking of the candidates by event time" not in [table.title for table in all_tables(summary)]


def test_the_ranking_is_in_the_json(ranked):
    first, _ = ranked({"a": (100, STEADY), "b": (300, STEADY)}).as_dict()["ranking"]
    assert (first["candidate"], first["rank"], first["behind"]) == ("a", 1, None)
