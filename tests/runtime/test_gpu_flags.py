"""What a process on a GPU sets: added once, where the plugin is, and never against the caller's."""

import pytest

from kvjax.runtime import gpu_flags
from kvjax.runtime.gpu_flags import set_gpu_flags

FLAG = "--xla_gpu_enable_command_buffer"


@pytest.mark.parametrize(
    ("installed", "given", "expected"),
    [
        (True, None, f"{FLAG}=+WHILE"),
        (True, "--other=1", f"--other=1 {FLAG}=+WHILE"),
        (True, f"{FLAG}=", f"{FLAG}="),
        (False, None, None),
        (False, "--other=1", "--other=1"),
    ],
)
def test_flags_are_added(
    installed: bool, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_flags, "find_spec", lambda name: object() if installed else None)
    environment = {} if given is None else {"XLA_FLAGS": given}
    for _ in range(2):
        set_gpu_flags(environment)
        assert environment.get("XLA_FLAGS") == expected
        assert environment.get("XLA_CLIENT_MEM_FRACTION") == ("0.92" if installed else None)


@pytest.mark.parametrize(
    "given", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"]
)
def test_the_callers_share_of_the_memory_stays(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX refuses a process that sets both names of the share."""
    monkeypatch.setattr(gpu_flags, "find_spec", lambda name: object())
    environment = {given: "0.5", "XLA_FLAGS": f"{FLAG}="}
    set_gpu_flags(environment)
    assert environment == {given: "0.5", "XLA_FLAGS": f"{FLAG}="}
