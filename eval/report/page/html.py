"""The report page: one HTML file that opens offline, from a run's records alone."""

from __future__ import annotations

import os
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from rooflane.eval.exit_codes import EvaluationError
from rooflane.eval.report.page import tables
from rooflane.eval.report.page.charts import NARROW, PLOT_KINDS, WIDE, draw
from rooflane.eval.report.page.drawing import clean, scheme_css, svg_text
from rooflane.eval.report.page.source import Headline, PageData, condition_texts, headline_texts, raw_files

TEMPLATES = Path(__file__).parent.parent / "templates"
VERDICT_SIGNS = {"faster": "▲", "slower": "▼", "none": "○", "equivalent": "=", "inconclusive": "?"}


def render_page(data: PageData, folder: Path) -> str:
    """Return the page of a run, to be written into `folder`; the same records give the same bytes.

    Texts of the records are escaped, and the page's own policy forbids it to fetch anything.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    style = scheme_css(":root") + (TEMPLATES / "page.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    meta = data.run.meta
    return environment.get_template("page.html.j2").render(
        meta=meta,
        device=data.device,
        state=data.state,
        cards=[_card(*pair) for pair in zip(data.headlines, headline_texts(data.summary), strict=True)],
        problems=data.summary.problems(),
        tables=tables.report_sections(data),
        integrity=tables.integrity_table(data),
        confusion=tables.confusion_table(data),
        truth=tables.truth_table(data),
        price=tables.price_table(data),
        price_per_hour=meta.price_per_hour,
        conditions=condition_texts(data.summary),
        environment_tables=tables.environment_tables(data),
        files=[
            {"text": text, "name": path.name, "link": _link(path, folder), "digest": digest}
            for text, path, digest in raw_files(data.run)
        ],
        charts={kind: _chart(data, kind) for kind in PLOT_KINDS},
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src {_allowed(style)}; script-src {_allowed(script)}; "
        "base-uri 'none'; form-action 'none'",
    )


def write_page(data: PageData, path: Path) -> None:
    """Write a run's page; its links to the records are relative to where it lies."""
    try:
        path.write_text(render_page(data, path.parent), encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written ({error}); name another place") from None


def _chart(data: PageData, kind: str):
    """Return a chart drawn twice, for wide and for narrow places; None when there is nothing to draw."""
    from markupsafe import Markup

    charts = {name: draw(kind, data, width) for name, width in (("wide", WIDE), ("narrow", NARROW))}
    if charts["wide"] is None:
        return None
    return Markup("\n".join(svg_text(chart, f"{kind}-{name}", name) for name, chart in charts.items()))


def _card(headline: Headline, line: str) -> dict[str, str]:
    """Return what the top of the page says of one candidate; `line` is the report's own."""
    mean, verdict = headline.geomean, headline.verdict
    return {
        "candidate": headline.candidate,
        "figure": f"{mean.centre:.3g}x" if mean else "no mean",
        "interval": f"[{mean.low:.3g}, {mean.high:.3g}], 95 %" if mean and mean.low is not None else "",
        "sign": VERDICT_SIGNS.get(verdict, "!"),
        "verdict": "no verdict" if verdict == "none" else verdict.upper(),
        "kind": verdict,
        "why": headline.why,
        "line": line.removeprefix(f"{headline.candidate}: "),
    }


def _link(path: Path, folder: Path) -> str:
    """Return a relative link from the page's folder to a file."""
    relative = Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    return quote(relative if relative.startswith(".") else f"./{relative}")


def _allowed(text: str) -> str:
    """Return the policy's word for one inline text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
