"""The pytest plugin: the exact gate, where its tolerance comes from, and the messages of a failure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rooflane.eval.check.gate import ATOL, RTOL, check_gate
from rooflane.eval.pytest_plugin import assert_close_gate, fp64

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Return a function that runs a test file in this process, our plugin loaded as any installed one is."""

    def go(source: str, *options: str):
        pytester.makepyfile(source)
        # hypothesis imports itself at the end of every session, which takes seconds.
        return pytester.runpytest_inprocess("-p", "no:hypothesispytest", "--strict-markers", *options)

    return go


def fails(out, ref, **tolerance) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        assert_close_gate(torch.as_tensor(out), torch.as_tensor(ref), **tolerance)
    return str(caught.value)


def test_either_limit_lets_an_element_pass_and_both_are_inclusive():
    ref = torch.tensor([0.0, 0.0, 100.0, -100.0, 1.0], dtype=torch.float64)
    out = ref + torch.tensor([ATOL, -ATOL, 100 * RTOL, 2.0, 0.0], dtype=torch.float64)
    assert_close_gate(out, ref)
    # torch's allclose adds the limits up; here 0.0021 off 0.001 is over both and fails.
    near = torch.tensor([0.001], dtype=torch.float64)
    assert torch.allclose(near + 0.00201, near, rtol=0.02, atol=0.002)
    assert "1 of 1 elements fail" in fails(near + 0.00201, near)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_fails_even_where_both_sides_agree(bad):
    assert "not within any tolerance" in fails([1.0, bad], [1.0, bad])


def test_the_failure_names_the_worst_failing_element_not_the_largest_error():
    ref = torch.zeros(2, 3, 200)
    ref[0, 0, 0] = 1000.0
    out = ref.clone()
    out[0, 0, 0] += 10  # the largest error, within 2 %
    out[1, 2, 150] = 0.01
    message = fails(out, ref)
    assert "1 of 1200 elements fail (|err| <= 0.002 or |err| <= 0.02 |ref|" in message
    assert "worst element (1, 2, 150): got 0.01, expected 0, error 0.01, 5 times the tolerance" in message
    # One of the 6 x 72 elements of the second column tile.
    assert "worst tile: rows 0-5, columns 128-199: 0.2% of it fails" in message


@pytest.mark.parametrize(
    ("out", "ref", "words"),
    [
        (torch.ones(2), torch.ones(3), "shape (2,), the reference (3,)"),
        (torch.ones(0), torch.ones(0), "nothing to compare"),
        (torch.tensor(1.5), torch.tensor(1.0), "worst element (): got 1.5"),
    ],
)
def test_odd_shapes_have_their_own_message(out, ref, words):
    assert words in fails(out, ref)


def test_what_is_no_tensor_is_named():
    with pytest.raises(pytest.fail.Exception, match="the output is a list"):
        assert_close_gate([1.0], torch.ones(1))


def test_the_verdict_is_check_gates_on_random_errors():
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-4, 1e-3, 2e-3, 5e-3):
        ref = torch.randn(5, 7, generator=generator)
        out = ref + scale * torch.randn(5, 7, generator=generator)
        for atol, rtol in ((ATOL, RTOL), (0.0, 0.01), (0.003, 0.0)):
            passed = check_gate(out, ref, atol, rtol).passed
            if passed:
                assert_close_gate(out, ref, atol=atol, rtol=rtol)
            else:
                fails(out, ref, atol=atol, rtol=rtol)


def test_a_call_outside_of_range_says_so():
    with pytest.raises(ValueError, match="atol is -1; a tolerance is a finite number"):
        assert_close_gate(torch.ones(1), torch.ones(1), atol=-1)


OFF = "import torch, pytest\nfrom rooflane.eval.pytest_plugin import assert_close_gate\nONE = torch.ones(4)\n"


def test_the_tolerance_comes_from_call_then_marker_then_command_line_then_gate(run):
    source = OFF + (
        "def test_own(gate):\n    assert (gate.atol, gate.rtol) == (0.5, 0.25)\n"
        "@pytest.mark.rooflane(atol=0.125)\nclass TestMarked:\n"
        "    def test_class(self, gate):\n        assert (gate.atol, gate.rtol) == (0.125, 0.25)\n"
        "    @pytest.mark.rooflane(atol=1, rtol=2)\n"
        "    def test_nearer(self, gate):\n        assert (gate.atol, gate.rtol) == (1, 2)\n"
        "    def test_call(self, gate):\n        assert_close_gate(ONE + 3, ONE, atol=3)\n"
        "        assert not gate.check(ONE + 3, ONE).passed\n        assert gate.check(ONE + 3, ONE, rtol=3).passed\n"
    )
    run(source, "--rooflane-atol=0.5", "--rooflane-rtol", "0.25").assert_outcomes(passed=4)


def test_without_options_the_gate_is_the_evaluators(run):
    source = (
        "from rooflane.eval import ATOL, RTOL\ndef test_it(gate):\n    assert (gate.atol, gate.rtol) == (ATOL, RTOL)\n"
    )
    run(source).assert_outcomes(passed=1)


def test_a_failing_gate_shows_the_users_line_and_the_figures(run):
    result = run(
        OFF + "def test_it(gate):\n    gate(ONE + 0.1, ONE)\ndef test_same():\n    assert_close_gate(ONE + 1, ONE)\n"
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [">   *gate(ONE + 0.1, ONE)", "*4 of 4 elements fail*", "*worst tile: rows 0-0, columns 0-3*"]
    )
    result.stdout.no_fnmatch_line("*check_gate*")


WRONG_MARKERS = {
    "atol=-0.1": "atol is -0.1; a tolerance is a finite number of at least 0",
    "rtol=float('nan')": "rtol is nan",
    "atol='x'": "atol is 'x'; it must be a number",
    "tol=1": "was given tol",
    "0.1": "by name, and was given 0.1",
    "": "was given nothing",
}


def test_a_wrong_marker_fails_its_test_in_one_line(run):
    mark = "@pytest.mark.rooflane({})\ndef test_{}():\n    pass\n"
    tests = [mark.format(marker, index) for index, marker in enumerate(WRONG_MARKERS)]
    result = run(OFF + "".join(tests) + "def test_other():\n    pass\n")
    result.assert_outcomes(errors=len(WRONG_MARKERS), passed=1)
    for index, words in enumerate(WRONG_MARKERS.values()):
        result.stdout.fnmatch_lines([f"*::test_{index}: @pytest.mark.rooflane *{words}*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_wrong_option_is_a_usage_error(run):
    result = run("def test_it(): pass\n", "--rooflane-atol=-1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--rooflane-atol is -1; a tolerance is a finite number*"])


def test_a_shape_file_becomes_parameters(run, pytester):
    header = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\n"
    pytester.path.joinpath("mine.csv").write_text(header + "a,1,8,16,1,16,1,true\nb,2,8,16,1,16,1,false\n")
    source = OFF + (
        "@pytest.mark.shapes('mine.csv')\ndef test_mine(shape):\n    assert shape.tokens == 8 * shape.batch_size\n"
        "@pytest.mark.shapes('published.csv', ids=['2', '14'])\ndef test_ours(shape):\n    assert shape.causal\n"
        "@pytest.mark.shapes('mine.csv', ids=['b'])\n@pytest.mark.parametrize('scale', [1, 2])\n"
        "def test_both(shape, scale):\n    assert shape.batch_size == 2\n"
    )
    result = run(source, "-v")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*test_mine[[]a] PASSED*", "*test_ours[[]14] PASSED*", "*test_both[[]b-1] PASSED*"])


WRONG_SHAPES = [
    ("'gone.csv'", "shape", "there is no shape file gone.csv; looked in"),
    ("'published.csv', ids=['99']", "shape", "holds no shape '99'; its ids: 1, 2"),
    ("'published.csv', ids='2'", "shape", "ids is '2'; give a list with at least one id"),
    ("'published.csv', ids=[]", "shape", "ids is [[]]; give a list with at least one id"),
    ("'published.csv'", "", "takes no argument `shape`"),
    ("", "shape", "takes a shape file and ids"),
    ("'bad.csv'", "shape", "bad.csv:2: column batch_size: '0'"),
]


def test_a_wrong_shapes_marker_fails_the_collection_in_one_line(run, pytester):
    header = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\n"
    pytester.path.joinpath("bad.csv").write_text(header + "a,0,8,16,1,16,1,true\n")
    files = {
        f"test_{index}": OFF + f"@pytest.mark.shapes({marker})\ndef test_it({argument}):\n    pass\n"
        for index, (marker, argument, _) in enumerate(WRONG_SHAPES)
    }
    pytester.makepyfile(**files)
    result = run("def test_right():\n    pass\n")
    result.assert_outcomes(errors=len(WRONG_SHAPES))
    for index, (_, _, words) in enumerate(WRONG_SHAPES):
        result.stdout.fnmatch_lines([f"*test_{index}.py::test_it: *{words}*"])
    result.stdout.no_fnmatch_line("*Traceback*")


FOREIGN = {
    "names": "@pytest.mark.shapes('circle', 'square')\ndef test_it():\n    pass\n",
    "numbers": "@pytest.mark.shapes(3, 4, sides=2)\ndef test_it(shape):\n    assert shape == 12\n",
    "a fixture": "@pytest.mark.shapes('published.csv')\ndef test_it(shape):\n    assert shape == 12\n",
    "parameters": "@pytest.mark.shapes('published.csv')\n@pytest.mark.parametrize('n, shape', [(1, 12)])\n"
    "def test_it(n, shape):\n    assert shape == 12\n",
    "the other marker": "@pytest.mark.rooflane('attic', north=True)\ndef test_it():\n    pass\n",
    "the other marker without anything": "@pytest.mark.rooflane\ndef test_it():\n    pass\n",
}


@pytest.mark.parametrize("declared", [True, False])
def test_markers_that_a_project_means_otherwise_are_left_alone(run, pytester, declared):
    if declared:
        pytester.makeini("[pytest]\nmarkers =\n    shapes: of windows\n    rooflane: a roof\n")
    head = "import pytest\n@pytest.fixture\ndef shape():\n    return 12\n"
    pytester.makepyfile(**{f"test_{i}": head + source for i, source in enumerate(FOREIGN.values())})
    run("def test_other():\n    pass\n").assert_outcomes(passed=len(FOREIGN) + 1)


def test_a_project_with_such_markers_may_use_ours_too(run, pytester):
    pytester.makeini("[pytest]\nmarkers =\n    shapes: of windows\n    rooflane: a roof\n")
    source = (
        "import pytest\n@pytest.mark.shapes('published.csv', ids=['2'])\n@pytest.mark.rooflane(atol=0.5)\n"
        "def test_it(shape, gate):\n    assert shape.id == '2' and gate.atol == 0.5\n"
        "@pytest.mark.rooflane('attic')\ndef test_wrong(gate):\n    pass\n"
    )
    run(source).assert_outcomes(passed=1, errors=1)


GPU_TEST = "import pytest\n@pytest.mark.gpu\ndef test_it():\n    raise RuntimeError('ran')\n"


def test_gpu_tests_skip_where_there_is_none_and_run_where_there_is(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(GPU_TEST, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*needs a CUDA device"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run(GPU_TEST).assert_outcomes(failed=1)


def test_a_project_that_has_a_gpu_marker_keeps_its_own_meaning(run, pytester, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makeini("[pytest]\nmarkers = gpu: ours\n")
    run(GPU_TEST).assert_outcomes(failed=1)


def test_the_fp64_helper_leaves_the_model_alone(run):
    layer = torch.nn.Linear(3, 2)
    x, mask = torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    truth = fp64(layer, x)
    assert truth.dtype == torch.float64 and not truth.requires_grad
    assert layer.weight.dtype == torch.float32
    assert torch.allclose(truth, x.double() @ layer.weight.double().T + layer.bias.double(), rtol=0, atol=1e-15)
    # Masks stay what they are; functions compute in the dtype they are given.
    seen = fp64(lambda value, *, valid: (value.dtype, valid.dtype), x, valid=mask)
    assert seen == (torch.float64, torch.bool)
    source = (
        OFF + "def test_it(gate, fp64_reference):\n    gate(torch.sin(ONE).double(), fp64_reference(torch.sin, ONE))\n"
    )
    run(source).assert_outcomes(passed=1)


def test_a_real_kernel_is_gated_over_a_shape_file(run):
    source = OFF + (
        "from rooflane.baseline import build_baseline, config_of, generate_random_case\n"
        "@pytest.mark.shapes('neighbours.csv', ids=SOME)\ndef test_family(shape, gate, fp64_reference):\n"
        "    from rooflane.families import get_family\n"
        "    model = build_baseline(shape, 'cpu', seed=1)\n"
        "    fast = get_family('sdpa_flash').build(model, shape, torch.device('cpu'))\n"
        "    x, mask = generate_random_case(config_of(shape), 'cpu', torch.float32, 2, 0.3)\n"
        "    with torch.inference_mode():\n        gate(fast(x, mask).double(), fp64_reference(model, x, mask))\n"
    )
    from rooflane.shapes import load_shapes

    path = os.path.join(os.path.dirname(__file__), "..", "..", "shapes", "neighbours.csv")
    smallest = min(load_shapes(path), key=lambda shape: shape.tokens * shape.d_model)
    run(source.replace("SOME", repr([smallest.id]))).assert_outcomes(passed=1)


def test_a_plain_run_loads_no_torch_and_little_else(pytester):
    pytester.makepyfile(
        "import sys\ndef test_it():\n"
        "    heavy = {'torch', 'numpy', 'pydantic', 'typer', 'rich', 'scipy', 'triton'} & sys.modules.keys()\n"
        "    assert not heavy, heavy\n"
        "    assert 'rooflane.eval.pytest_plugin' in sys.modules\n"
        "    assert len([name for name in sys.modules if name.startswith('rooflane')]) < 12\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Only what is ours: other packages' plugins load what they like.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command += ["-p", "rooflane.eval.pytest_plugin"]
    done = subprocess.run(command, cwd=pytester.path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_installing_rooflane_registers_the_plugin(pytestconfig):
    from importlib.metadata import entry_points

    (entry,) = [entry for entry in entry_points(group="pytest11") if entry.name == "rooflane"]
    assert entry.value == "rooflane.eval.pytest_plugin"
    assert pytestconfig.pluginmanager.hasplugin("rooflane")
