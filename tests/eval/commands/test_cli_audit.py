"""`rooflane audit-gate`: the table, the JSON, the recorded set and the error for bad input."""

import json

import pytest

from rooflane.eval.check.stresses import load_stress_set
from rooflane.eval.cli import main

SHAPES = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal\ntiny,4,24,16,2,24,1,false\n"


@pytest.fixture
def shape_file(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text(SHAPES)
    return str(path)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["audit-gate", *arguments])
    return ended.value.code, *capsys.readouterr()


def test_the_table_is_cut_between_columns_and_names_what_is_unseen_and_needed(capsys, shape_file, monkeypatch):
    from rooflane.eval.commands import output

    monkeypatch.setattr(output, "PIPE_WIDTH", 80)
    code, out, err = run(capsys, shape_file, "--scale", "300", "--window", "4")
    assert code == 0
    assert max(map(len, out.partition("Always run")[0].splitlines())) <= 80
    headers = [line for line in out.splitlines() if line.startswith("ablation")]
    assert len(headers) > 1 and all(name in " ".join(headers) for name in ("plain", "holes", "q_proj x 8", "spikes"))
    # 23 ablations on each of four sets of weights.
    assert int(err.splitlines()[-1].partition("/")[2].partition("]")[0]) == 4 * 23
    out = " ".join(out.split())
    assert "tiny (2x24x16 h2 f24 l1 full)" in out
    assert "window 4" in out and "input x 300" in out
    assert "Needed: norms drawn, for no norm bias (tiny); no norm weight (tiny)." in out
    assert "Unseen whatever is run: tanh GELU (tiny)." in out
    assert "No fault on these shapes, the function is the same: not causal, no k_proj bias." in out


def test_json_and_the_record_agree(capsys, shape_file, tmp_path):
    record = tmp_path / "set.json"
    code, out, _ = run(capsys, shape_file, "--json", "--record", str(record), "--seeds", "2")
    assert code == 0
    document = json.loads(out)
    assert document["seeds"] == 2
    assert document["verdict"] == json.loads(record.read_text())
    assert {finding["condition"] for finding in document["findings"]} == {*document["always"], *document["stresses"]}
    assert [stress.name for stress in load_stress_set(record)] == document["verdict"]["stresses"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.csv"], "nowhere.csv"),
        (["--shape", "S9"], "no built-in shape 'S9'; there are: S128, S128 causal, S1024"),
        (["published.csv", "--shape", "99"], "holds no shape '99'"),
        (["published.csv", "--shape", "14"], "shape 14: the audit's float64 scores need"),
        (["--scale", "-1"], "input scale -1 has no meaning"),
        (["--seeds", "0"], "whole numbers above 0"),
    ],
)
def test_bad_input_is_a_usage_error_in_one_paragraph(capsys, arguments, text):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert text in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_progress_is_lines_on_standard_error_where_there_is_no_terminal(capsys, monkeypatch):
    from rooflane.eval.commands import audit

    with audit.follow_cases() as on_stage:
        for done in range(40):
            on_stage(done, 40, f"case {done}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"[{done}/40] case {done}" for done in range(0, 40, 4)]


def test_precision_prints_a_table_of_each_figure_and_the_same_as_json(capsys, shape_file):
    code, out, err = run(capsys, shape_file, "--precision")
    assert code == 0 and err.startswith("[0/17] shape tiny: float32, eager")
    assert "gain in time is blank: no kernel of that format was timed here" in out
    code, document, _ = run(capsys, shape_file, "--precision", "--json")
    assert code == 0
    for cost in json.loads(document)["costs"]:
        name = f" {cost['format']} "
        lines = [line for line in out.splitlines() if line.startswith(cost["products"]) and name in line]
        *uses, plain, tf32, error = (line.partition(name)[2].strip() for line in lines)
        assert [plain, tf32] == [f"{cost['failing'][eager]:.3%}" for eager in ("float32", "TF32")]
        assert error == f"{cost['error']:.1e}"
        for use, eager in zip(uses, ("float32", "TF32"), strict=True):
            assert float(use.removesuffix(" !")) == pytest.approx(cost["use"][eager], rel=0.005)
            assert use.endswith(" !") == (cost["use"][eager] > 1)


@pytest.mark.parametrize("option", ["--scale=300", "--window=4", "--record=set.json", "--tf32"])
def test_precision_refuses_what_only_faults_use(capsys, shape_file, option):
    code, _, err = run(capsys, shape_file, "--precision", option)
    assert code == 2 and "leave out --scale, --window, --record and --tf32" in " ".join(err.replace("│", " ").split())


def test_precision_says_which_shapes_it_left_out(capsys, tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text(SHAPES + "huge,1,1000000,1024,16,1024,4,true\n")
    code, out, _ = run(capsys, str(path), "--precision")
    assert code == 0 and "Left out: shape huge: the audit's float64 scores need" in " ".join(out.split())
