"""Where in a file a complaint belongs."""

import pytest

from rooflane.dispatch.toml_source import key_line

TEXT = """\
[[rule]]
name = "a"  # when = { seq_len = 1 }
when = { seq_len = { ge = 5 }, "d_model" = 3 }
family = "one"

[[rule]]
name = "b"
colour = 1
[rule.when]
seq_len = 4
"""


@pytest.mark.parametrize(
    ("header", "path", "line"),
    [
        (1, "name", 2),
        (1, "when", 3),
        (1, "when.seq_len.ge", 3),
        (1, "when.d_model", 3),
        (1, "because", 1),
        (1, "colour", 1),
        (6, "colour", 8),
        (6, "name.more", 7),
    ],
)
def test_a_key_is_found_in_its_own_table_or_the_header_named(header, path, line):
    assert key_line(TEXT, header, path) == line
