"""The brief on whole models: its problem files are taken whole, and its measuring program runs, resumes and reports."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

from rooflane.dispatch import optimize, served

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[1] / "briefs" / "models" / "measure.py"
# Each file's sizes, made small.
SMALL = {
    "minilm": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "bert_base": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "vit_tiny": {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "image_size": 32,
    },
    "whisper_tiny": {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "max_source_positions": 20,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "encoder_defaults": {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "layers": 2},
}  # fmt: skip


@pytest.fixture
def measure(monkeypatch):
    spec = importlib.util.spec_from_file_location("models_measure", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "models_measure", module)
    spec.loader.exec_module(module)
    load = module.load_problem

    def small(name):
        space = load(name)
        space["SETTINGS"].update(SMALL[name])
        for name, value in (("BATCH", 2), ("LENGTH", 9)):
            if name in space:
                space[name] = value
        return space

    monkeypatch.setattr(module, "load_problem", small)
    return module


@pytest.mark.parametrize("name", SMALL)
def test_a_problems_model_is_taken_whole(measure, name):
    assert set(SMALL) == set(measure.NAMES)
    problem = measure.load_problem(name)
    model = measure.build_model(problem)
    x = measure.draw(problem, 1, torch.device("cpu"))
    exact = copy.deepcopy(model).double()
    with torch.inference_mode():
        expected = exact(x.double() if x.is_floating_point() else x).float()
        torch.testing.assert_close(optimize(model)(x), expected, atol=1e-4, rtol=1e-4)
    (stack,) = served(model)
    assert len(stack.stack.routes) == 1


def test_the_program_measures_resumes_and_renders(measure, tmp_path, capsys):
    record = tmp_path / "models.jsonl"
    arms = [word for arm in ("eager", "eager fp16", "rooflane") for word in ("--arm", arm)]
    given = ["--only", "minilm", *arms, "--device", "cpu", "--budget", "0.01", "--out", str(record)]
    for process in ("0", "1", "1"):
        assert measure.main([*given, "--process", process]) == 0
    lines = measure.read_lines(record)
    assert [line["process"] for line in lines] == [0, 1]
    for line in lines:
        assert line["arms"]["rooflane"]["use"] < 0.1 and line["arms"]["rooflane"]["said"] == []
        assert line["arms"]["eager fp16"]["error"] > line["arms"]["eager"]["error"]
    page = tmp_path / "page.md"
    page.write_text("<!-- models:begin -->\n<!-- models:end -->\n")
    assert measure.main(["--table", str(record), "--page", str(page)]) == 0
    assert "| minilm | eager |" in page.read_text() and "BertLayer: served (post-norm" in page.read_text()


RECORD = Path(__file__).parents[1] / "briefs" / "records" / "h200-models" / "models.jsonl"
# The README's rows, by the names of the record.
ROWS = {
    "minilm": "MiniLM, 64 x 128",
    "bert_base": "BERT-base, 16 x 128",
    "vit_tiny": "ViT-tiny, 64 images",
    "whisper_tiny": "Whisper-tiny encoder, 8 x 30 s",
    "gpt2": "GPT-2, 8 x 512",
    "encoder_defaults": "`nn.TransformerEncoder` defaults, 32 x 128 x 512",
}


def test_the_briefs_table_and_the_readmes_are_what_the_record_gives(measure, root, tmp_path):
    copied = shutil.copy(root / "briefs" / "models.md", tmp_path / "models.md")
    assert measure.main(["--table", str(RECORD), "--page", str(copied)]) == 0
    assert Path(copied).read_text() == (root / "briefs" / "models.md").read_text()
    readme = (root / "README.md").read_text()
    for line in measure.read_lines(RECORD):
        times = [measure.median_ns(sum(line["arms"][arm]["event_ns"], [])) / 1e6 for arm in measure.ARMS]
        cells = " | ".join(f"{time:.3g}" if time < 1 else f"{time:.2f}" for time in times)
        assert f"| {ROWS[line['model']]} | {cells} |" in readme, cells
