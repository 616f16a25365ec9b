"""Our model in the stand-in's place, in this process: every published shape, stale weights, inference tensors."""

from __future__ import annotations

import dataclasses
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from rooflane.baseline import TransformerConfig, build_baseline, config_of, copy_model_weights
from rooflane.dispatch import load_profile, load_rules, route
from rooflane.eval.export.write import export
from rooflane.eval.submit import organiser
from rooflane.eval.submit.launch import SubmitJob
from rooflane.eval.submit.organiser import ChangedError, run_with_class
from rooflane.eval.submit.parse import Figures, parse_output
from rooflane.eval.submit.placed import PlacedTransformer
from rooflane.eval.submit.worker import class_to_place
from rooflane.eval.worker.candidates import load_attribute, parse_candidate
from rooflane.shapes import Shape, load_shapes

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

LEAST = ["--accuracy-trials", "1", "--warmup", "0", "--repeats", "1", "--benchmark-rounds", "2"]
TINY = Shape("tiny", 2, 8, 16, 2, 16, 2, True)
# What one core computes in a tenth of a second: the shapes keep everything but their batch or length.
BATCHES = {"6": 3, "7": 4, "8": 1, "12": 8, "13": 1, "14": 1}  # 12: with fewer its route is another family
MOST_BATCH = 2
LENGTHS = {"8": 32, "14": 32}


def job(shape: Shape, candidate: str, family: str = "", **options) -> SubmitJob:
    return SubmitJob(
        organiser="", sha256="", arguments=[], candidate=candidate, plan={"family": family, "options": options},
        shape=shape.as_dict(), memory_bytes=None,
    )  # fmt: skip


@pytest.fixture
def benchmark(root, monkeypatch, capsys):
    """Return a function that runs the stand-in with a class in the place: (exit status, printed text)."""
    monkeypatch.setattr(sys, "argv", sys.argv)

    def run(shape: Shape, cls: type, *extra: str) -> tuple[int, str]:
        arguments = organiser.shape_arguments(shape, "cpu", [*LEAST, *extra])
        with pytest.raises(SystemExit) as end:
            run_with_class(root / "tests" / "standin" / "benchmark.py", arguments, lambda module: cls)
        return int(end.value.code or 0), capsys.readouterr().out

    return run


def figures_of(shape: Shape, text: str) -> Figures:
    sizes = (shape.batch_size, shape.seq_len, shape.d_model, shape.num_heads, shape.ffn_dim, shape.num_layers)
    return parse_output(text, shape.tokens, (*sizes, shape.causal))


def published(root: Path) -> list[Shape]:
    shapes = load_shapes(root / "shapes" / "published.csv")
    return [
        dataclasses.replace(
            shape,
            batch_size=BATCHES.get(shape.id, min(shape.batch_size, MOST_BATCH)),
            seq_len=LENGTHS.get(shape.id, shape.seq_len),
        )
        for shape in shapes
    ]


@pytest.fixture(scope="module")
def exported(root, tmp_path_factory) -> type:
    """The class of one file that was exported for the CPU and all published widths."""
    shapes = published(root)
    path = tmp_path_factory.mktemp("exported") / "submission.py"
    path.write_text(export(shapes, parse_candidate("dispatched"), load_profile("cpu"), load_rules()).text)
    return load_attribute(parse_candidate(str(path)))


@pytest.mark.parametrize("place", range(14), ids=lambda place: str(place + 1))
def test_the_exported_file_passes_at_every_published_width(root, benchmark, exported, place):
    shape = published(root)[place]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where plain torch runs, the class warns
        status, text = benchmark(shape, exported)
    assert status == 0, text
    figures = figures_of(shape, text)
    assert figures.accuracy.passed and figures.accuracy.failed == 0 and figures.accuracy.max_abs > 0


@pytest.mark.parametrize("place", range(14), ids=lambda place: str(place + 1))
def test_the_dispatched_model_passes_at_every_published_width(root, benchmark, place):
    shape = published(root)[place]
    chosen = route(shape, load_profile("cpu"), load_rules())
    # A compiled family takes a minute to build on a CPU; its lean forward is sdpa_flash's.
    family = "sdpa_flash" if chosen.family == "graph_compile" else chosen.family
    status, text = benchmark(shape, class_to_place(job(shape, "dispatched", family)))
    assert status == 0, text
    figures = figures_of(shape, text)
    assert figures.accuracy.passed and figures.accuracy.failed == 0 and figures.speedup > 0
    # Fast families round differently from the baseline: an error of 0 would mean that the baseline ran in both places.
    assert figures.accuracy.max_abs > 0


@pytest.mark.parametrize(
    "change", [{"padding_ratio": 0.6}, {"causal": False}, {"dtype": "bfloat16"}], ids=lambda change: next(iter(change))
)
@pytest.mark.parametrize("family", ["sdpa_flash", "chunked"])
def test_masks_and_half_precision_pass_too(benchmark, change, family):
    shape = dataclasses.replace(TINY, **change)
    extra = ["--rtol", "0.1", "--atol", "0.1"] if shape.dtype == "bfloat16" else []  # 8 bits of mantissa, two layers
    status, text = benchmark(shape, class_to_place(job(shape, family, family)), *extra)
    assert status == 0, text
    assert f"dtype=torch.{shape.dtype}" in text


def test_options_of_a_family_reach_its_builder(benchmark):
    status, text = benchmark(TINY, class_to_place(job(TINY, "chunked:budget_gib=1", "chunked", budget_gib=1)))
    assert status == 0, text


STALE = """
import torch
from rooflane.baseline import BaselineTransformer
class UserOptimizedTransformer(BaselineTransformer):
    def __init__(self, config):
        super().__init__(config)
        self.packed = [p.detach().clone() for p in self.parameters()]
    def forward(self, x, valid_token_mask=None):
        with torch.no_grad():
            for parameter, packed in zip(self.parameters(), self.packed):
                parameter.copy_(packed)
        return super().forward(x, valid_token_mask)
"""
BUILD = "def build(model, shape, device):\n    assert device.type == 'cpu'\n    return lambda x, mask: model(x, mask)\n"


def test_weights_packed_at_construction_are_stale_and_the_stand_in_notices(tmp_path, benchmark):
    # The control of the tests around it: a class that packs too early fails here.
    path = tmp_path / "stale.py"
    path.write_text(STALE)
    status, text = benchmark(TINY, class_to_place(job(TINY, str(path))))
    assert status == 2 and not figures_of(TINY, text).accuracy.passed


def test_a_candidate_file_with_build_gets_the_copied_weights(tmp_path, benchmark):
    path = tmp_path / "mine.py"
    path.write_text(BUILD)
    status, text = benchmark(TINY, class_to_place(job(TINY, str(path))))
    assert status == 0 and figures_of(TINY, text).accuracy.max_abs == 0


def test_build_must_return_a_forward(tmp_path, benchmark):
    path = tmp_path / "mine.py"
    path.write_text("def build(model, shape, device):\n    return 3\n")
    with pytest.raises(TypeError, match="returned int, not a forward"):
        benchmark(TINY, class_to_place(job(TINY, str(path))))


def test_accuracy_inputs_are_inference_tensors_and_timing_inputs_are_not(benchmark):
    seen = []

    class Spy(PlacedTransformer):
        def choose(self, plain, shape, device):
            return plain

        def forward(self, x, valid_token_mask=None):
            seen.append((x.is_inference(), valid_token_mask.is_inference()))
            return super().forward(x, valid_token_mask)

    status, _ = benchmark(TINY, Spy, "--accuracy-trials", "2", "--warmup", "1")
    assert status == 0 and seen == [(True, True)] * 2 + [(False, False)] * 3


def placed(shape: Shape) -> PlacedTransformer:
    return class_to_place(job(shape, "sdpa_flash", "sdpa_flash"))(config_of(shape)).eval()


def assert_equal_to(model, reference, x):
    with torch.inference_mode():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)


def test_weights_changed_after_the_first_call_are_seen():
    model, x = placed(TINY), torch.randn(2, 8, 16)
    for seed in (1, 2):
        reference = build_baseline(TINY, "cpu", seed)
        copy_model_weights(reference, model)
        assert_equal_to(model, reference, x)
    with torch.no_grad():
        model.final_norm.bias.add_(1.0)
        reference.final_norm.bias.add_(1.0)
    assert_equal_to(model, reference, x)
    model.load_state_dict(build_baseline(TINY, "cpu", 3).state_dict(), assign=True)
    assert_equal_to(model, build_baseline(TINY, "cpu", 3), x)


def test_weights_packed_in_inference_mode_can_be_renewed_outside_it():
    model, x = placed(TINY), torch.randn(2, 8, 16)
    with torch.inference_mode():
        model(x)
    reference = build_baseline(TINY, "cpu", 4)
    copy_model_weights(reference, model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)


def test_the_keys_are_the_baselines_and_a_cast_builds_again():
    model = placed(TINY)
    assert list(model.state_dict()) == list(build_baseline(TINY, "cpu", 0).state_dict())
    with torch.inference_mode():
        model(torch.randn(2, 8, 16))
        assert model.to(torch.bfloat16)(torch.randn(2, 8, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_other_shapes_run_plain_torch_and_say_so():
    model = placed(TINY)
    with torch.inference_mode(), pytest.warns(UserWarning, match="plain torch runs"):
        assert model(torch.randn(3, 4, 16)).shape == (3, 4, 16)


def test_a_call_that_needs_gradients_gets_them():
    model = placed(TINY)
    model(torch.randn(2, 8, 16)).sum().backward()
    assert model.layers[0].ffn_in.weight.grad is not None


def test_a_copy_builds_its_own_forward():
    import copy

    model, x = placed(TINY), torch.randn(2, 8, 16)
    with torch.inference_mode():
        model(x)
    twin = copy.deepcopy(model)
    reference = build_baseline(TINY, "cpu", 5)
    copy_model_weights(reference, twin)
    assert_equal_to(twin, reference, x)


@pytest.mark.slow
def test_a_compiled_user_model_runs_uncompiled():
    # The launches are bound by hand; with --compile-user the script wraps the class, which must still be right.
    model = placed(TINY)
    reference = build_baseline(TINY, "cpu", 6)
    copy_model_weights(reference, model)
    assert_equal_to(torch.compile(model), reference, torch.randn(2, 8, 16))


def test_the_script_runs_as_it_was_checked_or_not_at_all(root):
    path = root / "tests" / "standin" / "benchmark.py"
    with pytest.raises(ChangedError):
        run_with_class(path, [], lambda module: None, sha256="0" * 64)


@pytest.fixture(scope="module")
def standin(root) -> types.ModuleType:
    """The stand-in as a module, its main not run."""
    path = root / "tests" / "standin" / "benchmark.py"
    module = types.ModuleType("standin_benchmark")
    sys.modules[module.__name__] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def test_the_stand_in_has_the_described_flags_and_defaults(standin, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark.py"])
    given = vars(standin.parse_args())
    described = {
        "batch_size": 8, "seq_len": 128, "d_model": 512, "heads": 8, "ffn_dim": 2048, "layers": 6, "causal": False,
        "device": "auto", "dtype": "float32", "padding_ratio": 0.0, "input_scale": 1.0, "accuracy_trials": 5,
        "rtol": 0.02, "atol": 0.002, "seed": 1234, "warmup": 20, "repeats": 100, "benchmark_rounds": 3,
        "benchmark_on_failure": False, "compile_baseline": False, "compile_user": False, "compile_mode": "default",
        "non_strict_weight_copy": False, "matmul_precision": "high", "allow_tf32": True,
    }  # fmt: skip
    assert given == described
    assert {action.dest for action in organiser._parser()._actions} == described.keys()


def test_the_stand_ins_model_is_the_baseline(standin):
    ours = build_baseline(TINY, "cpu", 7)
    theirs = standin.BaselineTransformer(standin.TransformerConfig(*dataclasses.astuple(config_of(TINY)))).eval()
    assert list(theirs.state_dict()) == list(ours.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, mask = standin.generate_random_case(config_of(TINY), torch.device("cpu"), torch.float32, 1, 0.5, 1.0)
    assert torch.equal(ours(x, mask), theirs(x, mask))
    assert [field.name for field in dataclasses.fields(TransformerConfig)] == [
        field.name for field in dataclasses.fields(standin.TransformerConfig)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "0"], "num_layers must be > 0"),
        (["--heads", "3"], "divisible"),
        (["--padding-ratio", "1"], "padding_ratio"),
        (["--device", "cuda"], "CUDA"),
    ],
)
def test_the_stand_in_refuses_as_described(standin, monkeypatch, arguments, words):
    if words == "CUDA" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    with pytest.raises((ValueError, RuntimeError), match=words):
        standin.main()
