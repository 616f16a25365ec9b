"""A probed profile is complete, marked as measured, and readable again."""

from __future__ import annotations

import pytest
import torch

from rooflane.dispatch import Profile, load_profile
from rooflane.eval.device import probe
from rooflane.eval.device.probe import measure_profile

CPU = torch.device("cpu")
# What a CPU has none of, or what cannot be measured.
NOT_MEASURED = {"kernel_launch", "graph_replay", "shared_memory", "price"}


@pytest.fixture(scope="module")
def probed() -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        # Whoever shares the host with the tests must not decide them.
        patch.setattr(probe, "doubt", lambda windows: "")
        # Sizes and units are tested, not the precision that a longer reading buys.
        patch.setattr(probe, "PATIENCE_S", 0.02)
        return measure_profile("cpu")


def test_every_measurable_figure_is_marked_measured_with_date_and_device(probed: Profile):
    figures = probed.figures()
    assert {name for name, figure in figures.items() if figure.mark != "measured"} == NOT_MEASURED
    for name in figures.keys() - NOT_MEASURED:
        assert figures[name].source.startswith("rooflane probe, 20") and probed.title in figures[name].source


def test_figures_are_possible_for_a_cpu(probed: Profile):
    # A factor of ten round anything that runs this suite; a slip of units is a thousand.
    assert 1e-7 < probed.eager_dispatch_s < 1e-1
    assert 1e8 < probed.copy_bytes_per_s < 1e13
    assert 1e8 < probed.matmul_flops("float32") < 1e14
    assert probed.kind == "cpu" and probed.capability is None and probed.match == ()
    assert probed.sm_count.value == torch.get_num_threads()


def test_a_saved_profile_loads_as_the_same_profile(probed: Profile, tmp_path):
    path = tmp_path / "host.toml"
    probed.save(path)
    assert load_profile(path) == probed


def stub(monkeypatch: pytest.MonkeyPatch, doubt: str = "") -> None:
    """Put numbers in the place of readings."""
    for reading in ("smallest_op_s", "copy_bytes_per_s", "special_per_s"):
        monkeypatch.setattr(probe, reading, lambda *given: 1.0)
    monkeypatch.setattr(probe, "eager_dispatch_s", lambda device: (1.25e-5, doubt))
    monkeypatch.setattr(probe, "matmul_flops", lambda device, dtype: None if dtype == "bfloat16" else 2e12)


@pytest.mark.parametrize(("doubt", "mark"), [("", "measured"), ("two readings lie apart", "assumed")])
def test_a_dispatch_cost_in_doubt_is_not_called_measured(monkeypatch: pytest.MonkeyPatch, doubt: str, mark: str):
    stub(monkeypatch, doubt)
    figure = measure_profile("cpu").eager_dispatch
    assert (figure.value, figure.mark) == (12.5, mark)
    assert ("busy host: two readings lie apart; probe again" in figure.source) == bool(doubt)


@pytest.mark.parametrize(
    ("windows", "reason"),
    [
        ([(2.0, 0.99), (1.0, 0.99), (1.05, 0.5)], ""),
        ([(2.0, 0.99), (1.0, 0.99), (1.5, 0.99)], "its two quickest readings lie 50% apart"),
        ([(1.0, 0.6), (1.0, 0.6), (1.5, 0.99)], "other work took 40% of the host's time"),
    ],
)
def test_the_quickest_window_must_be_confirmed_and_undisturbed(windows, reason: str):
    assert probe.doubt(windows) == reason


def test_windows_go_on_until_the_quickest_is_confirmed(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def doubt(windows):
        asked.append(len(windows))
        return "" if len(windows) == 6 else "not yet"

    monkeypatch.setattr(probe, "doubt", doubt)
    seconds, reason = probe.eager_dispatch_s(CPU)
    assert asked == [4, 5, 6, 6] and reason == ""
    assert 1e-7 < seconds < 1e-1


def test_name_can_be_chosen(monkeypatch: pytest.MonkeyPatch):
    stub(monkeypatch)
    profile = measure_profile("cpu", name="mine")
    assert profile.name == "mine"
    # A device without the dtype gets the float32 rate, marked as the assumption it is.
    assert profile.matmul_bfloat16.value == 2.0 and profile.matmul_bfloat16.mark == "assumed"


@pytest.mark.parametrize(("text", "size"), [("32768K\n", 32768 << 10), ("8M", 8 << 20), ("512", 512)])
def test_cache_sizes_are_read_in_the_kernel_units(text: str, size: int):
    assert probe._size(text) == size


@pytest.mark.parametrize(("value", "rounded"), [(0.0, 0.0), (1234.56, 1230.0), (0.00123456, 0.00123), (999.9, 1000.0)])
def test_figures_are_rounded_to_three_digits(value: float, rounded: float):
    assert probe.rounded(value) == pytest.approx(rounded, rel=1e-12)


def test_call_time_is_the_least_disturbed(monkeypatch: pytest.MonkeyPatch):
    # The clock as it is read: the beginning, two calls of 5 s and 0.02 s, and the look whether to go on.
    ticks = iter([0.0, *[0.0, 5.0], *[5.0, 5.02], 6.0])
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(ticks))
    assert probe.seconds_per_call(lambda: None, CPU) == pytest.approx(0.02)


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_probe_fills_the_cuda_figures():
    profile = measure_profile("cuda")
    assert profile.graph_node_s < profile.eager_dispatch_s
    assert profile.shared_memory_bytes == torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    assert profile.matmul_flops("float16") > profile.matmul_flops("float32")
