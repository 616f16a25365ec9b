"""The ladder command and its figures without a GPU: shares by closed form, the tables, the plot, refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from xml.etree import ElementTree

import pytest
import torch

from rooflane.eval.cli import main
from rooflane.eval.commands import ladder as command
from rooflane.eval.device import ladder
from rooflane.eval.device.ladder import (
    COPY,
    LADDERS,
    Examined,
    Timed,
    compare_arms,
    find_rungs,
    measured_before,
    read_sizes,
    sizes_for,
)
from rooflane.eval.device.ladder_plot import plot_ladder
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.stats.mean import Interval
from rooflane.families.ladder import gemm, launch, reduce
from rooflane.families.resources.resource_gate import Resources

FOUND = Examined(Resources(100, 0, 1024, 2))


@pytest.fixture
def examined(monkeypatch):
    """Nothing is compiled: every rung is as expected, but for those that a test puts in."""
    told: dict[str, Examined] = {}
    monkeypatch.setattr(command, "examine", lambda rung: told.get(rung.name, FOUND))
    return told


def report_of(ladder_name: str, arms: dict[str, Timed], roofs: dict[str, float]) -> dict:
    sizes = [64] * (3 if ladder_name == "gemm" else 2)
    return {"ladder": ladder_name, "device": "a GPU", "sizes": sizes, "roofs": roofs, "refused": {}, "arms": arms}


def timed(rate: float, shares: dict[str, float], **more) -> Timed:
    intervals = {name: Interval(share, share * 0.9, share * 1.1, 5) for name, share in shares.items()}
    return Timed(rate, rate * 0.9, rate * 1.1, intervals, more.pop("roof", None), 1e-7, True, **more)


def test_a_share_is_the_ratio_of_rates_and_a_drift_cancels_in_a_pair():
    """The arm takes half the time for a third of the work; the machine slows down by a tenth from round to round."""
    times = {
        "library": [[1000], [1100], [1200], [1300]],
        # Within a pair the order is reversed, so a drift lies once before and once behind the other arm.
        "arm": [[500, 500], [550, 550], [600], [650]],
    }
    found = compare_arms(times, {"library": 3.0, "arm": 1.0}, ["library"])
    rates, shares = found["arm"]
    assert shares["library"].centre == pytest.approx(2 / 3)
    assert shares["library"].low == pytest.approx(2 / 3) and shares["library"].count == 2
    assert rates == pytest.approx([1e9 / 500, 1e9 / 550, 1e9 / 600, 1e9 / 650])
    assert found["library"][1]["library"].centre == 1.0


def test_work_counts_what_must_be_done():
    assert gemm.RUNGS[0].work(2, 3, 5) == 60
    by_task = {rung.task: rung.work(1 if rung.task == "sum" else 8, 100) for rung in reduce.RUNGS}
    assert by_task == {"sum": 404, "softmax": 6400, "layernorm": 6400, "rmsnorm": 6400, "argmax": 3232}


def test_sizes_are_read_and_a_sum_takes_all_as_one_row():
    assert read_sizes("gemm", None) == (4096, 4096, 4096)
    assert read_sizes("gemm", "1,2,3") == (1, 2, 3)
    total, rows = find_rungs("reduce", ["sum grid stride", "rmsnorm held"])
    assert sizes_for(total, read_sizes("reduce", None)) == (1, 1 << 26)
    assert sizes_for(rows, (3, 4)) == (3, 4)


@pytest.mark.parametrize("text", ["1,2", "1,2,3,4", "1,2,x", "0,1,1", ""])
def test_other_sizes_are_refused(text):
    with pytest.raises(EvaluationError, match="give M,N,K"):
        read_sizes("gemm", text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gemm", "--rung", "nave"], "name rungs of the gemm ladder: naive, coalesced"),
        (["gemm", "--size", "3"], "give M,N,K"),
        (["reduce", "--plot", "a.pdf"], "written as .svg or .png"),
        (["reduce", "--plot", "a.svg"], "torch reaches no GPU; run it on an H100"),
    ],
)
def test_what_cannot_be_run_is_told(arguments, said, capsys, monkeypatch, examined):
    monkeypatch.setattr(command, "gpu_obstacle", lambda: "torch reaches no GPU")
    with pytest.raises(SystemExit) as end:
        main(["ladder", *arguments])
    assert end.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


def test_without_a_gpu_the_rungs_are_examined_and_none_has_a_figure_of_its_own(capsys, monkeypatch, examined):
    monkeypatch.setattr(command, "gpu_obstacle", lambda: "torch reaches no GPU")
    monkeypatch.setattr(command, "measured_before", lambda name: {})
    with pytest.raises(SystemExit) as end:
        main(["ladder", "gemm"])
    out, err = capsys.readouterr()
    assert end.value.code == 0 and "not timed: torch reaches no GPU" in err
    assert out.count("not measured yet") == len(gemm.RUNGS) and out.count("as expected") == len(gemm.RUNGS)


def test_a_kept_report_gives_the_measured_figures(capsys, monkeypatch, examined):
    before = {"device": "NVIDIA H200", "sizes": [4096, 4096, 4096], "arms": {"naive": {"rate": 0.25e12}}}
    monkeypatch.setattr(command, "gpu_obstacle", lambda: "torch reaches no GPU")
    monkeypatch.setattr(command, "measured_before", lambda name: before)
    with pytest.raises(SystemExit):
        main(["ladder", "gemm", "--rung", "naive"])
    out = capsys.readouterr().out
    assert "measured on NVIDIA H200" in out and "measured 0.250" in out and "not measured" not in out


def test_a_fault_of_a_rung_fails_the_command(capsys, monkeypatch, examined):
    monkeypatch.setattr(command, "gpu_obstacle", lambda: "torch reaches no GPU")
    examined["naive"] = dataclasses.replace(FOUND, faults=("8 bytes spilled", "no FFMA"))
    with pytest.raises(SystemExit) as end:
        main(["ladder", "gemm", "--json"])
    out, err = capsys.readouterr()
    assert end.value.code == 20 and "naive FAILS: 8 bytes spilled; no FFMA" in err
    assert json.loads(out)["rungs"]["naive"]["faults"] == ["8 bytes spilled", "no FFMA"]


def test_without_nvrtc_the_reason_stands_in_place_of_figures(monkeypatch):
    monkeypatch.setattr(ladder, "nvrtc_version", lambda: None)
    found = ladder.examine(gemm.RUNGS[0])
    assert found.resources is None and not found.faults and "pip install 'rooflane[hopper]'" in found.note


def test_a_timed_ladder_is_printed_drawn_and_fails_on_a_wrong_rung(capsys, monkeypatch, examined, tmp_path):
    libraries = {"library fp32": 0.5, "library TF32": 0.1, "library fp16": 0.05}
    arms = {
        "library fp32": timed(50e12, dict.fromkeys(libraries, 1.0), roof=0.75),
        "naive": timed(0.5e12, libraries, roof=0.0075),
        "async copies": dataclasses.replace(
            timed(48e12, {**libraries, "library fp32": 0.96}), passed=False, why="its error is 1, above 1e-05"
        ),
    }
    report = report_of("gemm", arms, {"fp32": 66.9e12, "TF32": 535e12}) | {"refused": {"coalesced": "K is odd"}}
    monkeypatch.setattr(command, "gpu_obstacle", lambda: "")
    monkeypatch.setattr(command, "time_ladder", lambda rungs, sizes: report)
    path = tmp_path / "ladder.svg"
    with pytest.raises(SystemExit) as end:
        main(["ladder", "gemm", "--plot", str(path)])
    out = capsys.readouterr().out
    assert end.value.code == 20 and "async copies FAILS: its error is 1, above 1e-05" in out
    assert "96.0%" in out and "coalesced is left out: K is odd" in out
    texts = {text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert {"naive", "async copies", "library fp32"} <= texts
    # A mode that no rung of the run has gets no roof.
    assert any("fp32 66.9" in (text or "") for text in texts) and not any("TF32 535" in (text or "") for text in texts)


def test_a_wrong_or_unwritten_element_fails_its_rung_and_rates_come_from_the_rounds(monkeypatch):
    """On a CPU, with torch in the kernels' place: every call takes a microsecond."""
    right, wrong, unwritten = gemm.RUNGS[:3]

    def bind(rung, inputs, out):
        def call():
            torch.mm(inputs[0], inputs[1].T, out=out)
            if rung is wrong:
                out[0, 0] += 1.0
            if rung is unwritten:
                out[3, 4] = poison

        poison = out[3, 4].clone()
        return call

    monkeypatch.setattr(launch, "bind", bind)
    monkeypatch.setattr(ladder, "interleaved", lambda calls: {name: [[1000]] * 4 for name in calls})
    found = ladder._time_group(gemm.RUNGS[:3], (8, 16, 32), torch.device("cpu"), {"fp32": 2e10})
    assert [found[rung.name].passed for rung in (right, wrong, unwritten)] == [True, False, False]
    assert found[unwritten.name].error == math.inf and "above 1e-05" in found[wrong.name].why
    assert found[right.name].rate == pytest.approx(2 * 8 * 16 * 32 / 1e-6)
    assert found[right.name].roof == pytest.approx(8192 / 1e-6 / 2e10)
    assert found["library fp16"].roof is None and 1e-5 < found["library fp16"].error < 1e-2


def test_an_infinite_error_is_no_number_in_the_json():
    arm = dataclasses.replace(timed(1e12, {"library fp32": 1.0}), error=math.inf)
    (plain,) = ladder.as_plain(report_of("gemm", {"naive": arm}, {}))["arms"].values()
    assert plain["error"] is None and plain["shares"]["library fp32"]["count"] == 5


def test_each_task_is_compared_with_its_own_call_and_the_copy(capsys, monkeypatch, examined, tmp_path):
    arms = {
        "library sum": timed(4e12, {"library sum": 1.0, COPY: 0.95}),
        COPY: timed(4.2e12, {"library sum": 1.05, COPY: 1.0}),
        "sum atomics": timed(4e9, {"library sum": 0.001, COPY: 0.0009}),
        "library argmax": timed(3e12, {"library argmax": 1.0, COPY: 0.71}),
        "argmax held": timed(3.3e12, {"library argmax": 1.1, COPY: 0.785}),
    }
    monkeypatch.setattr(command, "gpu_obstacle", lambda: "")
    monkeypatch.setattr(command, "time_ladder", lambda rungs, sizes: report_of("reduce", arms, {}))
    with pytest.raises(SystemExit) as end:
        main(["ladder", "reduce"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "110.0%" in out and "78.5%" in out
    plot_ladder(report_of("reduce", arms, {}), tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_the_kept_report_of_a_ladder_is_that_of_the_command():
    """Once a run is kept with the package, it names rungs that exist; before, there is none."""
    for name, rungs in ladder.LADDERS.items():
        report = ladder.measured_before(name)
        if report:
            assert report["ladder"] == name and {rung.name for rung in rungs} & set(report["arms"])
            assert all(math.isfinite(arm["rate"]) for arm in report["arms"].values())


@pytest.mark.parametrize("ladder", ["gemm", "reduce"])
def test_the_briefs_plot_is_what_the_kept_report_gives(root, tmp_path, ladder):
    report = measured_before(ladder)
    arms = {
        name: Timed(*(arm[part] for part in ("rate", "low", "high", "shares", "roof", "error", "passed", "why")))
        for name, arm in report["arms"].items()
    }
    assert {rung.name for rung in LADDERS[ladder]} < set(arms), "every rung was measured"
    plot_ladder(report | {"arms": arms}, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == (root / "briefs" / "plots" / f"ladder_{ladder}.svg").read_text()
