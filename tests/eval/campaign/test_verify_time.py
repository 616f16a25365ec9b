"""The time for checks: the same for every arm whatever came before it, and its own misses are an arm's own."""

import math
from types import SimpleNamespace

import pytest

from rooflane.eval import ExitCode, evaluate
from rooflane.eval.campaign import shape_work
from rooflane.eval.campaign.shape_work import VERIFY_EAGER_CALLS, VERIFY_LEAST_S, VERIFY_SHARE, ShapeWork
from rooflane.shapes import Shape

SHAPE = Shape("s", 2, 8, 16, 2, 16, 1)
BODY = "import time\ndef build(model, shape, device):\n    def forward(x, mask=None):\n        {}\n"


@pytest.mark.parametrize(
    ("share_s", "eager_s", "candidates", "expected"),
    [
        (float("inf"), 0.001, 2, float("inf")),  # no budget, no limit
        (4000.0, 0.001, 2, VERIFY_SHARE * 2000),  # a part of the shape's time, shared among the candidates
        (-50.0, 0.001, 2, VERIFY_LEAST_S),  # the time is gone: all checks of a quick shape still fit
        (10.0, 1.5, 1, VERIFY_EAGER_CALLS * 1.5),  # and those of a slow one
    ],
)
def test_an_arms_time_for_checks(share_s, eager_s, candidates, expected):
    work = ShapeWork.__new__(ShapeWork)
    work.share_s, work.eager_s = share_s, eager_s
    work.context = SimpleNamespace(candidates=tuple("abc"[:candidates]))
    assert work.verify_s() == pytest.approx(expected)


@pytest.mark.slow
def test_a_slow_candidate_misses_its_own_checks_and_no_one_elses(tmp_path, monkeypatch):
    # 0.2 s a call: a dozen calls spend two seconds, and the shape's time with them.
    monkeypatch.setattr(shape_work, "VERIFY_LEAST_S", 2.0)
    monkeypatch.setattr(shape_work, "VERIFY_EAGER_CALLS", 1)
    names = []
    for name, line in (("slow", "time.sleep(0.2); return model(x, mask)"), ("quick", "return model(x, mask)")):
        path = tmp_path / f"{name}.py"
        path.write_text(BODY.format(line) + "    return forward\n")
        names.append(str(path))
    run = evaluate(
        [SHAPE], names, processes=1, runs_dir=tmp_path / "runs", device="cpu", profile="cpu", controls=(),
        budget_s=0.02, rounds=2, repeats=2, warmups=1, time_budget_s=3.0,
    )  # fmt: skip
    slow, quick = (next(row for row in run.records() if row.arm == name) for name in names)
    assert (slow.status, quick.status) == ("ok", "ok")
    assert "promise 'second model': its time for checks was spent" in slow.verification.missed
    assert (quick.verification.missed, quick.verification.contract_class) == ([], "pure")
    summary = run.summary()
    assert summary.exit_code() is ExitCode.INCOMPLETE
    (problem,) = [line for line in summary.problems() if "not run" in line]
    assert f" of {names[0]}; a longer `--time-budget`" in problem


@pytest.mark.parametrize(("causal", "missed"), [(False, 2), (True, 0)])
def test_elements_left_out_for_the_references_time_are_missed(monkeypatch, causal, missed):
    """Causal rows depend on no later one, so the first rows of the others stand for them; others have no stand-in."""
    shape = Shape("o", 3, 8, 16, 2, 16, 1, causal=causal)
    work = SimpleNamespace(
        shape=shape, context=SimpleNamespace(device="cpu", process=0), seed=lambda purpose: 1,
        settings=SimpleNamespace(reference_budget_s=1.5), deadline=math.inf,
    )  # fmt: skip
    compared = shape_work.OversizeWork(work, row=None)
    # A second an element: the budget of 1.5 s has room for one.
    monkeypatch.setattr(compared, "_compare", lambda *asked: ("gate", 1_000_000_000))
    gates, times, notes, left_out = compared._compare_all(0.0)
    assert (len(times), len(gates)) == (1, 3 if causal else 1)
    assert notes[0] == "compared: 1 of 3 batch elements"
    assert left_out == ([f"comparison of {missed} batch elements: the reference's time was spent"] if missed else [])
