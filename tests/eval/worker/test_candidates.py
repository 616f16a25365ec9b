"""From a name on the command line to a forward."""

import sys

import pytest
import torch

from rooflane.baseline import CONTROLS, build_baseline
from rooflane.dispatch import load_profile, load_rules
from rooflane.eval.campaign.requests import CONTROL_NAMES
from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.worker.candidates import Plan, build_candidate, parse_candidate, plan_candidate
from rooflane.shapes import Shape

CPU = torch.device("cpu")


def test_the_parents_list_of_controls_is_the_baselines():
    # The parent loads no torch, so it cannot ask; the two must not drift apart.
    assert sorted(CONTROLS) == sorted(CONTROL_NAMES)


def test_options_are_read_as_values():
    found = parse_candidate("chunked:budget_gib=0.5,operand_dtype=bfloat16")
    assert found.options == {"budget_gib": 0.5, "operand_dtype": "bfloat16"}
    assert parse_candidate("chunked:budget_gib=2").options == {"budget_gib": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonesuch", "dispatched, a family, or the path"),
        ("missing.py", "no file missing.py"),
        ("chunked:speed=1", "has no option 'speed'; it takes: "),
        ("chunked:budget_gib", "not key=value"),
        ("chunked:budget_gib=abc", "budget_gib is 'abc'; it must be a number above 0"),
        ("chunked:budget_gib=-1", "it must be a number above 0"),
        ("chunked:budget_gib=nan", "it must be a number above 0"),
        ("gemm_fp16:captured=1", "captured is 1; it must be true or false"),
        ("resident:operand_dtype=float32", "it must be float16 or bfloat16"),
    ],
)
def test_a_request_that_cannot_be_met_says_what_exists(text, said):
    with pytest.raises(EvaluationError, match=said):
        parse_candidate(text)


def test_a_routed_plan_names_rule_and_family(tiny_shape):
    plan = plan_candidate(parse_candidate("dispatched"), tiny_shape, load_profile("h200"), load_rules())
    assert (plan.family, plan.rule) == ("resident", "fits-one-sm")
    assert plan.predicted_s > 0
    assert plan.unsupported is None


def test_a_family_too_large_for_the_device_says_so(tiny_shape):
    profile = load_profile("cpu").with_figure("memory", 1e-6, "assumed", "test")
    for text in ("chunked", "dispatched"):
        plan = plan_candidate(parse_candidate(text), tiny_shape, profile, load_rules())
        assert "needs" in plan.unsupported


def build(path, text, shape):
    """Build a user's file and return its output and the reference's on one input."""
    path.write_text(text)
    model = build_baseline(shape, CPU, 1)
    forward, weights = build_candidate(parse_candidate(str(path)), Plan(), model, shape, CPU)
    x = torch.randn(shape.batch_size, shape.seq_len, shape.d_model)
    with torch.inference_mode():
        return forward(x, None), model(x), weights, model


def test_a_build_function_gets_the_model(tmp_path, tiny_shape):
    out, ref, weights, model = build(
        tmp_path / "mine.py", "def build(model, shape, device):\n    return lambda x, mask=None: model(x, mask) * 2\n",
        tiny_shape,
    )  # fmt: skip
    assert torch.equal(out, ref * 2)
    assert weights is model


def test_an_organisers_class_gets_config_then_weights(tmp_path, tiny_shape):
    text = (
        "from rooflane.baseline import BaselineTransformer\n"
        "class UserOptimizedTransformer(BaselineTransformer):\n"
        "    def forward(self, x, valid_token_mask=None):\n"
        "        return super().forward(x, valid_token_mask)\n"
    )
    out, ref, weights, model = build(tmp_path / "theirs.py", text, tiny_shape)
    assert torch.equal(out, ref)
    assert weights is not model
    assert not weights.training


def test_a_file_without_either_says_what_it_lacks(tmp_path, tiny_shape):
    with pytest.raises(EvaluationError, match="does not define build.*it defines: nothing"):
        build(tmp_path / "empty.py", "", tiny_shape)
    # What only running it can tell is told when it is run.
    with pytest.raises(AttributeError, match="none of build, UserOptimizedTransformer"):
        build(tmp_path / "empty.py", "globals()['bild'] = 1", tiny_shape)


def test_a_bf16_family_on_float32_is_named_by_its_options(tiny_shape):
    plan = plan_candidate(
        parse_candidate("chunked:operand_dtype=bfloat16"), Shape("s", 1, 8, 16, 2, 16, 1), load_profile("h200"), None
    )
    assert plan.options == {"operand_dtype": "bfloat16"}


@pytest.mark.parametrize("named", ["absolute", "relative", "from its own folder"])
def test_a_module_beside_the_file_is_imported_from_anywhere(tmp_path, tiny_shape, monkeypatch, named):
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for place, who in ((folder, "beside"), (elsewhere, "elsewhere")):
        place.mkdir()
        (place / f"rest_{named.split()[0]}.py").write_text(f"WHO = {who!r}\n")
    # Named like a module of Python's own that nothing has imported yet: Python's own wins.
    (folder / "stringprep.py").write_text("raise ImportError('this one shadows')\n")
    (folder / "mine.py").write_text(
        f"import rest_{named.split()[0]} as rest\nimport stringprep\n"
        "def build(model, shape, device):\n    return lambda x, mask=None: rest.WHO\n"
    )
    monkeypatch.delitem(sys.modules, "stringprep", raising=False)
    here = folder if named == "from its own folder" else elsewhere
    monkeypatch.chdir(here)
    # As a worker adds its working folder: last.
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    text = {"absolute": str(folder / "mine.py"), "relative": "../mine/mine.py"}.get(named, "mine.py")
    candidate = parse_candidate(text)
    forward, _ = build_candidate(candidate, Plan(), build_baseline(tiny_shape, CPU, 1), tiny_shape, CPU)
    assert forward(None) == "beside"
