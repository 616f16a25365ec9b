"""One self-contained submission file, written from the sources of the families that the shapes need."""

from rooflane.eval.export.sources import ExportError
from rooflane.eval.export.write import Export, export, write_export

__all__ = ["Export", "ExportError", "export", "write_export"]
