"""The shape of a forward, and shape files."""

from rooflane.shapes.shape import DTYPE_BYTES, SIZE_FIELDS, Shape, ShapeError, load_shapes

__all__ = ["DTYPE_BYTES", "SIZE_FIELDS", "Shape", "ShapeError", "load_shapes"]
