"""How the layers of a stack compute, beside their sizes: the order of norms, the activation, the kind of norm."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rooflane.shapes.shape import Shape

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
NORMS = ("layer", "rms")


@dataclass(frozen=True)
class Form:
    """Describe a layer's function. The defaults are the published baseline's: pre-norm, LayerNorm, exact GELU.

    `norm_first` tells `x + f(norm(x))` (pre-norm) from `norm(x + f(x))` (post-norm). `activation` is one of
    `ACTIVATIONS`, `norm` one of `NORMS`. `final_norm` says whether a norm follows the last layer. `head_dim` is the
    width of a head where it is not `d_model / num_heads`, else None. `rotary_theta` is the base of rotary positions on
    q and k (angle `position theta^(-2 i / head_dim)` between elements i and i + head_dim / 2), None where there are
    none. `score_bias` says whether each call brings a bias or mask of the scores. Missing biases and scales are no
    matter of form: a stack's view fills them with 0 and 1. Raises `ValueError` for a name outside the lists.
    """

    norm_first: bool = True
    activation: str = "gelu"
    norm: str = "layer"
    final_norm: bool = True
    head_dim: int | None = None
    rotary_theta: float | None = None
    score_bias: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("activation", ACTIVATIONS), ("norm", NORMS)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}")

    def head_width(self, shape: Shape) -> int:
        """Return the columns of one attention head."""
        return self.head_dim or shape.head_dim

    def differences(self) -> list[str]:
        """Return where the form differs from the published one, in words such as "post-norm" or "relu"."""
        words = {
            "norm_first": "post-norm",
            "activation": self.activation,
            "norm": "RMSNorm",
            "final_norm": "no final norm",
            "head_dim": f"heads of {self.head_dim}",
            "rotary_theta": "rotary positions",
            "score_bias": "a bias on the scores",
        }
        return [words[field.name] for field in fields(self) if getattr(self, field.name) != field.default]


PUBLISHED = Form()
