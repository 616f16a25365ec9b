"""Device profiles: every shipped figure stated in full, every malformed file refused with its place."""

from __future__ import annotations

import os
import re

import pytest

from rooflane.dispatch import (
    Profile,
    ProfileError,
    host_profile,
    keep_profile,
    kept_path,
    load_profile,
    match_profile,
    profile_names,
)
from rooflane.dispatch.device import kept_note
from rooflane.dispatch.profile import duration, size
from rooflane.families import Limits

LIMITS = [name for name in vars(Limits) if not name.startswith("_")]


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """Keep profiles of this test apart from those of other tests."""
    monkeypatch.setenv("ROOFLANE_STATE_DIR", str(tmp_path / "state"))


SHIPPED = ["a100-80", "cpu", "h100", "h200", "l4", "rtx3090", "rtx4090", "rtx5090", "t4"]


def test_shipped_names():
    assert profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_provide_every_limit_with_a_source(name):
    profile = load_profile(name)
    assert profile.name == name
    assert all(hasattr(profile, limit) for limit in LIMITS)
    assert all(figure.source for figure in profile.figures().values())
    assert {figure.mark for figure in profile.figures().values()} <= {"measured", "datasheet", "assumed"}


def test_figures_are_read_in_si_units(h200):
    assert h200.matmul_flops("float32") == 360e12
    assert h200.matmul_flops("float16") == 714e12
    assert h200.copy_bytes_per_s == 4.25e12
    assert h200.eager_dispatch_s == pytest.approx(1.8e-3 / 132, rel=0.01)
    assert h200.memory_bytes == 141_000_000_000
    assert h200.cache_bytes == 60 * 2**20
    assert h200.shared_memory_bytes == 227 * 1024
    assert h200.graph_node_s == 1e-6
    assert h200.usd_per_hour == h200.price.value


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - {"cpu"}))
def test_special_rate_follows_its_formula(name):
    profile = load_profile(name)
    per_sm = profile.special_per_s / profile.sm_count.value
    clock = float(profile.special.source.split(" x ")[-1].split()[0])
    assert per_sm == pytest.approx(16 * clock * 1e9, rel=1e-3)


def test_saving_and_loading_keeps_every_figure(h200, tmp_path):
    path = tmp_path / "mine.toml"
    probed = h200.with_figure("copy_rate", 4.1, "measured", 'a "quoted" source \\ with a backslash')
    probed.save(path)
    assert load_profile(path) == probed
    assert load_profile(str(path)).copy_bytes_per_s == pytest.approx(4.1e12)
    assert h200.copy_bytes_per_s == 4.25e12


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ProfileError, match="'b300'.*auto, a100-80, cpu"):
        load_profile("b300")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match="nowhere.toml: no such file"):
        load_profile(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("old", "new", "line", "complaint"),
    [
        ('unit = "TB/s"', 'unit = "GB/s"', "[copy_rate]", "copy_rate: unit is 'GB/s'; this figure is stated in TB/s"),
        ("value = 4.25", "value = 0", "[copy_rate]", "copy_rate: value is 0"),
        ("value = 4.25", "value = -1", "[copy_rate]", "copy_rate.value"),
        ("value = 4.25", "value = inf", "[copy_rate]", "copy_rate.value"),
        ("value = 4.25", 'value = "fast"', "[copy_rate]", "copy_rate.value"),
        ("value = 4.25", "value = ", "value = ", "not valid TOML"),
        ("[copy_rate]", "[copy_rte]", 'name = "h200"', "copy_rate: Field required"),
        ('kind = "cuda"', 'kind = "tpu"', 'name = "h200"', "kind"),
    ],
)
def test_malformed_profiles_name_file_line_and_field(h200, tmp_path, old, new, line, complaint):
    text = h200.to_toml().replace(old, new)
    path = tmp_path / "broken.toml"
    path.write_text(text)
    number = text.splitlines().index(line) + 1
    with pytest.raises(ProfileError, match=re.escape(f"broken.toml:{number}: {complaint}")):
        load_profile(path)


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA L4", "l4"), ("Tesla T4", "t4"), ("NVIDIA GeForce RTX 5090", "rtx5090")],
)
def test_driver_names_find_their_profile(device, name):
    assert match_profile(device).name == name


@pytest.mark.parametrize("device", ["NVIDIA L40S", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_devices_with_similar_names_are_not_mistaken(device):
    with pytest.raises(ProfileError, match="rooflane probe"):
        match_profile(device)


def test_auto_takes_the_gpu_at_hand(monkeypatch):
    monkeypatch.setitem(load_profile.__globals__, "device_name", lambda: "NVIDIA H200")
    assert load_profile("auto").name == "h200"
    monkeypatch.setitem(load_profile.__globals__, "device_name", lambda: "NVIDIA B300")
    with pytest.raises(ProfileError, match="'NVIDIA B300'.*rooflane probe --keep"):
        load_profile("auto")


def test_auto_without_a_gpu_is_the_cpu_with_this_machines_memory(monkeypatch):
    monkeypatch.setitem(load_profile.__globals__, "device_name", lambda: None)
    monkeypatch.setitem(load_profile.__globals__, "host_memory_bytes", lambda: 7_000_000_000)
    profile = load_profile()
    assert (profile.kind, profile.memory_bytes, profile.memory.mark) == ("cpu", 7_000_000_000, "measured")


def test_memory_stays_as_shipped_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setitem(load_profile.__globals__, "host_memory_bytes", lambda: None)
    assert host_profile() == load_profile("cpu")


def test_profiles_are_frozen(h200):
    with pytest.raises(ValueError, match="frozen"):
        h200.name = "other"
    assert isinstance(h200, Profile)


def test_auto_is_the_kept_profile_of_the_device_and_of_no_other(h200, monkeypatch):
    at_hand = {"name": None}
    monkeypatch.setitem(load_profile.__globals__, "device_name", lambda: at_hand["name"])
    assert load_profile("auto") == host_profile() and kept_note() is None
    measured = host_profile().with_figure("copy_rate", 0.123, "measured", "a test")
    keep_profile(measured)
    assert load_profile("auto") == load_profile("AUTO", "cpu") == measured
    assert f"measured on this device less than 2 hours ago ({kept_path()})" in kept_note()
    old = kept_path().stat().st_mtime - 72 * 3600
    os.utime(kept_path(), (old, old))
    assert "3 days ago" in kept_note()
    # A GPU at hand has a profile of its own; the CPU's is still there for the CPU.
    at_hand["name"] = "NVIDIA B300"
    keep_profile(h200.model_copy(update={"name": "b300"}), "NVIDIA B300")
    assert load_profile("auto").name == "b300" and load_profile("auto", "cpu") == measured
    at_hand["name"] = "NVIDIA H200"
    assert load_profile("auto") == load_profile("h200")


def test_auto_of_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(load_profile.__globals__, "device_name", lambda: None)
    with pytest.raises(ProfileError, match="no usable GPU"):
        load_profile("auto", "cuda")


def test_names_are_taken_in_any_case():
    assert load_profile("H200") == load_profile("h200")


def test_times_and_sizes_have_three_digits_and_the_unit_that_fits():
    times = {0: "0", 2.5e-6: "2.5 us", 0.0123: "12.3 ms", 1: "1 s", 135.4: "135 s", 999.6: "1000 s", 7200: "2 h"}
    assert {seconds: duration(seconds) for seconds in times} == times
    sizes = {1: "1 B", 1500: "1.5 kB", 2.5e9: "2.5 GB", 41.062e12: "41.1 TB", 141e9: "141 GB"}
    assert {count: size(count) for count in sizes} == sizes
