"""Dispatch regret: a wrong choice costs what it costs, and equal families cost nothing however many there are."""

import json
import math
import random

import pytest

from rooflane.dispatch import parse_rules
from rooflane.eval import cli
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.stats.regret import regret
from rooflane.eval.stats.run import create_run
from rooflane.shapes import Shape

SHAPES = [Shape("a", 2, 8, 16, 2, 16, 1), Shape("b", 1, 16, 16, 2, 16, 1)]
ALL_CHUNKED = 'replace = true\n[[rule]]\nname = "all"\nwhen = {}\nfamily = "chunked"\nbecause = "a test"\n'
BY_SHAPE = (
    'replace = true\n[[rule]]\nname = "first"\nwhen = { id = "a" }\nfamily = "chunked"\nbecause = "a test"\n'
    '[[rule]]\nname = "rest"\nwhen = {}\nfamily = "sdpa_flash"\nbecause = "a test"\n'
)


@pytest.fixture
def measured(tmp_path, make_meta, make_record):
    """Return a function that stores a run; `times` maps (arm, shape) to each process's microseconds."""

    def run(times, shapes=SHAPES, processes=4, wrong=()):
        arms = tuple(dict.fromkeys(arm for arm, _ in times))
        meta = make_meta(shapes, candidates=arms, processes=processes)
        stored = create_run(tmp_path / "runs", meta)
        for shape in shapes:
            for process in range(processes):
                stored.append([make_record(shape, process, "eager", (10_000_000, 10_000_000))])
                for arm in arms:
                    if (arm, shape.id) not in times:
                        continue
                    time = round(times[arm, shape.id][process] * 1000)
                    status = "incorrect" if (arm, shape.id) in wrong else "ok"
                    family, _, option = arm.partition(":")
                    options = {"budget_gib": float(option)} if option else {}
                    fields = {"family": family, "options": options, "status": status}
                    stored.append([make_record(shape, process, arm, (time, time), **fields)])
        return stored

    return run


def table(text=ALL_CHUNKED):
    return parse_rules(text, "rules.toml")


def test_a_wrong_choice_costs_the_ratio_of_the_times(measured):
    times = {
        ("chunked", "a"): [200] * 4, ("sdpa_flash", "a"): [100] * 4,
        ("chunked", "b"): [100] * 4, ("sdpa_flash", "b"): [400] * 4,
    }  # fmt: skip
    found = regret(measured(times), table())
    a, b = found.shapes
    assert (a.choice, a.best, b.choice, b.best) == ("chunked", "sdpa_flash", "chunked", "chunked")
    assert a.regret.centre == pytest.approx(2) and b.regret.centre == pytest.approx(1)
    assert found.table.centre == pytest.approx(math.sqrt(2))
    # One family for all: chunked loses sqrt(2) to the oracle, sdpa_flash 2; the best of them is the table's own.
    assert found.singles["sdpa_flash"].centre == pytest.approx(2)
    assert found.best_single.centre == pytest.approx(math.sqrt(2))
    assert found.single_over_table.centre == pytest.approx(1)


def test_a_table_that_chooses_by_shape_beats_one_family_for_all(measured):
    times = {
        ("chunked", "a"): [100] * 4, ("sdpa_flash", "a"): [200] * 4,
        ("chunked", "b"): [400] * 4, ("sdpa_flash", "b"): [100] * 4,
    }  # fmt: skip
    found = regret(measured(times), table(BY_SHAPE))
    assert found.table.centre == pytest.approx(1)
    assert found.single_over_table.centre == pytest.approx(math.sqrt(2))


def test_equal_families_cost_nothing_although_one_always_looks_best(measured):
    # Winner's curse: the best of five equal families looks about 2 % faster at 4 % noise in each process.
    draw = random.Random(5)
    shapes = [Shape(str(index), 2, 8, 16, 2, 16, 1) for index in range(40)]
    names = ["chunked", "sdpa_flash", "gemm_fp16", "graph_compile", "resident"]
    times = {
        (name, shape.id): [100 * math.exp(draw.gauss(0, 0.04)) for _ in range(4)] for name in names for shape in shapes
    }
    found = regret(measured(times, shapes), table())
    assert found.apparent > 1.015
    assert found.table.low < 1 < found.table.high
    assert found.table.centre - 1 < (found.apparent - 1) / 2


def test_a_wrong_output_is_no_oracle_and_a_choice_not_measured_is_left_out(measured):
    times = {("chunked", "a"): [200] * 4, ("sdpa_flash", "a"): [10] * 4, ("gemm_fp16", "a"): [100] * 4}
    times |= {("sdpa_flash", "b"): [100] * 4, ("gemm_fp16", "b"): [100] * 4}
    found = regret(measured(times, wrong=[("sdpa_flash", "a")]), table())
    assert [row.best for row in found.shapes] == ["gemm_fp16"]
    assert "chunked, which rule all chooses" in found.left_out["b"]


def test_the_choice_is_family_and_options(measured):
    times = {("chunked:0.5", "a"): [100] * 4, ("chunked", "a"): [200] * 4}
    text = ALL_CHUNKED + "options = { budget_gib = 0.5 }\n"
    found = regret(measured(times, SHAPES[:1]), table(text))
    assert found.shapes[0].choice == "chunked:0.5"
    assert found.table.centre == pytest.approx(1)


def test_what_cannot_be_judged_says_what_to_measure(measured):
    lone = measured({("chunked", "a"): [100]}, processes=1)
    with pytest.raises(EvaluationError, match="--processes 2"):
        regret(lone, table())


def test_one_family_alone_is_no_comparison(measured):
    with pytest.raises(EvaluationError, match=r"\(shape a, b: a second family was not .*\); .*beside each other"):
        regret(measured({("chunked", "a"): [100] * 4, ("chunked", "b"): [100] * 4}), table())


def test_the_command_prints_and_takes_a_table(measured, tmp_path, capsys):
    times = {("chunked", "a"): [200] * 4, ("sdpa_flash", "a"): [100] * 4}
    folder = measured(times, SHAPES[:1]).folder
    rules = tmp_path / "rules.toml"
    rules.write_text(ALL_CHUNKED)

    def run(*extra):
        with pytest.raises(SystemExit) as end:
            cli.main(["rules", "regret", str(folder), "--rules", str(rules), *extra])
        assert not end.value.code
        return capsys.readouterr().out

    assert json.loads(run("--json"))["table"]["centre"] == pytest.approx(2)
    assert "table over oracle: 2.00x" in run()
