"""Colours by role, for light and dark, after Okabe and Ito; every series also has a form of its own."""

from __future__ import annotations

from dataclasses import dataclass

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1b1f",
    "muted": "#5c5f66",
    "rule": "#d0d3d9",
    "band": "#f1f3f6",
    "good": "#006b4f",
    "bad": "#b03a00",
    "s0": "#0072b2",
    "s1": "#c04f00",
    "s2": "#007a5a",
    "s3": "#a8457d",
    "s4": "#806000",
    "s5": "#2b6f9e",
}
DARK = {
    "paper": "#16181c",
    "ink": "#eceef2",
    "muted": "#a9adb6",
    "rule": "#3b3f47",
    "band": "#21242a",
    "good": "#4fd1a5",
    "bad": "#ff9a5c",
    "s0": "#62b8ec",
    "s1": "#ff9a5c",
    "s2": "#3ccb9d",
    "s3": "#e79cc6",
    "s4": "#f0e442",
    "s5": "#9fd0f5",
}


@dataclass(frozen=True)
class Series:
    """How one arm is drawn: a form, a colour role, and whether it is open."""

    arm: str
    label: str
    form: str
    role: str
    open: bool = False


EAGER_STYLE = ("circle", "ink", True)
CONTROL_STYLES = {
    "identity": ("bar", "muted", False),
    "sdpa": ("triangle", "s2", True),
    "compiled": ("square", "s1", True),
    "compiled_reduce_overhead": ("down", "s3", True),
}
OTHER_CONTROL = ("cross", "muted", False)
REFERENCE_STYLE = ("plus", "ink", False)
CANDIDATE_STYLES = (
    ("diamond", "s0", False),
    ("square", "s4", False),
    ("triangle", "s3", False),
    ("down", "s2", False),
    ("circle", "s1", False),
    ("hexagon", "s5", False),
)


def scheme_css(selector: str) -> str:
    """Return the roles as CSS variables: light everywhere, dark on a screen that asks for it."""

    def rules(colours: dict[str, str]) -> str:
        return " ".join(f"--{role}: {colour};" for role, colour in colours.items())

    return (
        f"{selector} {{ {rules(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {rules(DARK)} }} }}\n"
    )


def mark_css(within: str) -> str:
    """Return the classes that scenes use, each role as a fill and as a stroke."""
    lines = [f"{within} text {{ font-family: system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; }}"]
    for role in LIGHT:
        lines.append(f"{within} .f-{role} {{ fill: var(--{role}); }} {within} .l-{role} {{ stroke: var(--{role}); }}")
    return "\n".join(lines) + "\n"
