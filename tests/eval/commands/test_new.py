"""rooflane new candidate: what it writes runs as it is, is right, and never costs a file that was there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import triton.language  # noqa: F401  read TRITON_INTERPRET now: a test below takes it away

from rooflane.baseline import build_baseline, copy_model_weights
from rooflane.eval.exit_codes import EvaluationError, ExitCode
from rooflane.eval.worker.candidates import Plan, build_candidate, check_source, parse_candidate
from rooflane.shapes import Shape

# Tens of seconds in all: `make check` leaves them out.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]

CPU = torch.device("cpu")
RAGGED = Shape("ragged", 3, 7, 24, 3, 40, 2, causal=True, padding_ratio=0.4)
FULL = Shape("full", 2, 5, 16, 2, 24, 1, causal=False)
HALF = Shape("half", 2, 6, 16, 2, 24, 2, dtype="bfloat16")
# An ulp of bfloat16 is 0.8 %: two right forwards differ by more than the gate allows in one case of a few.
HALF_ON_GPU = replace(HALF, dtype="float16")
# The interpreter takes a millisecond for each row of each call, and cuts bfloat16 where a GPU rounds it.
SMALL = Shape("small", 2, 3, 12, 3, 20, 1, causal=True, padding_ratio=0.4)


@pytest.mark.parametrize("style", ["build", "class"])
@pytest.mark.parametrize(
    ("path", "shape", "device"),
    [
        *(pytest.param("torch", shape, "cpu", id=f"torch {shape.id}") for shape in (RAGGED, FULL, HALF)),
        pytest.param("kernel", SMALL, "cpu", id="kernel interpreted"),
        *(
            pytest.param("kernel", shape, "cuda", id=f"kernel {shape.id}", marks=pytest.mark.gpu)
            for shape in (RAGGED, FULL, HALF_ON_GPU)
        ),
    ],
)
def test_the_template_is_right_and_keeps_every_promise(
    rooflane, verify_here, tmp_path, monkeypatch, style, path, shape, device
):
    # Without a GPU the kernel is interpreted: conftest sets TRITON_INTERPRET before Triton is imported.
    if path == "torch":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert rooflane("new", "candidate", "--out", f"{style}_{path}.py", "--style", style)[0] == 0
    device = torch.device(device)
    reference = build_baseline(shape, device, 1)
    model = build_baseline(shape, device, 1)
    copy_model_weights(reference, model)
    candidate = parse_candidate(str(tmp_path / f"{style}_{path}.py"))
    forward, weights = build_candidate(candidate, Plan(), model, shape, device)

    def make(model):
        return build_candidate(candidate, Plan(), model, shape, device, again=True)

    found = verify_here(forward, weights, reference, shape, device, make=make, seed=3, trials=2)
    assert (found.status, found.reason, found.contract) == ("ok", "", [])
    assert found.gate.use < 1


def test_the_kernel_is_what_runs_where_it_can(rooflane, tmp_path):
    # So that the test above cannot pass without it.
    rooflane("new", "candidate")
    scope: dict[str, object] = {}
    exec(compile((tmp_path / "my_kernel.py").read_text(), "my_kernel.py", "exec"), scope)
    if not torch.cuda.is_available():
        assert scope["INTERPRETED"]
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **options: launched.append((grid, options["BLOCK"]))

    scope["add_norm_kernel"] = Kernel()
    x = torch.randn(2, 3, 24, device="cuda" if torch.cuda.is_available() else "cpu")
    scope["add_norm"](x, x, torch.nn.LayerNorm(24).to(x.device))
    assert launched == [((6,), 32)]


@pytest.mark.slow
def test_both_styles_run_through_the_command_it_prints(rooflane, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _, out, _ = rooflane("new", "candidate")
    assert out.rstrip().endswith("rooflane eval published.csv --shape 2 --candidate my_kernel.py")
    rooflane("new", "candidate", "--out", "class_form.py", "--style", "class")
    header = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\n"
    (tmp_path / "tiny.csv").write_text(header + "a,2,8,16,2,24,1,true\n")
    status, out, err = rooflane(
        "eval", "tiny.csv", "--candidate", "my_kernel.py", "--candidate", "class_form.py:UserOptimizedTransformer",
        "--control", "none", "--processes", "1", "--budget", "0.05", "--device", "cpu", "--profile", "cpu", "--json",
    )  # fmt: skip
    assert status == ExitCode.COMPLETE, err
    ranking = json.loads(out)["ranking"]
    assert {place["candidate"] for place in ranking} == {"my_kernel.py", "class_form.py:UserOptimizedTransformer"}
    # One process cannot separate two candidates.
    assert [place["rank"] for place in ranking] == [1, 1]


def test_the_command_it_prints_can_be_pasted(rooflane, tmp_path):
    status, out, _ = rooflane("new", "candidate", "--out", tmp_path / "my kernel.py")
    assert status == 0 and out.rstrip().endswith(f"--candidate '{tmp_path / 'my kernel.py'}'")


def test_a_file_that_is_there_stays(rooflane, tmp_path):
    (tmp_path / "my_kernel.py").write_text("mine")
    status, _, err = rooflane("new", "candidate")
    assert status == ExitCode.USAGE and "exists already" in err and "--out" in err
    assert (tmp_path / "my_kernel.py").read_text() == "mine"


@pytest.mark.parametrize(("name", "words"), [("kernel.txt", "ends in .py"), ("gone/kernel.py", "path exists")])
def test_a_name_that_cannot_be_written_says_why(rooflane, name, words):
    status, _, err = rooflane("new", "candidate", "--out", name)
    assert status == ExitCode.USAGE and words in err


MAY_DEFINE = [
    "def build(model, shape, device): ...",
    "class UserOptimizedTransformer: ...",
    "build = lambda model, shape, device: None",
    "from elsewhere import make as build",
    "from elsewhere import *",
    "try:\n    import fast\nexcept ImportError:\n    def build(*a): ...\nelse:\n    build = fast.make",
    "if True:\n    with open('x') as build: ...",
    "a, (build, c) = 1, (2, 3)",
    "exec('def build(): ...')",
    "globals()['build'] = 1",
    "def __getattr__(name): ...",
]


def test_a_file_that_may_define_it_is_let_through(tmp_path):
    for text in MAY_DEFINE:
        (tmp_path / "c.py").write_text(text)
        check_source("c.py", tmp_path / "c.py", ("build", "UserOptimizedTransformer"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def bild(): ...", "does not define build.*it defines: bild. Name what is to be built as c.py:NAME"),
        ("def make():\n    def build(): ...", "it defines: make"),
        ("", "it defines: nothing"),
        # Kernels, imports and variables cannot be built, so they are no choices.
        ("import os\nBLOCK = 3\n@triton.jit\ndef kernel(x): ...\ndef make(): ...", "it defines: make[.] Name"),
        ("x = 1\ndef build(:\n", "c.py:2: not valid Python"),
        ("x = '\0'", "c.py.*(not valid Python|cannot be read)"),
    ],
)
def test_a_file_that_plainly_does_not_is_refused_unrun(tmp_path, text, words):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(EvaluationError, match=words):
        check_source("c.py", tmp_path / "c.py", ("build", "UserOptimizedTransformer"))


def test_a_name_asked_for_is_the_one_looked_for(tmp_path):
    (tmp_path / "c.py").write_text("def build(): ...\ndef other(): ...")
    assert parse_candidate(f"{tmp_path}/c.py:other").attribute == "other"
    with pytest.raises(EvaluationError, match="does not define third; it defines: build, other"):
        parse_candidate(f"{tmp_path}/c.py:third")
