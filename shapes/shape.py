"""The shape of one transformer forward, the request that every other package takes, and its CSV files."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SIZE_FIELDS = ("batch_size", "seq_len", "d_model", "num_heads", "ffn_dim", "num_layers")
REQUIRED_COLUMNS = ("id", *SIZE_FIELDS, "causal")
OPTIONAL_COLUMNS = ("dtype", "padding_ratio")
BOOLEANS = {"true": True, "false": False}


class ShapeError(ValueError):
    """A shape, or a shape file, that cannot be run; the message names the fault, its place and the fix."""


@dataclass(frozen=True)
class Shape:
    """Describe one forward of a pre-norm transformer stack, input and output `[B, S, D]`.

    `id` names the shape in tables and records. `padding_ratio` is the largest share of a sequence that may be
    padding, in `[0, 1)`. Each batch row draws its own length, as in the organiser's generator. Raises `ShapeError`
    when a size is not a positive integer or `d_model` is not divisible by `num_heads`.
    """

    id: str
    batch_size: int
    seq_len: int
    d_model: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    causal: bool = True
    dtype: str = "float32"
    padding_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in SIZE_FIELDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ShapeError(f"shape {self.id}: {name} is {value!r}; it must be a whole number above 0")
        if self.d_model % self.num_heads:
            raise ShapeError(
                f"shape {self.id}: d_model {self.d_model} is not divisible by num_heads {self.num_heads}; "
                "every head needs the same whole number of columns"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ShapeError(f"shape {self.id}: dtype is {self.dtype!r}; accepted: {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.padding_ratio < 1:
            raise ShapeError(f"shape {self.id}: padding_ratio is {self.padding_ratio}; it must be in [0, 1)")

    @property
    def head_dim(self) -> int:
        """Columns of one attention head."""
        return self.d_model // self.num_heads

    @property
    def tokens(self) -> int:
        """Tokens of one forward, padded ones included."""
        return self.batch_size * self.seq_len

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of the model's dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def has_elements(self) -> bool:
        """Whether the reference can be computed one batch element at a time."""
        return True

    @property
    def brief(self) -> str:
        """Batch, sequence and width, for a line of progress."""
        return f"{self.batch_size}x{self.seq_len}x{self.d_model}"

    def label(self) -> str:
        """Return the sizes on one line, in the order of the shape file's columns."""
        mask = "causal" if self.causal else "full"
        text = f"{self.batch_size}x{self.seq_len}x{self.d_model} h{self.num_heads} f{self.ffn_dim} l{self.num_layers}"
        extras = [mask]
        if self.dtype != "float32":
            extras.append(self.dtype)
        if self.padding_ratio:
            extras.append(f"pad {self.padding_ratio:g}")
        return f"{text} {' '.join(extras)}"

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for records and JSON output."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_shapes(path: str | Path) -> list[Shape]:
    """Read a shape file into a list, in file order.

    Columns: `id`, the six sizes and `causal` are required; `dtype` and `padding_ratio` may be left out. Raises
    `ShapeError` naming file, line, column and the accepted values.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ShapeError(
            f"{path}: no such shape file; the shipped files are named published.csv and neighbours.csv"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ShapeError(f"{path}: cannot be read as a shape file ({error}); it must be a UTF-8 CSV file") from None
    source = text.splitlines()
    reader = csv.DictReader(source, restkey="surplus", skipinitialspace=True)
    _check_header(path, reader.fieldnames)
    shapes: list[Shape] = []
    lines: dict[str, int] = {}
    for row in reader:
        if not source[reader.line_num - 1].strip(", \t"):
            continue  # spreadsheets write empty rows as bare commas
        shape = _parse_row(path, reader.line_num, row)
        if shape.id in lines:
            raise ShapeError(
                f"{path}:{reader.line_num}: column id: {shape.id!r} is already on line {lines[shape.id]}; "
                "give each shape its own id"
            )
        lines[shape.id] = reader.line_num
        shapes.append(shape)
    if not shapes:
        raise ShapeError(f"{path}: has a header and no shape; add one line per shape")
    return shapes


def _check_header(path: Path, header: list[str] | None) -> None:
    """Refuse a header with a missing, repeated or unknown column, or with another separator than the comma."""
    expected = f"columns: {','.join(REQUIRED_COLUMNS)} and optionally {','.join(OPTIONAL_COLUMNS)}"
    if not header:
        raise ShapeError(f"{path}: is empty; the first line must name the {expected}")
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and separator in header[0]:
            raise ShapeError(f"{path}:1: the columns are separated by {word}; separate them with commas")
    missing = [name for name in REQUIRED_COLUMNS if name not in header]
    unknown = [name for name in header if name not in REQUIRED_COLUMNS + OPTIONAL_COLUMNS]
    repeated = sorted({name for name in header if header.count(name) > 1})
    for problem, names in (("lacks", missing), ("has the unknown", unknown), ("repeats", repeated)):
        if names:
            raise ShapeError(f"{path}:1: the header {problem} {', '.join(map(repr, names))}; expected {expected}")


def _parse_row(path: Path, line: int, row: dict[str, str]) -> Shape:
    """Turn one CSV row into a `Shape`."""

    def refuse(column: str, accepted: str) -> ShapeError:
        return ShapeError(f"{path}:{line}: column {column}: {row[column]!r} is not {accepted}")

    if row.get("surplus"):
        raise ShapeError(f"{path}:{line}: has more values than the header has columns; remove {row['surplus']}")
    values: dict[str, object] = {}
    for column, raw in row.items():
        raw = (raw or "").strip()
        row[column] = raw
        if column in SIZE_FIELDS:
            if not (raw.isascii() and raw.isdigit() and int(raw) > 0):
                raise refuse(column, "a whole number above 0")
            values[column] = int(raw)
        elif column == "causal":
            if raw.lower() not in BOOLEANS:
                raise refuse(column, "one of true, false")
            values[column] = BOOLEANS[raw.lower()]
        elif column == "dtype" and raw:
            if raw not in DTYPE_BYTES:
                raise refuse(column, f"one of {', '.join(DTYPE_BYTES)}")
            values[column] = raw
        elif column == "padding_ratio" and raw:
            values[column] = _parse_ratio(raw)
            if values[column] is None:
                raise refuse(column, "a number in [0, 1)")
        elif column == "id":
            if not raw:
                raise refuse(column, "a name")
            values[column] = raw
    try:
        return Shape(**values)
    except ShapeError as error:
        raise ShapeError(f"{path}:{line}: {error}") from None


def _parse_ratio(raw: str) -> float | None:
    """Return the padding ratio, or None when it is no number in [0, 1)."""
    try:
        ratio = float(raw)
    except ValueError:
        return None
    return ratio if math.isfinite(ratio) and 0 <= ratio < 1 else None
