"""The charts: no text meets another, values stand where the axis says, regions and rates have right names, files."""

import itertools
import math
import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from rooflane.dispatch import load_profile
from rooflane.eval import EvaluationError, cli, open_run
from rooflane.eval.report.page import PLOT_KINDS, plot_kind, read_page, write_plot
from rooflane.eval.report.page.charts import DEVICE_LIMIT, HOST_LIMIT, NARROW, WIDE, draw, label_regions, series_of
from rooflane.eval.report.page.drawing import (
    DARK,
    LIGHT,
    TITLE,
    draw_mark,
    log_axes,
    log_limits,
    log_ticks,
    looks,
    new_axes,
    new_figure,
    place_labels,
    shorten,
    text_width,
)
from rooflane.eval.report.page.source import matrix_rates
from rooflane.eval.report.table import number
from rooflane.eval.stats.run import create_run
from rooflane.shapes import Shape

# Tens of seconds in all: `make check` leaves them out.
pytestmark = pytest.mark.slow

RECORDS = ["h200-published", "h200-lanes", "h200-half", "h200-bf16", "h200-cap30"]
SVG = "{http://www.w3.org/2000/svg}"
# The record of each plot in briefs/plots. The README's chart has the run of the README's table.
COMMITTED = {
    "h200-latency": "h200-six",
    "h200-roofline": "h200-campaign-1",
    "h200-regimes": "h200-campaign-1",
    "h200-fp64": "h200-campaign-1",
    "h200-lanes-latency": "h200-lanes",
}


@pytest.fixture(scope="module")
def data(root):
    names = {*RECORDS, *COMMITTED.values()}
    return {name: read_page(open_run(root / "briefs" / "records" / name)) for name in names}


@pytest.fixture
def hostile(tmp_path, make_meta, full_rows):
    """A run whose names are markup, formulas and control characters."""
    meta = make_meta([Shape("<&\"'>\x00$x$", 2, 8, 16, 2, 16, 1)], candidates=("]]><b>\x1b$a_b$.py",))
    run = create_run(tmp_path / "runs", meta)
    run.append(full_rows(meta, {meta.candidates[0]: 2.0}))
    return read_page(run)


def charts(page):
    """Yield every chart of a run, wide with a heading and narrow without."""
    for kind, (width, titled) in itertools.product(PLOT_KINDS, ((WIDE, True), (NARROW, False))):
        if chart := draw(kind, page, width, titled):
            yield f"{kind} {width}", chart


def texts_of(chart):
    """Return each visible text with its box in pixels, drawn as it is saved."""
    with looks():
        chart.figure.canvas.draw()
    shown = [item for item in chart.figure.findobj(Text) if item.get_visible() and item.get_text().strip()]
    # Tick labels outside the limits are kept by matplotlib and not drawn.
    return [(item.get_text(), item.get_window_extent()) for item in shown]


def faults(chart):
    """Return texts that leave the picture or meet another text."""
    boxes, (width, height) = texts_of(chart), chart.figure.bbox.size
    found = [
        f"{a!r} meets {b!r}"
        for (a, one), (b, other) in itertools.combinations(boxes, 2)
        # The boxes have the font's full height; its letters leave a few pixels free.
        if one.padded(0, -2).overlaps(other.padded(0, -2))
    ]
    for text, box in boxes:
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height:
            found.append(f"{text!r} leaves the picture")
    return found


def titles_of(chart):
    """Return each mark's title and place in data coordinates."""
    lines = [line for axes in chart.figure.axes for line in axes.lines if (line.get_gid() or "").startswith(TITLE)]
    return [(line.get_gid().removeprefix(TITLE), *line.get_xydata()[0]) for line in lines]


def test_no_text_meets_another_or_leaves_the_picture(data):
    found = {(name, kind): bad for name in RECORDS for kind, chart in charts(data[name]) if (bad := faults(chart))}
    assert found == {}


def test_long_names_many_candidates_and_crowded_points_keep_apart(tmp_path, make_meta, full_rows):
    shapes = [Shape(f"shape-{number}-{'long' * 12}", 2, 8, 16, 2, 16, 1) for number in range(12)]
    names = tuple(f"{'candidate_' * 6}{number}.py" for number in range(8))
    meta = make_meta(shapes, candidates=names)
    run = create_run(tmp_path, meta)
    run.append(full_rows(meta, {name: 2.0 + place for place, name in enumerate(names)}))
    assert {kind: found for kind, chart in charts(read_page(run)) if (found := faults(chart))} == {}


def test_every_measured_arm_has_a_mark_at_its_time(data):
    page = data["h200-published"]
    marks = titles_of(draw("latency", page))
    arms = [cell for row in page.summary.rows for cell in row.cells.values() if cell.event_ms]
    assert len(arms) == 13 * 6 + 2
    assert sorted(x for _, x, _ in marks) == pytest.approx(sorted(arm.event_ms.centre for arm in arms))
    first = page.summary.rows[0].cells["dispatched"].event_ms.centre
    (place,) = [x for title, x, _ in marks if title.startswith(f"dispatched: {number(first)} ms") and x == first]
    assert place < 0.1


def test_the_null_shows_above_and_below_eager(data):
    (axes,) = draw("latency", data["h200-published"]).figure.axes
    size = {line.get_gid().split(": ")[1]: line.get_markersize() for line in axes.lines if line.get_gid()}
    assert size["null"] > 1.5 * size["eager"]
    hollow = [line for line in axes.lines if line.get_gid() and "eager: " in line.get_gid()]
    assert hollow and all(line.get_markerfacecolor() == "none" for line in hollow)


def test_the_roofline_holds_predicted_and_measured_places(data):
    page = data["h200-published"]
    chart = draw("roofline", page)
    titles = [title for title, _, _ in titles_of(chart)]
    assert "shape 1, eager predicted: 1.80 ms, 4.78 TFLOP/s" in titles
    assert "shape 1, eager: 2.52 ms, 3.41 TFLOP/s" in titles, "8.59 GFLOP in 2.52 ms"
    assert any(title.startswith("shape 1, dispatched predicted: 0.0930 ms") for title in titles)
    last = page.summary.rows[-1].cells["dispatched"].event_ms.centre
    assert last > 3000 and any(title.startswith(f"shape 14, dispatched: {number(last)} ms") for title in titles)
    shown = {text for text, _ in texts_of(chart)}
    # The float32 products of an H200 run in TF32, and the profile's rate was measured so.
    assert {"360 TFLOP/s TF32", "714 TFLOP/s float16"} <= shown and not any("float32" in text for text in shown)
    for name in RECORDS:
        for kind in ("roofline", "regimes"):
            if chart := draw(kind, data[name]):
                wanted = {
                    row.shape.id for row in data[name].summary.rows if kind == "roofline" or row.regime != "infeasible"
                }
                assert wanted <= {text for text, _ in texts_of(chart)}, f"{name} {kind} names every shape"


def test_a_rate_has_the_name_of_the_arithmetic_it_was_measured_with():
    assert matrix_rates(load_profile("h200"), {"float32"}, "cuda")["float32"][0] == "TF32"
    assert matrix_rates(load_profile("t4"), {"float32"}, "cuda")["float32"][0] == "float32", "a T4 has no TF32"
    assert matrix_rates(load_profile("cpu"), {"float32"}, "cpu")["float32"][0] == "float32"
    assert set(matrix_rates(load_profile("h200"), {"bfloat16"}, "cuda")) >= {"bfloat16"}


def test_the_regime_map_marks_what_was_not_predicted(tmp_path, make_meta, make_record):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)], processes=1, controls=())
    predicted = meta.predictions[0].classification["regime"]
    event = 1_000_000 if predicted == "launch" else 3_000_000
    row = make_record(meta.shape_list()[0], 0, "eager", (event, event), device_ns=[1_000_000] * 3)
    host = row.timing.model_copy(update={"host_ns": [[900_000] * 3]})
    run = create_run(tmp_path, meta)
    run.append([row.model_copy(update={"timing": host})])
    titles = [title for title, _, _ in titles_of(draw("regimes", read_page(run)))]
    assert any("measured, not predicted" in title for title in titles)


@pytest.mark.parametrize(
    ("points", "wanted"),
    [
        ([(1, 10), (2, 30)], {DEVICE_LIMIT}),  # a CPU: device time above host time everywhere, no room for the other
        ([(1, 0.1), (2, 0.01)], {HOST_LIMIT}),
        ([(0.1, 10), (10, 0.1)], {DEVICE_LIMIT, HOST_LIMIT}),
    ],
)
def test_a_regions_name_lies_wholly_in_its_region(points, wanted):
    with looks():
        axes = new_axes(new_figure(860), 440, 62, 60, 844, 400)
        log_axes(axes, log_limits([x for x, _ in points]), log_limits([y for _, y in points]))
        for x, y in points:
            axes.plot([x], [y], "o")
        label_regions(axes)
    assert {text.get_text() for text in axes.texts} == wanted
    for text in axes.texts:
        for host, device in axes.transData.inverted().transform(text.get_window_extent().corners()):
            assert (device > host) == (text.get_text() == DEVICE_LIMIT)


def test_a_chart_without_values_is_not_drawn(data):
    assert draw("fp64", data["h200-bf16"]) is None
    assert draw("regimes", data["h200-cap30"]) is None


def test_series_differ_by_form_and_not_by_colour_alone(data):
    for name in RECORDS:
        series = series_of(data[name]).values()
        assert len({(entry.marker, entry.open) for entry in series}) == len(series)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper(colours):
    assert len(set(LIGHT.values())) == len(LIGHT), "an SVG's colours find their names by value"
    for ground in ("paper", "band"):
        for role in ("ink", "muted", "good", "bad"):
            assert contrast(colours[role], colours[ground]) >= 4.5, (role, ground)
        for role in ("s0", "s1", "s2", "s3", "s4", "s5"):
            assert contrast(colours[role], colours[ground]) >= 3, (role, ground)
    assert contrast(colours["s0"], colours["paper"]) >= 4.5, "links are text"


def contrast(a, b):
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_ticks_are_round_and_few_and_limits_take_any_values():
    assert log_ticks(0.05, 2000, 5) == pytest.approx([0.1, 1, 10, 100, 1000])
    assert log_ticks(1.2, 4.9, 8) == [1.5, 2, 3, 4], "a short axis still has ticks to read values by"
    assert len(log_ticks(1e-9, 1e9, 6)) <= 7
    for values in ([], [0.0, math.nan, math.inf], [3.0], [1e-7, 1e9]):
        low, high = log_limits(values)
        assert high / low >= 4 and len(log_ticks(low, high, 12)) >= 2


@pytest.mark.parametrize(
    ("up", "wanted"), [((0.1, 90_000), "10,000"), ((1e-6, 1.0), "1e-3"), ((10.0, 5e7), "1e3")], ids=str
)
def test_both_axes_write_figures_in_one_notation(up, wanted):
    with looks():
        axes = new_axes(new_figure(860), 440, 62, 60, 844, 400)
        log_axes(axes, (0.5, 20), up)
    labels = [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()]
    assert wanted in labels
    assert len({"e" in label for label in labels}) == 1


def test_labels_give_way_to_what_is_there_and_texts_are_cut_to_their_place(data):
    with looks():
        axes = new_axes(new_figure(200), 200, 0, 0, 200, 200)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        draw_mark(axes, 0.5, 0.5, next(iter(series_of(data["h200-lanes"]).values())), "taken")
        place_labels(axes, [(0.5, 0.5, "a"), (0.5, 0.5, "b")])
        one, other = (text.get_window_extent() for text in axes.texts)
        assert not one.overlaps(other)
        mark = axes.transData.transform((0.5, 0.5))
        assert not one.contains(*mark) and not other.contains(*mark)
    assert shorten("short", 100) == "short"
    cut = shorten("x" * 100, 100)
    assert cut.endswith("…") and text_width(cut) <= 100


@pytest.mark.parametrize("name", ["latency.svg", "h200-roofline.png", "a/b-c-fp64.svg", "tolerance.png"])
def test_the_name_says_the_kind(name):
    assert plot_kind(Path(name)) in name


@pytest.mark.parametrize("name", ["plot.svg", "latency.pdf", "latency", "latency-h200.svg", "latencyroofline.svg"])
def test_other_names_are_refused_with_the_kinds(name):
    with pytest.raises(EvaluationError, match=f"{name}: .*{', '.join(PLOT_KINDS)}"):
        plot_kind(Path(name))


def test_svg_is_xml_with_the_names_as_text_and_png_has_its_size(hostile, tmp_path):
    for kind in ("latency", "roofline", "regimes", "tolerance"):
        path = tmp_path / f"{kind}.svg"
        write_plot(hostile, path)
        tree = ElementTree.parse(path).getroot()
        assert tree.tag == f"{SVG}svg"
        texts = [element.text for element in tree.iter(f"{SVG}text")]
        assert any("<&\"'>\\x00$x$" in text or "]]><b>\\x1b$a_b$.py" in text for text in texts)
        assert f"run {hostile.run.meta.id}, 2026-01-02" in texts, "a plot alone still names its run"
        assert len(list(tree.iter(f"{SVG}title"))) > 1, "marks have titles"
        text = path.read_text()
        # Inline styles are what the page's policy forbids; a reference could fetch something.
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<image|href|style=|url\(", text)
        assert set(re.findall(r'(?:fill|stroke)="([^"]*)"', text)) <= {"none", *variables()}
        write_plot(hostile, tmp_path / f"{kind}.png")
        head = (tmp_path / f"{kind}.png").read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        # Two pixels for each of the SVG's.
        width, height = struct.unpack(">II", head[16:])
        assert width == 2 * int(tree.get("width")) and height == pytest.approx(2 * float(tree.get("height")), abs=1)


def variables():
    return {f"var(--{name}, {value})" for name, value in LIGHT.items()}


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


def test_the_command_draws_every_plot_or_refuses_before_it_writes(stored_run, tmp_path, capsys):
    names = [str(tmp_path / name) for name in ("latency.svg", "x-roofline.svg")]
    with pytest.raises(SystemExit) as end:
        cli.main(["report", str(stored_run.folder), *(part for name in names for part in ("--plot", name))])
    assert end.value.code in (0, None)
    assert all(Path(name).read_text().startswith("<?xml") for name in names)
    assert capsys.readouterr().out.count("plot drawn to") == 2
    page, good, bad = (str(tmp_path / name) for name in ("page.html", "fp64.svg", "nothing.svg"))
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


def test_committed_plots_are_what_the_records_give(root, tmp_path, data):
    # Those of the ladders are compared in device/test_ladder.py.
    plots = {path.name: path for path in (root / "briefs" / "plots").iterdir() if not path.name.startswith("ladder_")}
    # A PNG's pixels depend on the font library; the SVG beside it is compared.
    assert {Path(name).stem for name in plots} == set(COMMITTED)
    for stem, record in COMMITTED.items():
        again = tmp_path / f"{stem}.svg"
        write_plot(data[record], again)
        path = plots[again.name]
        assert again.read_text() == path.read_text(), f"to fix this, draw it from {record} again"
