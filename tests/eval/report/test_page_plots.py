"""Plots as files: which one a name asks for, SVG that is XML, PNG, the same bytes, and the committed ones."""

import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rooflane.eval import EvaluationError, cli, open_run
from rooflane.eval.report.page import PLOT_KINDS, plot_kind, read_page, write_plot
from rooflane.eval.stats.run import create_run
from rooflane.shapes import Shape

# What briefs/plots holds, by record.
COMMITTED = {"h200": "h200-campaign-1", "h200-lanes": "h200-lanes"}
PLOTS = sorted((Path(__file__).parents[3] / "briefs" / "plots").iterdir())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("latency.svg", "latency"),
        ("h200-roofline.png", "roofline"),
        ("a/b-c-fp64.svg", "fp64"),
        ("tolerance.png", "tolerance"),
    ],
)
def test_the_name_says_the_kind(name, kind):
    assert plot_kind(Path(name)) == kind


@pytest.mark.parametrize("name", ["plot.svg", "latency.pdf", "latency", "latency-h200.svg", "latencyroofline.svg"])
def test_other_names_are_refused_with_the_kinds(name):
    with pytest.raises(EvaluationError, match=f"{name}: .*{', '.join(PLOT_KINDS)}"):
        plot_kind(Path(name))


@pytest.fixture
def hostile(tmp_path, make_meta, full_rows):
    """A run whose names are markup, formulas and control characters."""
    meta = make_meta([Shape("<&\"'>\x00$x$", 2, 8, 16, 2, 16, 1)], candidates=("]]><b>\x1b$a_b$.py",))
    run = create_run(tmp_path / "runs", meta)
    run.append(full_rows(meta, {meta.candidates[0]: 2.0}))
    return read_page(run)


@pytest.mark.parametrize("kind", ["latency", "roofline", "regimes", "tolerance"])
def test_svg_is_xml_with_the_names_as_text_and_png_has_its_size(hostile, tmp_path, kind):
    path = tmp_path / f"{kind}.svg"
    write_plot(hostile, path)
    tree = ElementTree.parse(path).getroot()
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert any("<&\"'>\ufffd$x$" in text for text in texts) or any("]]><b>\ufffd$a_b$.py" in text for text in texts)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<image|href", path.read_text())
    write_plot(hostile, tmp_path / f"{kind}.png")
    head = (tmp_path / f"{kind}.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    # Two pixels for each of the SVG's.
    assert struct.unpack(">II", head[16:]) == (2 * int(tree.get("width")), round(2 * float(tree.get("height"))))


def test_the_same_records_give_the_same_bytes(hostile, tmp_path):
    for name in ("latency.svg", "latency.png"):
        twice = []
        for _ in range(2):
            write_plot(hostile, tmp_path / name)
            twice.append((tmp_path / name).read_bytes())
        assert twice[0] == twice[1]
    assert not re.search(rb"tIME|Software|Creation", (tmp_path / "latency.png").read_bytes())


def test_a_run_without_the_figures_is_refused(tmp_path, make_meta):
    data = read_page(create_run(tmp_path / "runs", make_meta([Shape("a", 2, 8, 16, 2, 16, 1)])))
    with pytest.raises(EvaluationError, match="measured nothing that a latency plot shows"):
        write_plot(data, tmp_path / "latency.svg")
    with pytest.raises(EvaluationError, match="cannot be written"):
        write_plot(data, tmp_path / "missing" / "roofline.svg")


def test_the_command_draws_every_plot_it_is_given(stored_run, tmp_path, capsys):
    names = [str(tmp_path / name) for name in ("latency.svg", "x-roofline.svg")]
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(stored_run.folder), *(part for name in names for part in ("--plot", name))])
    assert end.value.code in (0, None)
    assert all(Path(name).read_text().startswith("<?xml") for name in names)
    assert capsys.readouterr().out.count("plot drawn to") == 2


def test_a_wrong_name_writes_nothing_and_is_a_usage_error(stored_run, tmp_path, capsys):
    page, good, bad = (str(tmp_path / name) for name in ("page.html", "latency.svg", "nothing.svg"))
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(stored_run.folder), "--html", page, "--plot", good, "--plot", bad])
    assert end.value.code == 2
    assert not Path(page).exists() and not Path(good).exists()
    error = capsys.readouterr().err
    assert "latency, roofline" in error and "Traceback" not in error


def test_the_help_names_every_kind(capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    shown = set(re.findall(r"[\w]+", capsys.readouterr().out.partition("Kinds:")[2]))
    assert set(PLOT_KINDS) <= shown


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.name)
def test_committed_plots_are_what_the_records_give(root, tmp_path, path):
    record = COMMITTED[path.stem.rpartition("-")[0]]
    if path.suffix == ".png":
        assert path.with_suffix(".svg") in PLOTS, "a PNG's pixels depend on the font library; its SVG is compared"
        return
    again = tmp_path / path.name
    write_plot(_data(root, record), again)
    assert again.read_text() == path.read_text(), f"draw it anew: rooflane report briefs/records/{record} --plot {path}"


_DATA = {}


def _data(root, record):
    if record not in _DATA:
        _DATA[record] = read_page(open_run(root / "briefs" / "records" / record))
    return _DATA[record]
