"""The charts' geometry: texts never meet, values stand where the axis says, colours can be told apart."""

import itertools
import math

import pytest

from rooflane.eval import open_run
from rooflane.eval.report.page import PLOT_KINDS, read_page
from rooflane.eval.report.page.charts import latency, series_of, truth
from rooflane.eval.report.page.lanes import NARROW, WIDE
from rooflane.eval.report.page.palette import DARK, LIGHT
from rooflane.eval.report.page.scale import LogScale, log_scale
from rooflane.eval.report.page.scene import Marker, Scene, Text, overlap, place_labels, shorten, text_width
from rooflane.eval.stats.run import create_run
from rooflane.shapes import Shape

RECORDS = ["h200-published", "h200-lanes", "h200-half", "h200-bf16", "h200-cap30"]


@pytest.fixture(scope="module")
def data(root):
    return {name: read_page(open_run(root / "briefs" / "records" / name)) for name in RECORDS}


def scenes(page):
    """Yield every chart of a run, at both widths, with and without a title."""
    for (kind, draw), width in itertools.product(PLOT_KINDS.items(), (WIDE, NARROW)):
        scene = draw(page, width, titled=width == WIDE)
        if scene:
            yield f"{kind} {width}", scene


def faults(scene):
    """Return texts that leave the picture or meet another text."""
    texts = scene.texts()
    found = [
        f"{a.text!r} meets {b.text!r}" for a, b in itertools.combinations(texts, 2) if overlap(a.bounds(), b.bounds())
    ]
    for text in texts:
        left, top, right, bottom = text.bounds()
        if left < 0 or top < 0 or right > scene.width or bottom > scene.height:
            found.append(f"{text.text!r} leaves the picture")
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_no_text_meets_another_or_leaves_the_picture(data, name):
    assert {kind: found for kind, scene in scenes(data[name]) if (found := faults(scene))} == {}


def test_long_names_many_candidates_and_crowded_points_keep_apart(tmp_path, make_meta, full_rows):
    shapes = [Shape(f"shape-{number}-{'long' * 12}", 2, 8, 16, 2, 16, 1) for number in range(12)]
    names = tuple(f"{'candidate_' * 6}{number}.py" for number in range(8))
    meta = make_meta(shapes, candidates=names)
    run = create_run(tmp_path, meta)
    run.append(full_rows(meta, {name: 2.0 + place for place, name in enumerate(names)}))
    assert {kind: found for kind, scene in scenes(read_page(run)) if (found := faults(scene))} == {}


def test_every_measured_arm_has_a_mark_at_its_time(data):
    page = data["h200-published"]
    scene = latency(page, WIDE)
    marks = [item for item in scene.items if isinstance(item, Marker)]
    arms = [arm for shape in page.shapes for arm in shape.arms.values() if arm.event]
    assert len(arms) == 13 * 6 + 2
    assert len(marks) == len(arms) + len(page.arms), "a mark for each time and one in the legend for each arm"

    def across(title):
        (mark,) = [mark for mark in marks if mark.title.startswith(title)]
        return mark.x

    # On one logarithmic axis equal factors are equal distances.
    first = (across("eager: 2.20 ms") - across("dispatched: 0.0729 ms")) / math.log10(2.20 / 0.0729)
    sixth = (across("eager: 89.9 ms") - across("dispatched: 4.95 ms")) / math.log10(89.9 / 4.95)
    assert first == pytest.approx(sixth, rel=0.01)


@pytest.mark.parametrize("name", RECORDS)
def test_every_shape_is_named_in_the_planes(data, name):
    page = data[name]
    for kind in ("roofline", "regimes"):
        scene = PLOT_KINDS[kind](page, WIDE)
        if scene:
            shown = {text.text for text in scene.texts()}
            wanted = {s.id for s in page.shapes if kind == "roofline" or s.regime != "infeasible"}
            assert wanted <= shown


def test_the_roofline_holds_predicted_and_measured_places(data):
    scene = PLOT_KINDS["roofline"](data["h200-published"], WIDE)
    titles = [item.title for item in scene.items if isinstance(item, Marker)]
    assert "shape 1, eager predicted: 1.80 ms, 4.78 TFLOP/s" in titles
    assert "shape 1, eager: 2.20 ms, 3.91 TFLOP/s" in titles
    assert any(title.startswith("shape 1, dispatched predicted: 0.0930 ms") for title in titles)
    assert any(title.startswith("shape 14, dispatched: 3,155 ms") for title in titles)


def test_the_regime_map_marks_what_was_not_predicted(tmp_path, make_meta, make_record):
    meta = make_meta([Shape("a", 2, 8, 16, 2, 16, 1)], processes=1, controls=())
    predicted = meta.predictions[0].classification["regime"]
    event = 1_000_000 if predicted == "launch" else 3_000_000
    row = make_record(meta.shape_list()[0], 0, "eager", (event, event), device_ns=[1_000_000] * 3)
    host = row.timing.model_copy(update={"host_ns": [[900_000] * 3]})
    run = create_run(tmp_path, meta)
    run.append([row.model_copy(update={"timing": host})])
    scene = PLOT_KINDS["regimes"](read_page(run), WIDE)
    assert [text.text for text in scene.texts() if "not predicted" in text.text]
    assert {item.role for item in scene.items if isinstance(item, Marker) and not item.open} == {"bad"}


def test_what_has_nothing_to_show_is_not_drawn(data):
    assert truth(data["h200-bf16"], WIDE) is None
    assert PLOT_KINDS["regimes"](data["h200-cap30"], WIDE) is None


def test_series_differ_by_form_and_not_by_colour_alone(data):
    for name in RECORDS:
        series = series_of(data[name]).values()
        assert len({(entry.form, entry.open) for entry in series}) == len(series)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper(colours):
    for ground in ("paper", "band"):
        for role in ("ink", "muted", "good", "bad"):
            assert contrast(colours[role], colours[ground]) >= 4.5, (role, ground)
        for role in ("s0", "s1", "s2", "s3", "s4", "s5"):
            assert contrast(colours[role], colours[ground]) >= 3, (role, ground)
    # Links are text.
    assert contrast(colours["s0"], colours["paper"]) >= 4.5


def contrast(a, b):
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_logarithmic_scale_places_equal_factors_equally_far():
    scale = LogScale(0.1, 1000, 0, 400)
    assert [scale(value) for value in (0.1, 1, 10, 1000)] == pytest.approx([0, 100, 200, 400])
    assert (scale(1e-9), scale(1e9)) == pytest.approx((0, 400))
    assert [label for _, label in scale.ticks(apart=60)] == ["0.1", "1", "10", "100", "1000"]


def test_a_short_axis_still_has_ticks_to_read_values_by():
    """From 1.2 to 5 the powers of ten and their doubles leave 2 alone."""
    assert [label for _, label in LogScale(1.2, 4.9, 0, 600).ticks(apart=12)] == ["1.5", "2", "3", "4"]


@pytest.mark.parametrize("values", [[], [0.0, math.nan, math.inf], [3.0], [1e-7, 1e9]])
def test_scales_take_any_values(values):
    scale = log_scale(values, 0, 300)
    assert scale.high / scale.low >= 4
    assert len(scale.ticks(apart=10)) >= 2


def test_labels_give_way_to_what_is_there():
    scene = Scene(200, 200, "", "", [Text(100, 104, "taken", size=11), Marker(95, 100, "circle", "ink")])
    place_labels(scene, [(95, 100, "a"), (95, 100, "b")], (0, 0, 200, 200))
    assert len(scene.texts()) == 3
    assert faults(scene) == []


def test_texts_are_cut_to_their_place():
    assert shorten("short", 100) == "short"
    cut = shorten("x" * 100, 100)
    assert cut.endswith("…") and text_width(cut) <= 100
