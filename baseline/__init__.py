"""The reference forward, its inputs, the chunked reference, and the free controls."""

from rooflane.baseline.chunked_reference import chunked_reference
from rooflane.baseline.controls import CONTROLS, PROBES, Control
from rooflane.baseline.reference import (
    BaselineTransformer,
    TransformerConfig,
    build_baseline,
    config_of,
    copy_model_weights,
    generate_random_case,
    reference_numerics,
    torch_dtype,
)

__all__ = [
    "CONTROLS",
    "PROBES",
    "BaselineTransformer",
    "Control",
    "TransformerConfig",
    "build_baseline",
    "chunked_reference",
    "config_of",
    "copy_model_weights",
    "generate_random_case",
    "reference_numerics",
    "torch_dtype",
]
