"""The shape of a forward, shape files, and problem files."""

from rooflane.shapes.problem import Problem, from_dict, load_problems
from rooflane.shapes.shape import DTYPE_BYTES, SIZE_FIELDS, Shape, ShapeError, load_shapes

__all__ = ["DTYPE_BYTES", "SIZE_FIELDS", "Problem", "Shape", "ShapeError", "from_dict", "load_problems", "load_shapes"]
