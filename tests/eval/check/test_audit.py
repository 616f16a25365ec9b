"""The gate-power audit: the pattern it must show, the set it picks, and that verification runs that set."""

import json
import math

import pytest
import torch
from torch.nn import functional

from rooflane.eval.check import audit as audit_module
from rooflane.eval.check.audit import Audit, Finding, audit_gate
from rooflane.eval.check.formats import TF32, RoundedOperands
from rooflane.eval.check.stresses import CATALOGUE, KEPT, STRESS_SET, load_stress_set
from rooflane.eval.check.truth import PLAIN, STRESSES
from rooflane.eval.exit_codes import EvaluationError
from rooflane.shapes import Shape

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

SHAPES = [
    Shape("short", 2, 48, 64, 4, 64, 2, causal=False),
    Shape("causal", 2, 48, 64, 4, 64, 2, causal=True),
    Shape("long", 1, 256, 64, 1, 64, 1, causal=False),
]


@pytest.fixture(scope="module")
def audits():
    """The audit with the baseline's products in float32, and rounded as a GPU rounds them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {tf32: audit_gate(SHAPES, scales=(300,), tf32=tf32) for tf32 in (False, True)}
    torch.set_num_threads(threads)


@pytest.fixture
def few_faults(monkeypatch):
    """Three faults in place of two dozen, for tests of the audit's own steps."""
    every = audit_module.ablations
    monkeypatch.setattr(audit_module, "ablations", lambda window: every(window)[:3])


def use(audit, shape, condition, ablation):
    return next(
        finding.use
        for finding in audit.findings
        if (finding.shape, finding.condition, finding.ablation) == (shape, condition, ablation)
    )


@pytest.mark.parametrize("tf32", [False, True])
def test_the_known_pattern(audits, tf32):
    audit = audits[tf32]
    for shape in ("short", "causal", "long"):
        assert use(audit, shape, "plain", "tanh GELU") < 1
        assert use(audit, shape, "q_proj x 8", "tanh GELU") < 1
        assert use(audit, shape, "plain", "uniform attention") > 10
        assert use(audit, shape, "plain", "attention = 0") > 10
        # The residual stream swamps each block: what was caught a hundredfold comes near the limit or below it.
        assert use(audit, shape, "input x 300", "uniform attention") < 1
        assert use(audit, shape, "q_proj x 8", "exp cubic") > 100
    # Deleting attention passes at scale 300; causal rows see few keys, which makes them the harder test.
    assert use(audit, "short", "input x 300", "attention = 0") < 1
    assert use(audit, "long", "input x 300", "attention = 0") < 1
    # Where scores are averaged over many keys, the cubic polynomial passes unless attention is sharpened.
    assert use(audit, "long", "plain", "exp cubic") < 1
    # Lower scales are the harder test.
    assert use(audit, "short", "input x 0.1", "uniform attention") > use(audit, "short", "plain", "uniform attention")


@pytest.mark.parametrize("tf32", [False, True])
def test_the_recorded_set_catches_whatever_can_be_caught(audits, tf32):
    recorded = [stress.name for stress in load_stress_set()]
    assert audits[tf32].lost(recorded) == []
    assert {ablation for _, ablation in audits[tf32].unseen(recorded)} == {"tanh GELU"}
    # The record equals what the audit finds, and no picked stress can be left out.
    picked = json.loads(STRESS_SET.read_text())["picked"]
    assert set(audits[tf32].pick()) == set(picked)
    for name in picked:
        assert audits[tf32].lost([other for other in recorded if other != name])


def test_every_verification_runs_the_recorded_set():
    assert (PLAIN, *load_stress_set()) == STRESSES
    assert {stress.name for stress in STRESSES} >= {"q_proj x 8", "input x 0.1", "input x 3", "spikes"}
    assert set(KEPT) <= {stress.name for stress in CATALOGUE}


def test_without_norms_drawn_a_forgotten_norm_is_the_same_function(audits):
    audit = audits[False]
    for ablation in ("no norm bias", "no norm weight"):
        same = {finding.condition for finding in audit.findings if finding.ablation == ablation and finding.same}
        assert same == {*audit.always, *audit.stresses, *audit.asked} - {"norms drawn"}
    assert audit.same_everywhere() == ["no k_proj bias", "window 256"] or audit.same_everywhere() == ["no k_proj bias"]


def made(**uses):
    """Return an audit of one shape from uses per condition, ablation by ablation; None is the same function."""
    conditions = ("plain", "a", "b", "c")
    findings = [
        Finding(shape="s", condition=condition, ablation=name, use=value or 0.0, same=value is None)
        for name, values in uses.items()
        for condition, value in zip(conditions, values, strict=True)
    ]
    empty = {"seeds": 1, "window": 1, "tf32": False, "asked": ()}
    return Audit(shapes={"s": "s"}, always=("plain",), stresses=conditions[1:], findings=tuple(findings), **empty)


def test_the_smallest_cover_is_picked():
    # Only b shows three; beside it a and c both show the others, c more surely.
    audit = made(one=(0.1, 12, 0.2, 20), two=(0.1, 12, 0.3, 30), three=(0.1, 0.1, 20, 0.1))
    assert audit.pick() == ("b", "c")
    assert audit.needed_for("b") == [("s", "three")]
    assert audit.unseen(audit.pick()) == []


def test_nothing_is_picked_where_the_checks_run_anyway_are_enough():
    audit = made(one=(50, 0.1, 900, 0.1), hopeless=(0.2, 0.3, 0.9, 0.1))
    assert audit.pick() == ()
    assert audit.unseen(audit.stresses) == [("s", "hopeless")]


def test_a_narrow_catch_gives_way_to_a_sure_one():
    audit = made(one=(1.2, 2, 0.1, 500))
    assert audit.pick() == ("c",)
    # Where nothing is sure, the surest is asked for.
    assert made(one=(0.5, 2, 1.5, 0.1)).pick() == ("a",)


def test_not_a_number_is_caught():
    audit = made(one=(math.inf, 0.1, 0.1, 0.1))
    assert audit.unseen() == []


def test_seeds_keep_the_least_use(few_faults):
    shape = [Shape("tiny", 1, 16, 16, 2, 16, 1, causal=False)]
    one = audit_gate(shape)
    two = audit_gate(shape, seeds=2)
    assert all(b.use <= a.use for a, b in zip(one.findings, two.findings, strict=True))
    assert any(b.use < a.use for a, b in zip(one.findings, two.findings, strict=True))


def test_rounded_operands_are_those_of_tf32():
    a = torch.tensor([[1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12]])
    with RoundedOperands(TF32, TF32):
        got = torch.matmul(torch.diag(a[0]), torch.ones(4, 1)).flatten()
    # 10 bits of mantissa; ties go to even: 1 + 2^-11 to 1, 1 + 3 x 2^-11 to 1 + 2^-9.
    assert got.tolist() == [1 + 2**-10, 1.0, 1 + 2**-9, -1.0]
    with RoundedOperands(TF32, TF32):
        assert functional.linear(a.double(), a.double()).item() == (a.double() @ a.double().T).item()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seeds": 0}, "seeds and window must be"),
        ({"scales": (0,)}, "input scale 0 has no meaning"),
        ({"scales": (math.inf,)}, "input scale inf has no meaning"),
        ({"shapes": []}, "at least one shape"),
        ({"shapes": [Shape("huge", 32, 100000, 1024, 16, 1024, 4)]}, "shape huge: the audit's float64 scores need"),
    ],
)
def test_bad_requests_get_a_paragraph(options, text):
    with pytest.raises(EvaluationError, match=text):
        audit_gate(**options)


def test_a_record_that_names_no_known_stress_is_refused(tmp_path):
    path = tmp_path / "set.json"
    path.write_text('{"stresses": ["sideways"]}')
    with pytest.raises(ValueError, match="no stress input is called 'sideways'"):
        load_stress_set(path)


def test_sequences_of_a_batch_do_not_see_each_other_so_two_are_enough(few_faults):
    assert audit_module.AUDIT_ROWS == 2
    found = audit_gate([Shape("wide", 64, 8, 8, 2, 8, 1)])
    assert found.shapes["wide"].startswith("2x8x8")
