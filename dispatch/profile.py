"""Device profiles: a device's limits, each figure with its mark and source; and times and sizes as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rooflane.dispatch.toml_source import complaints, header_lines, read_toml

SI = {
    "TFLOP/s": 1e12,
    "TB/s": 1e12,
    "Gop/s": 1e9,
    "us": 1e-6,
    "GB": 1e9,
    "MiB": 2**20,
    "KiB": 2**10,
    "count": 1,
    "USD/h": 1,
}
Mark = Literal["measured", "datasheet", "assumed"]


class ProfileError(ValueError):
    """A profile that is unknown or malformed; the text says what is wrong, where, and how to fix it."""


class Figure(BaseModel):
    """One limit of a device: its value, its unit, how it is known and from where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(ge=0, allow_inf_nan=False)
    unit: str
    mark: Mark
    source: str = Field(min_length=1)

    @property
    def si(self) -> float:
        """The value in bytes, seconds, operations per second or plain counts."""
        return self.value * SI[self.unit]


def _in(unit: str, positive: bool = True) -> type[Figure]:
    """Return the type of a figure that must be stated in one unit, so that a wrong unit cannot scale a verdict."""

    def check(figure: Figure) -> Figure:
        if figure.unit != unit:
            raise ValueError(f"unit is {figure.unit!r}; this figure is stated in {unit}")
        if positive and not figure.value:
            raise ValueError("value is 0; it must be above 0")
        return figure

    return Annotated[Figure, AfterValidator(check)]


def _plain(field: str, meaning: str, whole: bool = False) -> Any:
    """Return a property: the value of a figure in SI units, rounded where it counts whole things."""
    return property(lambda self: round(getattr(self, field).si) if whole else getattr(self, field).si, doc=meaning)


class Profile(BaseModel):
    """A device's limits, as `rooflane.families.Limits` asks for them.

    `match` lists the names the driver gives the device, vendor prefix left off; a name matches whole, so that an L40S
    is never taken for an L4. Matmul rates are dense; `matmul_float32` is what the baseline reaches for float32
    models, that is TF32 where the device has it. `eager_dispatch` is the host's cost of one operation. `hierarchy` has
    the figures of `rooflane probe --hierarchy` by name; no prediction reads them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str
    kind: Literal["cuda", "cpu"]
    match: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    matmul_float32: _in("TFLOP/s")
    matmul_float16: _in("TFLOP/s")
    matmul_bfloat16: _in("TFLOP/s")
    copy_rate: _in("TB/s")
    special: _in("Gop/s")
    eager_dispatch: _in("us")
    kernel_launch: _in("us", positive=False)
    graph_replay: _in("us", positive=False)
    graph_node: _in("us", positive=False)
    memory: _in("GB")
    cache: _in("MiB")
    shared_memory: _in("KiB", positive=False)
    sm_count: _in("count")
    price: _in("USD/h", positive=False)
    hierarchy: dict[str, Figure] = {}

    memory_bytes = _plain("memory", "Device memory in bytes.", whole=True)
    shared_memory_bytes = _plain("shared_memory", "Shared memory one block may use, in bytes; 0 on a CPU.", whole=True)
    cache_bytes = _plain("cache", "Last-level cache in bytes.", whole=True)
    units = _plain("sm_count", "Multiprocessors of a GPU, cores of a CPU.", whole=True)
    copy_bytes_per_s = _plain("copy_rate", "Memory traffic of a large copy, read plus write.")
    special_per_s = _plain("special", "Special-function evaluations (exp, erf) per second.")
    eager_dispatch_s = _plain("eager_dispatch", "Host time of one eager operation.")
    kernel_launch_s = _plain("kernel_launch", "Time from one tiny kernel to the next in a stream.")
    graph_replay_s = _plain("graph_replay", "Event time of replaying a graph of one tiny kernel.")
    graph_node_s = _plain("graph_node", "Time one more tiny kernel adds to a graph.")
    usd_per_hour = _plain("price", "Price of the device for an hour.")

    def matmul_flops(self, dtype: str) -> float:
        """Return the dense matmul rate for models of that dtype, in FLOP/s."""
        return getattr(self, f"matmul_{dtype}").si

    def with_figure(self, field: str, value: float, mark: Mark, source: str) -> Profile:
        """Return the profile with one figure replaced, in its own unit; for a memory cap or a figure of this host."""
        figure = Figure(value=value, unit=getattr(self, field).unit, mark=mark, source=source)
        return self.model_copy(update={field: figure})

    def figures(self) -> dict[str, Figure]:
        """Return the figures by field name, in the order profiles state them."""
        return {name: value for name, value in self if isinstance(value, Figure)}

    def to_toml(self) -> str:
        """Return the profile as the text `load_profile` reads."""
        lines = [f"{key} = {json.dumps(getattr(self, key))}" for key in ("name", "title", "kind")]
        lines.append(f"match = {json.dumps(list(self.match))}")
        if self.capability:
            lines.append(f"capability = {json.dumps(list(self.capability))}")
        more = {f"hierarchy.{json.dumps(name)}": figure for name, figure in self.hierarchy.items()}
        for name, figure in (self.figures() | more).items():
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in figure]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the profile to a TOML file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Return the profile of a TOML file; raises `ProfileError` with its file, line and field."""
    data, text = read_toml(path, ProfileError)
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        place, sentence = complaints(error)[0]
        lines = header_lines(text, f"[{place[0]}]") if place else []
        where = ".".join(map(str, place))
        raise ProfileError(
            f"{path}:{lines[0] if lines else 1}: {where}: {sentence}; devices/h200.toml shows a whole profile"
        ) from None
