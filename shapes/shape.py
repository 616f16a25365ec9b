"""The shape of one transformer forward, the request that every other package takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SIZE_FIELDS = ("batch_size", "seq_len", "d_model", "num_heads", "ffn_dim", "num_layers")


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
