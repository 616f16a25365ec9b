"""The shape and the form of a forward, shape files, and problem files."""

from rooflane.shapes.form import ACTIVATIONS, PUBLISHED, Form
from rooflane.shapes.problem import Problem, from_dict, load_problems
from rooflane.shapes.shape import DTYPE_BYTES, SIZE_FIELDS, Shape, ShapeError, load_shapes

__all__ = [
    "ACTIVATIONS",
    "DTYPE_BYTES",
    "PUBLISHED",
    "SIZE_FIELDS",
    "Form",
    "Problem",
    "Shape",
    "ShapeError",
    "from_dict",
    "load_problems",
    "load_shapes",
]
