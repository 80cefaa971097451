"""Which implementation runs, and what is said when it is not the platform's own."""

import importlib
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from kvjax import pallas_kernels

module = importlib.import_module("kvjax.pallas_kernels.dispatch")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Pretends to run on a GPU, with nothing announced yet and no choice made."""
    monkeypatch.setattr(module, "_announced", set())
    monkeypatch.setattr(module, "_operations", {})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("KVJAX_KERNELS", raising=False)


@pytest.fixture
def operation(monkeypatch):
    """Makes an operation called `name` whose kernel of each backend is the function given."""

    def make(name="double", **kernels):
        def reference(x, *, plus=0):
            return 2 * x + plus

        reference.__name__ = name
        package = f"kvjax.pallas_kernels.{name}"
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        for backend, kernel in kernels.items():
            contents = types.ModuleType(f"{package}.{backend}")
            setattr(contents, name, kernel)
            monkeypatch.setitem(sys.modules, contents.__name__, contents)
        return module.dispatch(reference, *kernels)

    return make


def unable(*args, **kwargs):
    raise NotImplementedError("head_dim 80")


def says(name):
    """A kernel that returns its name and what it was given."""
    return lambda x, *, plus=0, interpret: (name, x, plus, interpret)


def test_the_platform_s_own_kernel_runs(operation):
    call = operation(triton=says("triton"), mosaic_tpu=unable)
    assert call(3, plus=1) == ("triton", 3, 1, False)
    assert module.implementation("double") == ("triton", "the platform is gpu")


def test_the_mesh_around_says_what_is_compiled_for(operation):
    """Not the machine's own backend: a program may be compiled for devices that are not here."""
    call = operation(triton=lambda x, *, interpret: 0 * x)
    mesh = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])  # CPUs, on a machine that pretends to have a GPU
    spread = jax.shard_map(call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    assert (spread(jax.numpy.float32(3)), call(3)) == (6, 0)


def test_without_one_the_reference_runs_and_nothing_is_said(operation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operation(mosaic_tpu=unable)(3, plus=1) == 7
    assert module.implementation("double") == ("reference", "the platform is gpu, for which there is no kernel")


def test_a_kernel_that_cannot_is_announced_once(operation):
    call = operation(triton=unable)
    with pytest.warns(UserWarning, match=r"double: no triton kernel.*head_dim 80.*XLA") as said:
        assert [call(3), call(4, plus=1)] == [6, 9]
    assert len(said) == 1
    with pytest.warns(UserWarning, match="triple"):
        assert operation("triple", triton=unable)(1) == 2


def test_other_errors_of_a_kernel_are_not_swallowed(operation):
    def broken(x, *, interpret):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        operation(triton=broken)(3)


def test_the_environment_and_a_context_choose(operation, monkeypatch):
    call = operation(triton=says("triton"), mosaic_tpu=says("mosaic_tpu"))
    other = operation("other", triton=says("triton"))
    monkeypatch.setenv("KVJAX_KERNELS", "reference")
    assert call(3) == 6
    assert module.implementations()["double"] == ("reference", "KVJAX_KERNELS asks for it")
    with pallas_kernels.use("default"):
        assert call(3) == ("triton", 3, 0, False)
        with pallas_kernels.use("mosaic_tpu-interpret"):
            assert call(3) == ("mosaic_tpu", 3, 0, True)
            assert other(3) == 6
            assert module.implementations() == {
                "double": ("mosaic_tpu-interpret", "kvjax.pallas_kernels.use asks for it"),
                "other": (
                    "reference",
                    "kvjax.pallas_kernels.use asks for mosaic_tpu-interpret, of which there is none",
                ),
            }
        assert call(3) == ("triton", 3, 0, False)
    assert call(3) == 6


def test_functions_under_jit_are_traced_again_where_the_choice_differs(operation):
    call = jax.jit(operation(triton=lambda x, *, interpret: x * (-1 if interpret else 1)))
    x = jnp.float32(3)
    assert call(x) == 3
    with pallas_kernels.use("reference"):
        assert call(x) == 6
    with pallas_kernels.use("triton-interpret"):
        assert call(x) == -3
    assert call(x) == 3


def test_unknown_choices_are_refused_by_name(operation, monkeypatch):
    accepted = "'cuda'; accepted are default, reference, triton-interpret, mosaic_tpu-interpret"
    with pytest.raises(ValueError, match=f"use: kernels {accepted}"):
        pallas_kernels.use("cuda")
    call = operation()
    monkeypatch.setenv("KVJAX_KERNELS", "cuda")
    with pytest.raises(ValueError, match=f"KVJAX_KERNELS: kernels {accepted}"):
        call(3)
