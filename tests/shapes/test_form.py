"""Forms: what differs from the published one is named, and unknown names are refused."""

from __future__ import annotations

import pytest

from rooflane.shapes import ACTIVATIONS, PUBLISHED, Form


def test_the_published_form_differs_in_nothing():
    assert Form() == PUBLISHED and PUBLISHED.differences() == []


def test_every_field_has_words():
    other = Form(False, "relu", "rms", False, 64, 10000.0, True)
    words = ["post-norm", "relu", "RMSNorm", "no final norm", "heads of 64", "rotary positions", "a bias on the scores"]
    assert other.differences() == words


@pytest.mark.parametrize(
    "fields, accepted", [({"activation": "tanh"}, ACTIVATIONS), ({"norm": "batch"}, ("layer", "rms"))]
)
def test_an_unknown_name_is_refused(fields, accepted):
    with pytest.raises(ValueError, match="accepted: " + ", ".join(accepted)):
        Form(**fields)
