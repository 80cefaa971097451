"""Accelerators by name."""

import jax
import pytest
from jax.experimental import topologies

from benchmarks.aot.targets import GPUS, TPUS, target


def test_names() -> None:
    gpus, slice_ = target("h200:8"), target("v5p:2x2x2")
    assert (gpus.platform, gpus.count, gpus.chip) == ("cuda", 8, GPUS["h200"])
    assert (slice_.platform, slice_.count, slice_.chip) == ("tpu", 8, TPUS["v5p"])
    assert target("h100").count == 1
    assert target("v6e:2x4").count == 8


@pytest.mark.parametrize("name", ["h300:8", "h200:0", "h200:8x1", "v5p", "v5p:8", "v5p:2x0x2", "v5p:2x2x2x2", ""])
def test_names_of_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"target '{name}': expected GPUs as .*h200.*TPU slices as .*v5p"):
        target(name)


@pytest.mark.parametrize(
    ("name", "error", "extra"),
    [
        ("h200:8", NotImplementedError("topology not implemented for cuda"), "cuda13"),
        ("v5p:2x2x2", RuntimeError("JAX TPU support not installed; cannot generate TPU topology."), "tpu"),
    ],
)
def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, extra: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error  # what JAX says without the extra

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    with pytest.raises(ImportError, match=rf"compiling for {name} needs .* pip install '\.\[{extra}\]'"):
        target(name).devices()


@pytest.mark.parametrize("name", [*(f"{kind}:2" for kind in GPUS), "v5e:2x2", "v5p:2x2x2", "v6e:2x4"])
def test_devices(name: str) -> None:
    try:
        devices = target(name).devices()
    except ImportError as error:
        pytest.skip(str(error))
    assert len(devices) == target(name).count
    assert {device.platform for device in devices} == {"gpu" if name.partition(":")[0] in GPUS else "tpu"}
    assert not set(devices) & set(jax.devices())


@pytest.mark.parametrize("name", ["v5e:3x5", "v6e:3x3"])
def test_slices_that_are_none(name: str) -> None:
    try:
        target("v5e:2x2").devices()
    except ImportError as error:
        pytest.skip(str(error))
    with pytest.raises(ValueError, match=f"target '{name}': the TPU compiler knows no such slice"):
        target(name).devices()
