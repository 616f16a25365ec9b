"""Shape files: what ships is what was published, and every fault names its place and its fix."""

from __future__ import annotations

import pytest

from rooflane.shapes import Shape, ShapeError, load_shapes

HEADER = "id,batch_size,seq_len,d_model,num_heads,ffn_dim,num_layers,causal"
ROW = "1,64,128,128,4,128,4,true"


def write(tmp_path, *lines: str):
    path = tmp_path / "shapes.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_published_shapes_are_the_fourteen(root):
    shapes = load_shapes(root / "shapes" / "published.csv")
    assert [shape.id for shape in shapes] == [str(number) for number in range(1, 15)]
    assert all(shape.causal and shape.ffn_dim == shape.d_model for shape in shapes)
    assert shapes[5] == Shape("6", 10000, 128, 128, 4, 128, 4, True)
    assert shapes[13].tokens == 3_200_000 and shapes[13].head_dim == 64


def test_neighbours_cover_the_edges_no_rule_was_tuned_on(root):
    neighbours = load_shapes(root / "shapes" / "neighbours.csv")
    published = {shape.label() for shape in load_shapes(root / "shapes" / "published.csv")}
    assert len(neighbours) >= 24
    tuned_on = [shape.id for shape in neighbours if shape.label() in published and shape.padding_ratio == 0]
    assert tuned_on == []
    assert {31, 96, 129, 200, 1000} <= {shape.seq_len for shape in neighbours}
    assert {48, 96, 192, 768} <= {shape.d_model for shape in neighbours}
    assert {3, 6, 12} <= {shape.num_heads for shape in neighbours}
    assert {2, 4} <= {shape.ffn_dim // shape.d_model for shape in neighbours}
    assert any(not shape.causal for shape in neighbours) and any(shape.padding_ratio for shape in neighbours)
    assert {"float16", "bfloat16"} <= {shape.dtype for shape in neighbours}


def test_optional_columns_and_blank_cells(tmp_path):
    path = write(tmp_path, HEADER + ",dtype,padding_ratio", ROW + ",float16,0.3", "2,1,1,16,1,16,1,False,,")
    first, second = load_shapes(path)
    assert (first.dtype, first.padding_ratio) == ("float16", 0.3)
    assert (second.dtype, second.padding_ratio, second.causal) == ("float32", 0.0, False)


def test_empty_rows_of_a_spreadsheet_are_no_shapes(tmp_path):
    path = write(tmp_path, HEADER, ",,,,,,,", ROW, "", " , ,,,,,,,,", ROW.replace("1,", "2,", 1), ",,,,,,,")
    assert [shape.id for shape in load_shapes(path)] == ["1", "2"]


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([], ["is empty"]),
        ([HEADER], ["no shape"]),
        ([HEADER.replace("seq_len", "length"), ROW], [":1:", "lacks 'seq_len'"]),
        ([HEADER + ",seed", ROW + ",1"], [":1:", "unknown 'seed'"]),
        ([HEADER + ",id", ROW + ",1"], [":1:", "repeats 'id'"]),
        ([HEADER.replace(",", ";"), ROW.replace(",", ";")], [":1:", "separated by semicolons", "with commas"]),
        ([HEADER.replace(",", "\t"), ROW.replace(",", "\t")], [":1:", "separated by tabs", "with commas"]),
        ([HEADER, ROW.replace("64", "-64")], [":2:", "column batch_size", "'-64'", "whole number above 0"]),
        ([HEADER, ROW.replace("64", "6.5")], [":2:", "column batch_size", "'6.5'"]),
        ([HEADER, ROW.replace("64", "0")], [":2:", "column batch_size"]),
        ([HEADER, ROW, "2,64,128,130,4,128,4,true"], [":3:", "d_model 130", "num_heads 4"]),
        ([HEADER, ROW.replace("true", "yes")], [":2:", "column causal", "true, false"]),
        ([HEADER, ROW + ",9"], [":2:", "more values"]),
        ([HEADER, ROW, ROW], [":3:", "column id", "line 2"]),
        ([HEADER + ",dtype", ROW + ",fp16"], [":2:", "column dtype", "float32, float16, bfloat16"]),
        ([HEADER + ",padding_ratio", ROW + ",1"], [":2:", "column padding_ratio", "[0, 1)"]),
        ([HEADER + ",padding_ratio", ROW + ",nan"], [":2:", "column padding_ratio"]),
    ],
)
def test_faults_name_file_line_and_column(tmp_path, lines, parts):
    path = write(tmp_path, *lines) if lines else tmp_path / "shapes.csv"
    if not lines:
        path.write_text("")
    with pytest.raises(ShapeError) as error:
        load_shapes(path)
    for part in ["shapes.csv", *parts]:
        assert part in str(error.value)


def test_missing_file_and_binary_file(tmp_path):
    with pytest.raises(ShapeError, match="no such shape file"):
        load_shapes(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ShapeError, match="UTF-8"):
        load_shapes(tmp_path / "binary.csv")


@pytest.mark.parametrize("field", ["batch_size", "num_layers"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "4"])
def test_shape_refuses_sizes_that_are_not_whole(field, value):
    sizes = {"batch_size": 1, "seq_len": 1, "d_model": 16, "num_heads": 1, "ffn_dim": 16, "num_layers": 1}
    with pytest.raises(ShapeError, match=field):
        Shape("a", **{**sizes, field: value})
