"""Dispatch: which implementation runs, in which order backends are tried, and what the user is told."""

import importlib
import re
import subprocess
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
    """Pretends that the platform is a GPU, with no warnings issued and no choice made."""
    monkeypatch.setattr(module, "_warned", set())
    monkeypatch.setattr(module, "_operations", {})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("KVJAX_KERNELS", raising=False)


@pytest.fixture
def operation(monkeypatch):
    """Returns a function that makes an operation, given the kernel of each of its backends."""

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


@pytest.fixture
def two_gpu_backends(monkeypatch):
    """Registers two backends of one platform, called first and second."""
    for name in ("first", "second"):
        monkeypatch.setitem(module.BACKENDS, name, "gpu")
    monkeypatch.setattr(module, "CHOICES", (*module.CHOICES, "first", "second"))


def refuses(reason):
    """A kernel that does not take its arguments."""

    def kernel(*args, **kwargs):
        raise NotImplementedError(reason)

    return kernel


def returns(name):
    """A kernel that returns its name and its arguments."""
    return lambda x, *, plus=0, interpret: (name, x, plus, interpret)


def test_the_kernel_of_the_platform_runs(operation):
    call = operation(triton=returns("triton"), mosaic_tpu=refuses("head_dim 80"))
    assert call(3, plus=1) == ("triton", 3, 1, False)
    assert module.implementation("double") == ("triton", "the platform is gpu")


def test_the_platform_is_that_of_the_surrounding_mesh(operation):
    """The machine's own backend does not count: a program may be compiled for devices that are not here."""
    call = operation(triton=lambda x, *, interpret: 0 * x)
    mesh = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])  # CPUs, although the default backend is a GPU
    mapped = jax.shard_map(call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    assert (mapped(jax.numpy.float32(3)), call(3)) == (6, 0)


def test_without_a_kernel_the_reference_runs_and_nothing_is_said(operation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operation(mosaic_tpu=refuses("head_dim 80"))(3, plus=1) == 7
    assert module.implementation("double") == ("reference", "the platform is gpu, which has no kernel")


def test_a_refusal_is_warned_of_once(operation):
    call = operation(triton=refuses("head_dim 80"))
    with pytest.warns(UserWarning, match=r"double: not served by triton \(head_dim 80\); using the reference$") as said:
        assert [call(3), call(4, plus=1)] == [6, 9]
    assert len(said) == 1
    with pytest.warns(UserWarning, match="triple"):
        assert operation("triple", triton=refuses("head_dim 80"))(1) == 2


def test_another_reason_is_another_warning(operation):
    def kernel(x, *, interpret):
        raise NotImplementedError(f"x = {x}")

    call = operation(triton=kernel)
    with pytest.warns(UserWarning, match="x = ") as said:
        assert [call(3), call(4), call(3)] == [6, 8, 6]
    assert len(said) == 2


def test_the_first_of_two_backends_serves(operation, two_gpu_backends):
    call = operation(first=returns("first"), second=returns("second"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(3) == ("first", 3, 0, False)
    assert module.implementation("double") == ("first", "the platform is gpu, then second")


def test_the_order_of_trial_is_that_of_registration_with_the_operation(operation, two_gpu_backends):
    assert operation(second=returns("second"), mosaic_tpu=returns("tpu"), first=returns("first"))(3)[0] == "second"


def test_a_refusal_hands_on_to_the_second_backend(operation, two_gpu_backends):
    call = operation(first=refuses("head_dim 80"), second=returns("second"))
    with pytest.warns(UserWarning, match=r"by first \(head_dim 80\); using second$") as said:
        assert [call(3, plus=1), call(4)] == [("second", 3, 1, False), ("second", 4, 0, False)]
    assert len(said) == 1


def test_two_refusals_hand_on_to_the_reference(operation, two_gpu_backends):
    call = operation(first=refuses("head_dim 80"), second=refuses("float16"))
    match = r"by first \(head_dim 80\), second \(float16\); using the reference$"
    with pytest.warns(UserWarning, match=match) as said:
        assert [call(3), call(3)] == [6, 6]
    assert len(said) == 1


def test_a_backend_that_declines_hands_on_without_a_warning(operation, two_gpu_backends):
    def declines(*args, **kwargs):
        raise module.DeclinedError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operation(first=declines, second=returns("second"))(3) == ("second", 3, 0, False)
        assert operation("triple", first=declines)(3) == 6


def test_a_backend_may_be_chosen_alone(operation, two_gpu_backends):
    """The others of the platform are left out, and a backend of another platform is not run."""
    call = operation(first=returns("first"), second=returns("second"), mosaic_tpu=returns("tpu"))
    other = operation("other", first=returns("first"))
    asks = "kvjax.pallas_kernels.use asks for"
    with pallas_kernels.use("second"):
        assert (call(3)[0], other(3)) == ("second", 6)
        assert module.implementation("double") == ("second", f"{asks} it")
    with pallas_kernels.use("mosaic_tpu"):
        assert call(3) == 6
        assert module.implementation("double") == ("reference", f"{asks} mosaic_tpu, and the platform is gpu")


def test_an_optional_backend_is_tried_first_if_it_is_chosen(operation, monkeypatch):
    """It hands on to the others, and follows them without a choice. It does not run on another platform."""
    call = operation(triton=returns("triton"), mosaic_gpu=returns("mosaic_gpu"))
    refused = operation("refused", triton=returns("triton"), mosaic_gpu=refuses("head_dim 80"))
    operation("other", triton=returns("triton"))
    alone = operation("alone", mosaic_gpu=returns("mosaic_gpu"))
    assert [call(3)[0], alone(3)[0]] == ["triton", "mosaic_gpu"]
    assert module.implementation("double") == ("triton", "the platform is gpu, then mosaic_gpu")
    with pallas_kernels.use("mosaic_gpu"):
        assert call(3) == ("mosaic_gpu", 3, 0, False)
        with pytest.warns(UserWarning, match=r"by mosaic_gpu \(head_dim 80\); using triton$"):
            assert refused(3)[0] == "triton"
        asks = "kvjax.pallas_kernels.use asks for it"
        assert module.implementation("double") == ("mosaic_gpu", f"{asks}, then triton")
        assert module.implementation("other") == ("triton", "the platform is gpu")
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        assert call(3) == 6
        assert module.implementation("double") == ("reference", "the platform is cpu, which has no kernel")
    with pallas_kernels.use("mosaic_gpu-interpret"):
        assert call(3) == ("mosaic_gpu", 3, 0, True)


def test_without_a_kernel_xla_runs_and_nothing_is_said(operation, monkeypatch):
    """It is tried last, is chosen by its name, and takes no `interpret`. Only "reference" runs the definition."""
    by_xla = lambda x, *, plus=0: ("xla", x, plus)  # noqa: E731
    call = operation(triton=returns("triton"), xla=by_xla)
    refused = operation("refused", triton=refuses("head_dim 80"), xla=by_xla)
    assert call(3)[0] == "triton"
    assert module.implementation("double") == ("triton", "the platform is gpu")
    with pytest.warns(UserWarning, match=r"by triton \(head_dim 80\); using xla$"):
        assert refused(3) == ("xla", 3, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choice in ("xla", "mosaic_tpu", "mosaic_tpu-interpret"):
            with pallas_kernels.use(choice):
                assert call(3, plus=1) == ("xla", 3, 1)
                assert module.implementation("double").name == "xla"
        with pallas_kernels.use("reference"):
            assert call(3, plus=1) == 7
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        assert call(3) == ("xla", 3, 0)
    assert module.implementation("double") == ("xla", "the platform is cpu, which has no kernel")


def test_a_backend_that_cannot_be_imported_is_not_there(operation, monkeypatch):
    call = operation(triton=returns("triton"), xla=lambda x: ("xla", x))
    monkeypatch.setitem(sys.modules, "kvjax.pallas_kernels.double.triton", None)
    with pytest.warns(UserWarning, match=r"double: not served by triton \(.*double\.triton.*\); using xla$"):
        assert call(3) == ("xla", 3)


@pytest.mark.long
def test_programs_run_by_xla_on_the_day_that_jax_has_no_triton(monkeypatch):
    """All operations, on what would be a GPU. A prompt without cached slots needs cuDNN alone."""
    monkeypatch.undo()
    code = """
import sys, warnings
sys.modules["jax.experimental.pallas.triton"] = None
import jax, jax.numpy as jnp, numpy as np
from kvjax import pallas_kernels
q, p = jnp.ones((1, 2, 3, 8)), jnp.arange(3)[None, None]
prompt = lambda: pallas_kernels.prompt_attention(q, q[:, :1], q[:, :1], p[0], p, scale=1.0)
expected = prompt()
jax.default_backend = lambda: "gpu"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    np.testing.assert_array_equal(prompt()[0], expected[0])
    pallas_kernels.top_tokens(jnp.ones((1, 1, 3)), p, jnp.ones((1, 1), int), size=2)
print(*(str(warning.message) for warning in said), sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for operation in ("prompt_attention", "top_tokens"):
        assert re.search(rf"{operation}: not served by triton \(.*triton.*\); using xla", run.stdout), run.stdout


def test_other_errors_of_a_kernel_are_raised(operation, two_gpu_backends):
    def broken(x, *, interpret):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        operation(first=broken, second=returns("second"))(3)


def test_the_environment_and_a_context_choose(operation, monkeypatch):
    call = operation(triton=returns("triton"), mosaic_tpu=returns("mosaic_tpu"))
    other = operation("other", triton=returns("triton"))
    monkeypatch.setenv("KVJAX_KERNELS", "reference")
    assert call(3) == 6
    assert module.implementations()["double"] == ("reference", "KVJAX_KERNELS asks for it")
    with pallas_kernels.use("default"):
        assert call(3) == ("triton", 3, 0, False)
        with pallas_kernels.use("mosaic_tpu-interpret"):
            assert call(3) == ("mosaic_tpu", 3, 0, True)
            assert other(3) == 6
            asks = "kvjax.pallas_kernels.use asks for"
            assert module.implementations() == {
                "double": ("mosaic_tpu-interpret", f"{asks} it"),
                "other": ("reference", f"{asks} mosaic_tpu-interpret, which this operation does not have"),
            }
        assert call(3) == ("triton", 3, 0, False)
    assert call(3) == 6


def test_functions_under_jit_are_traced_again_for_another_choice(operation):
    call = jax.jit(operation(triton=lambda x, *, interpret: x * (-1 if interpret else 1)))
    x = jnp.float32(3)
    assert call(x) == 3
    with pallas_kernels.use("reference"):
        assert call(x) == 6
    with pallas_kernels.use("triton-interpret"):
        assert call(x) == -3
    assert call(x) == 3


def test_unknown_choices_are_refused_by_name(operation, monkeypatch):
    expected = (
        "kernels='cuda': expected one of default, reference, cudnn, triton, mosaic_gpu, mosaic_tpu, xla, "
        "triton-interpret, mosaic_gpu-interpret, mosaic_tpu-interpret"
    )
    with pytest.raises(ValueError, match=f"use: {expected}"):
        pallas_kernels.use("cuda")
    call = operation()
    monkeypatch.setenv("KVJAX_KERNELS", "cuda")
    with pytest.raises(ValueError, match=f"KVJAX_KERNELS: {expected}"):
        call(3)
