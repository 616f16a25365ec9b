"""The report page and the plots: a run's records as one HTML file, and as SVG and PNG pictures."""

from rooflane.eval.report.page.charts import PLOT_KINDS, plot_kind, write_plot
from rooflane.eval.report.page.html import render_page, write_page
from rooflane.eval.report.page.source import PageData, read_page

__all__ = ["PLOT_KINDS", "PageData", "plot_kind", "read_page", "render_page", "write_page", "write_plot"]
