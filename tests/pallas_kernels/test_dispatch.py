"""Which implementation runs, and what is said when it is not the platform's own."""

import importlib
import warnings

import jax
import pytest

module = importlib.import_module("kvjax.pallas_kernels.dispatch")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Pretends to run on a GPU, with nothing announced yet."""
    monkeypatch.setattr(module, "_announced", set())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def unable(*args, **kwargs):
    raise NotImplementedError("head_dim 80")


def double(x, *, plus=0):
    return 2 * x + plus


def test_the_platform_s_own_kernel_runs():
    call = module.dispatch("double", {"gpu": lambda x, plus: ("gpu", x, plus), "tpu": unable}, double)
    assert call(3, plus=1) == ("gpu", 3, 1)


def test_the_mesh_around_says_what_is_compiled_for():
    """Not the machine's own backend: a program may be compiled for devices that are not here."""
    call = module.dispatch("double", {"gpu": lambda x: 0 * x}, double)
    mesh = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])  # CPUs, on a machine that pretends to have a GPU
    spread = jax.shard_map(call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    assert (spread(jax.numpy.float32(3)), call(3)) == (6, 0)


def test_without_one_the_reference_runs_and_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.dispatch("double", {"tpu": unable}, double)(3, plus=1) == 7


def test_a_kernel_that_cannot_is_announced_once():
    call = module.dispatch("double", {"gpu": unable}, double)
    with pytest.warns(UserWarning, match="double: no gpu kernel.*head_dim 80.*XLA") as said:
        assert [call(3), call(4, plus=1)] == [6, 9]
    assert len(said) == 1
    with pytest.warns(UserWarning, match="triple"):
        assert module.dispatch("triple", {"gpu": unable}, double)(1) == 2


def test_other_errors_of_a_kernel_are_not_swallowed():
    def broken(x):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        module.dispatch("double", {"gpu": broken}, double)(3)
