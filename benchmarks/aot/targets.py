"""Accelerators by name: what XLA needs to compile for them, and their memory and bandwidth.

The accelerator need not be present. Compiling for it needs its compiler, from the extra `tpu` or `cuda13`.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from typing import Literal

import jax
from jax.experimental import topologies

from kvjax.checks import shown


@dataclass(frozen=True)
class Chip:
    """A kind of device.

    Attributes:
        memory: in bytes.
        bandwidth: of the memory in bytes/s, from the vendor.
    """

    memory: int
    bandwidth: int


@dataclass(frozen=True)
class Gpu(Chip):
    """A kind of GPU, by the fields of XLA's description.

    Attributes:
        name: as the driver reports it.
        capability: CUDA compute capability (major, minor).
        cores: streaming multiprocessors.
        fpus_per_core: float32 units per core.
        shared_memory: bytes per core.
        l2_cache: in bytes.
        clock: in GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    shared_memory: int
    l2_cache: int
    clock: float

    @property
    def description(self) -> str:
        """XLA's GpuTargetConfigProto as text. XLA reads the same facts from a GPU that is present."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {self.cores}
  fpus_per_core: {self.fpus_per_core}
  shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  runtime_version: "13.0.0"
  driver_version: "13.0.0"
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {"ACCELERATED_FEATURES" if major >= 9 else "NONE"}
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{self.name}"
"""


H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    shared_memory=233_472,
    l2_cache=52_428_800,
    clock=1.98,
    memory=84_978_434_048,
    bandwidth=3_352_320_000_000,
)

GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        fpus_per_core=64,
        shared_memory=167_936,
        l2_cache=41_943_040,
        clock=1.41,
        memory=85_100_068_864,
        bandwidth=2_039_040_000_000,
    ),
    "h100": H100,
    "h200": replace(H100, name="NVIDIA H200 141GB HBM3e", memory=151_397_597_184, bandwidth=4_800_000_000_000),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        fpus_per_core=128,
        shared_memory=233_472,
        l2_cache=132_644_864,
        clock=1.965,
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
    ),
}

TPUS = {
    "v5e": Chip(memory=17_179_869_184, bandwidth=819_000_000_000),
    "v5p": Chip(memory=102_005_473_280, bandwidth=2_765_000_000_000),
    "v6e": Chip(memory=34_359_738_368, bandwidth=1_640_000_000_000),
}


@dataclass(frozen=True)
class Target:
    """Devices of one kind, connected as in one host (GPUs) or one slice (TPUs).

    Attributes:
        name: for example "h200:8" for eight GPUs, "v5p:2x2x2" for a TPU slice.
        count: the number of devices.
    """

    name: str
    platform: Literal["cuda", "tpu"]
    chip: Chip
    count: int

    def devices(self) -> list[jax.Device]:
        """Returns devices to compile for. Meshes and shardings accept them; they hold no arrays.

        Raises:
            ImportError: if the extra with their compiler is not installed.
            ValueError: if the TPU compiler does not know the shape of the slice.
        """
        try:
            if isinstance(self.chip, Gpu):
                # hosts x processes per host x devices per process
                described = {"target_config": self.chip.description, "topology": f"1x1x{self.count}"}
                return list(topologies.get_topology_desc(platform="cuda", **described).devices)
            if jax.default_backend() != "tpu":
                os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # otherwise libtpu waits for a cloud's metadata
                os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no lock is needed on absent devices
            return list(topologies.get_topology_desc(self.name, platform="tpu").devices)
        except (NotImplementedError, RuntimeError) as error:
            if "not implemented for cuda" in str(error) or "TPU support not installed" in str(error):
                extra = "cuda13" if self.platform == "cuda" else "tpu"
                raise ImportError(
                    f"compiling for {self.name} needs a compiler: pip install '.[{extra}]' in a checkout"
                ) from error
            if "INVALID_ARGUMENT" in str(error) and self.platform == "tpu":
                raise ValueError(f"target {shown(self.name)}: the TPU compiler knows no such slice: {error}") from error
            raise


def target(name: str) -> Target:
    """Returns the target of a name.

    Raises:
        ValueError: for another name. The message lists the accepted names.
    """
    kind, _, size = name.partition(":")
    if kind in GPUS and re.fullmatch(r"|[1-9]\d*", size):
        return Target(name, "cuda", GPUS[kind], int(size or 1))
    if kind in TPUS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", size):
        return Target(name, "tpu", TPUS[kind], math.prod(map(int, size.split("x"))))
    raise ValueError(
        f"target {shown(name)}: expected GPUs as KIND:COUNT with KIND one of {', '.join(GPUS)}, and TPU slices as "
        f"KIND:SIDExSIDE[xSIDE] with KIND one of {', '.join(TPUS)}"
    )
