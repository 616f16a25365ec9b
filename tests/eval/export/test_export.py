"""The exported file: what it holds, that it runs without rooflane, and that it gives what rooflane gives."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import product

import pytest
import torch

from rooflane.baseline import build_baseline, config_of, copy_model_weights, generate_random_case
from rooflane.dispatch import load_profile, load_rules
from rooflane.eval import cli
from rooflane.eval.exit_codes import ExitCode
from rooflane.eval.export.collect import LIBRARIES, ExportError
from rooflane.eval.export.write import export, write_export
from rooflane.eval.submit.parse import parse_output
from rooflane.eval.worker.candidates import build_candidate, parse_candidate, plan_candidate
from rooflane.families.fused.attention import plan_attention
from rooflane.families.fused.products import RESIDUAL
from rooflane.families.resident.config import H200
from rooflane.families.resident.kernels.sm90_row_blocks import RowBlocks
from rooflane.families.resident.kernels.sm90_warpgroups import Warpgroups
from rooflane.families.resident.spec import choose
from rooflane.shapes import Shape, load_shapes

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

SMALL = Shape("small", 2, 24, 32, 2, 48, 2, True)
FULL = Shape("full", 3, 16, 16, 2, 16, 1, False)
# Runs a file as a program where `rooflane` cannot be imported, whatever is installed.
ISOLATED = """
import importlib.abc, runpy, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "rooflane":
            raise ModuleNotFoundError("rooflane is blocked")
sys.meta_path.insert(0, Block())
try:
    import rooflane.shapes
    sys.exit("not isolated")
except ModuleNotFoundError:
    pass
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def exported(shapes, candidate="dispatched", profile="cpu"):
    return export(shapes, parse_candidate(candidate), load_profile(profile), load_rules())


def load_text(text, path):
    """Write an export and load it as a module, as a candidate file is loaded."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"exported_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def load(tmp_path):
    """Return a function that writes an export and loads it as a module."""
    return lambda found, name="submission": load_text(found.text, tmp_path / f"{name}.py")


@pytest.fixture(scope="module")
def published_on_h200(root):
    return exported(load_shapes(root / "shapes" / "published.csv"), profile="h200")


@pytest.fixture(scope="module")
def published_module(published_on_h200, tmp_path_factory):
    return load_text(published_on_h200.text, tmp_path_factory.mktemp("published") / "submission.py")


def test_the_file_imports_only_torch_what_it_brings_and_the_standard_library(published_on_h200, published_module):
    tops = set()
    modules = [text for path, text in published_module.FILES.items() if path.endswith(".py")]
    for text in (published_on_h200.text, *modules):
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            tops |= {name.split(".")[0] for name in names}
    assert {"torch", "triton", "rooflane"} <= tops
    assert tops <= LIBRARIES | {"rooflane", "ninja"} | set(sys.stdlib_module_names)


def test_the_file_holds_whole_sources_as_they_stand(published_module, root):
    # Kernels are tuned text: not one character may differ.
    for path, text in published_module.FILES.items():
        assert text == (root / path.removeprefix("rooflane/")).read_text(), path
    folders = {path.rpartition("/")[0] for path in published_module.FILES}
    assert {"rooflane/families/resident", "rooflane/families/lean", "rooflane/shapes"} <= folders
    # A folder's C++ and CUDA files come with it.
    for folder in folders:
        files = (root / folder.removeprefix("rooflane/")).iterdir()
        names = {f"{folder}/{item.name}" for item in files if item.suffix in (".cpp", ".cu", ".cuh")}
        assert names <= published_module.FILES.keys()


def test_the_file_holds_the_cuda_kernels_as_the_package_does(load, root):
    """A small causal batch: the exported text must give the same translation units, not merely some."""
    (shape,) = [shape for shape in load_shapes(root / "shapes" / "published.csv") if shape.id == "2"]
    embedded = load(exported([shape], profile="h200")).embedded
    kernels = embedded.import_module("rooflane.families.resident.kernels.sm90_warpgroups")
    choice = embedded.import_module("rooflane.families.resident.spec")
    limits = embedded.import_module("rooflane.families.resident.config").H200
    small = choose(shape, H200).config
    assert isinstance(small, RowBlocks)
    mine = choice.choose(shape, limits).config.source(True, False)
    assert mine == small.source(True, False) and "resident_rowblocks(" in mine
    wide = Warpgroups.try_plan(shape, H200).source(True, False)
    assert kernels.Warpgroups.try_plan(shape, limits).source(True, False) == wide


def test_the_file_holds_the_fused_kernels_as_the_package_does(load, root):
    """Their files lie in two packages, of which one includes the other's."""
    (shape,) = [shape for shape in load_shapes(root / "shapes" / "published.csv") if shape.id == "8"]
    found = exported([shape], profile="h200")
    embedded = load(found).embedded
    assert found.families == ("fused",)
    products = embedded.import_module("rooflane.families.fused.products")
    assert products.RESIDUAL.source() == RESIDUAL.source() and "gemm_persistent(" in RESIDUAL.source()
    attention = embedded.import_module("rooflane.families.fused.attention")
    mine = plan_attention(256, 4, True).source()
    assert attention.plan_attention(256, 4, True).source() == mine and "barrier_wait(full" in mine


def test_the_file_holds_no_family_the_shapes_do_not_need(load):
    found = exported([SMALL], "chunked")
    files = load(found).FILES
    assert found.families == ("chunked",) and "rooflane/families/chunked/build.py" in files
    for other in ("resident", "sdpa_flash", "graph_compile", "gemm_fp16"):
        assert not any(path.startswith(f"rooflane/families/{other}/") for path in files), other
    assert not any(path.startswith("rooflane/dispatch") for path in files)


def test_no_module_of_the_file_is_an_installed_one(published_module):
    """The installed rooflane of this process is left alone, and the file's classes are its own."""
    import rooflane.baseline as installed

    base = published_module.UserOptimizedTransformer.__mro__[2]
    assert base.__name__ == "BaselineTransformer" and base is not installed.BaselineTransformer
    assert base.__module__.startswith("rooflane_") and sys.modules["rooflane.baseline"] is installed


def test_two_files_in_one_process_keep_to_their_own_sources(load):
    first, second = load(exported([SMALL], "chunked"), "first"), load(exported([SMALL], "sdpa_flash"), "second")
    assert first.UserOptimizedTransformer.__module__ != second.UserOptimizedTransformer.__module__
    again = load(exported([FULL], "chunked"), "again")
    assert {family.name for family, _, _ in again.runtime.PLANS.values()} == {"chunked"}


def test_a_traceback_shows_the_line_and_the_module(load):
    module = load(exported([SMALL], "chunked"))
    with pytest.raises(Exception) as caught:
        module.UserOptimizedTransformer(None)
    last = caught.traceback[-1]
    assert "/baseline/" in str(last.path) and last.path.is_file()
    assert "config" in str(last.statement)


def test_the_header_names_origin_shapes_families_and_licence(published_on_h200, root):
    header = ast.get_docstring(ast.parse(published_on_h200.text))
    assert header.startswith("Generated by rooflane 0.1.0 (commit ")
    assert "1: 64x128x128 h4 f128 l4 causal: resident" in header
    assert f"families: {', '.join(published_on_h200.families)}" in header
    assert (root / "LICENSE").read_text().strip() in header


def test_one_request_gives_one_text():
    assert exported([SMALL, FULL], "chunked").text == exported([SMALL, FULL], "chunked").text


@pytest.mark.parametrize("family", ["sdpa_flash", "chunked"])
def test_the_class_gives_what_the_family_gives(load, family):
    rules, profile, candidate = load_rules(), load_profile("cpu"), parse_candidate(family)
    module = load(export([SMALL, FULL], candidate, profile, rules))
    for shape, padding in product([SMALL, FULL], [0.0, 0.5]):
        plan = plan_candidate(candidate, shape, profile, rules)
        baseline = build_baseline(shape, "cpu", 3)
        model = module.UserOptimizedTransformer(config_of(shape))
        copy_model_weights(baseline, model)
        model.to(torch.float32).eval()
        x, mask = generate_random_case(config_of(shape), "cpu", torch.float32, 5, padding)
        forward, _ = build_candidate(candidate, plan, baseline, shape, torch.device("cpu"))
        with torch.inference_mode():
            out = model(x, mask)
            assert torch.equal(out, forward(x, mask)), (shape.id, padding)
            assert not torch.equal(out, baseline(x, mask)), f"the fallback ran: {shape.id}, {padding}"


def test_other_shapes_run_as_plain_torch(load):
    module = load(exported([SMALL], "sdpa_flash"))
    baseline = build_baseline(FULL, "cpu", 3)
    model = module.UserOptimizedTransformer(config_of(FULL)).eval()
    copy_model_weights(baseline, model)
    x, mask = generate_random_case(config_of(FULL), "cpu", torch.float32, 5, 0.5)
    with torch.inference_mode(), pytest.warns(UserWarning, match="plain torch runs"):
        assert torch.equal(model(x, mask), baseline(x, mask))


def test_a_family_for_gpus_falls_back_on_a_cpu(published_module):
    shape = Shape("12", 64, 32, 128, 4, 128, 4, True)
    model = published_module.UserOptimizedTransformer(config_of(shape)).eval()
    with torch.inference_mode(), pytest.warns(UserWarning, match="on cpu: plain torch runs"):
        assert model(torch.randn(64, 32, 128)).shape == (64, 32, 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
def test_exported_kernels_are_real_sources_that_triton_can_read(published_module):
    ours = published_module.embedded.import_module("rooflane.families.lean.attention")
    qkv = torch.randn(2, 20, 3 * 32).half()
    mask = torch.arange(20)[None, :] < torch.tensor([20, 13])[:, None]
    out = ours.attention(qkv, mask, ours.mask_extent(mask), 2, True).float()
    from rooflane.families.lean.lean import torch_attention

    expected = torch_attention(qkv.float(), mask, None, 2, True)
    assert torch.allclose(out[mask], expected[mask], atol=5e-3)


COMPILE = """
import importlib.util, re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rooflane.families.resources.resource_gate import shipped_cases
spec = importlib.util.spec_from_file_location("exported", sys.argv[1])
exported = importlib.util.module_from_spec(spec)
sys.modules["exported"] = exported
spec.loader.exec_module(exported)
def same(function):
    module = exported.embedded.import_module(function.fn.__module__)
    assert module.__name__ != function.fn.__module__
    return getattr(module, function.fn.__name__)
def ptx(case, function):
    names = function.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(ASTSource(function, signature, constants, {}), GPUTarget("cuda", 90, 32), options)
    kept = re.sub(r"(?m)^\\s*(\\.loc|\\.file|//).*$", "", compiled.asm["ptx"])
    return [line.strip() for line in kept.split(".section")[0].splitlines() if line.strip()]
wanted = ("gelu", "add_norm d128", "mask_extent")  # seconds to compile; the others' text is compared above
cases = [case for case in shipped_cases().values() if case.name in wanted and case.architecture.number == 90]
assert len(cases) == 3
for case in cases:
    mine, ours = ptx(case, same(case.load())), ptx(case, case.load())
    assert len(ours) > 20 and mine == ours, case.name
print("same")
"""


@pytest.mark.slow
def test_exported_kernels_compile_to_the_same_instructions(tmp_path, published_on_h200):
    path = tmp_path / "submission.py"
    path.write_text(published_on_h200.text)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, path], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"


def test_the_file_passes_the_stand_in_where_rooflane_cannot_be_imported(tmp_path, root):
    path = tmp_path / "submission.py"
    path.write_text(exported([SMALL], "sdpa_flash").text)
    sizes = "--batch-size 2 --seq-len 24 --d-model 32 --heads 2 --ffn-dim 48 --layers 2 --causal"
    least = "--device cpu --accuracy-trials 2 --repeats 2 --warmup 1 --benchmark-rounds 2 --padding-ratio 0.4"
    command = [sys.executable, "-c", ISOLATED, path, root / "tests" / "standin" / "benchmark.py"]
    done = subprocess.run(
        [*command, *sizes.split(), *least.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    figures = parse_output(done.stdout, SMALL.tokens, (2, 24, 32, 2, 48, 2, True))
    assert figures.accuracy.passed and figures.accuracy.max_abs > 0 and figures.speedup > 0
    assert "plain torch" not in done.stderr


def test_the_file_without_a_script_says_how_it_is_used(load, monkeypatch):
    module = load(exported([SMALL], "chunked"))
    monkeypatch.setattr(sys, "argv", ["my_submission.py"])
    with pytest.raises(SystemExit, match="usage: python my_submission.py ORGANISER.py"):
        module.runtime.run()


def test_the_file_refuses_what_is_no_script_of_the_organisers(load, monkeypatch, tmp_path):
    module = load(exported([SMALL], "chunked"))
    (tmp_path / "other.py").write_text("print('hello')\n")
    for name, said in (("missing.py", "cannot be read"), ("other.py", "no UserOptimizedTransformer")):
        monkeypatch.setattr(sys, "argv", ["my_submission.py", str(tmp_path / name)])
        with pytest.raises(SystemExit, match=f"{name}: .*{said}"):
            module.runtime.run()


@pytest.fixture
def rooflane(tmp_path, monkeypatch, capsys):
    """Return a function that runs one command in this process: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_the_readmes_command_writes_the_file_and_says_what_is_in_it(rooflane, tmp_path, root):
    (command,) = re.findall(r"^rooflane export .*$", (root / "README.md").read_text(), re.MULTILINE)
    status, out, _ = rooflane(*command.split()[1:], "--profile", "h200", "--json")
    document = json.loads(out)
    assert status == 0 and document["shapes"]["14"] == "chunked" and document["plain_torch"] == {}
    assert (tmp_path / "my_submission.py").read_text().count("\n") == document["lines"]
    # An export may be renewed in place.
    status, out, _ = rooflane("export", "--profile", "h200", "--shape", "13")
    assert status == 0 and "1 shapes on h200 by fused" in out


def test_shapes_no_family_can_serve_are_left_to_plain_torch(rooflane, tmp_path):
    header = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\n"
    (tmp_path / "s.csv").write_text(header + "a,2,8,16,2,16,1,true\nb,2,200,16,2,16,1,true\n")
    status, out, err = rooflane("export", "s.csv", "--profile", "h200", "--candidate", "resident")
    assert status == 0 and "shape b is left to plain torch: seq_len 200 is over" in err
    assert "b: 2x200x16 h2 f16 l1 causal: plain torch" in (tmp_path / "my_submission.py").read_text()


NOTES = "def build(model, shape, device):\n    return model\n"
WRONG = [
    (["--out", "notes.py"], "was not written by rooflane export"),
    (["--profile", "h300"], "no profile is called"),
    (["--candidate", "warp", "--profile", "h200"], "no family is called"),
    (["--candidate", "notes.py", "--profile", "h200"], "is a file of your own already"),
    (["--candidate", "resident", "--profile", "cpu"], "no family can serve any of the shapes on cpu"),
    (["none.csv", "--profile", "h200"], "no such shape file"),
    (["--out", "no/such/folder.py"], "check that the path exists"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_uses_give_one_paragraph(rooflane, tmp_path, arguments, words):
    (tmp_path / "notes.py").write_text(NOTES)
    extra = [] if "--profile" in arguments else ["--profile", "h200", "--shape", "13"]
    status, _, err = rooflane("export", *arguments, *extra)
    assert status == ExitCode.USAGE and words in " ".join(err.split()) and "Traceback" not in err
    assert (tmp_path / "notes.py").read_text() == NOTES


def test_write_refuses_a_file_that_is_no_export(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("'''my kernel'''\n")
    with pytest.raises(ExportError, match="name another file"):
        write_export("x", path)
