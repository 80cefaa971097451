"""Reading compiled loops: what is copied and communicated is found, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.aot.hlo import Loop
from benchmarks.aot.targets import target

ROWS, COLUMNS = 512, 256
NBYTES = ROWS * COLUMNS * 4


def update(i, x):
    return x.at[i, :].set(x[i + 1, 3])


def roll(i, x):
    return jnp.roll(x, 1, axis=0)


def branch(i, x):
    return jax.lax.cond(x[0, i] > 0, lambda y: y.at[i].set(0.0), lambda y: y[::-1], x)


@pytest.mark.parametrize("name", ["cpu", "v5p:2x2x2", "h200:1"])
@pytest.mark.parametrize(("body", "rewritten"), [(update, False), (roll, True), (branch, True)])
def test_rewrites(name: str, body, rewritten: bool) -> None:
    try:
        device = jax.devices("cpu")[0] if name == "cpu" else target(name).devices()[0]
    except ImportError as error:
        pytest.skip(str(error))
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 9, body, x), donate_argnums=0).lower(x).compile()
    assert bool(Loop.of(loop.as_text()).rewrites(NBYTES)) == rewritten


@pytest.mark.parametrize(("body", "rewritten"), [(update, False), (roll, True)])
def test_a_program_without_loops(body, rewritten: bool) -> None:
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    program = jax.jit(body, donate_argnums=1).lower(3, x).compile()
    assert bool(Loop.whole(program.as_text()).rewrites(NBYTES)) == rewritten


# As XLA writes programs: asynchronous halves, arrays combined, a TPU's memories, a fusion updating one of two arrays.
HLO = """HloModule jit_f

%fused_computation (param_0: f32[64,128]) -> (f32[64,128], f32[64,128]) {
  %param_0 = f32[64,128]{1,0} parameter(0)
  %scatter.1 = f32[64,128]{1,0:T(8,128)} scatter(%param_0, %param_0, %param_0), to_apply=%add
  ROOT %tuple = (f32[64,128]{1,0}, f32[64,128]{1,0}) tuple(%scatter.1, %param_0)
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%cond (arg: (f32[64,128], s32[])) -> pred[] {
  %any = pred[] all-reduce(%h), to_apply=%add
}

%async (p: f32[8]) -> f32[8] {
  ROOT %ar = f32[8]{0} all-reduce(%p), to_apply=%add
}

%then (p: f32[64,128]) -> f32[64,128] {
  ROOT %turned = f32[64,128]{0,1} transpose(%p), dimensions={1,0}
}

%otherwise (p: f32[64,128]) -> f32[64,128] {
  ROOT %p = f32[64,128]{1,0} parameter(0)
}

%body (arg: (f32[64,128], s32[])) -> (f32[64,128], s32[]) {
  %arg = (f32[64,128]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %all-reduce-start = (bf16[4]{0}, bf16[8]{0}) all-reduce-start(%a, %b), channel_id=2, to_apply=%add
  %all-reduce-done = (bf16[4]{0}, bf16[8]{0}) all-reduce-done(%all-reduce-start)
  %all-gather-start = (f32[4,128]{0,1}, f32[4,1024]{0,1}) all-gather-start(%c), dimensions={1}
  %async-start = ((f32[8]{0}), f32[8]{0}, u32[]{:S(2)}) async-start(%d), calls=%async
  %fetch = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%e)
  %fetched = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %slice-start = ((f32[64,128]{1,0:T(8,128)}), f32[16,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%e)
  %back = (f32[64,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%fetched)
  %real = (f32[64,128]{0,1:T(8,128)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%e)
  %done = f32[64,128]{0,1:T(8,128)} copy-done(%real)
  %fusion = (f32[64,128]{1,0}, f32[64,128]{1,0}) fusion(%e), kind=kLoop, calls=%fused_computation
  %either = f32[64,128]{1,0} conditional(%g, %e, %e), true_computation=%then, false_computation=%otherwise
  %half = pred[64,128]{1,0} copy(%g)
  ROOT %tuple.2 = (f32[64,128]{1,0:T(8,128)}, s32[]) tuple(%e, %f)
}

ENTRY %main (x: f32[64,128]) -> f32[64,128] {
  %copy = f32[64,128]{1,0} copy(%x)
  %while = (f32[64,128]{1,0}, s32[]) while(%t), condition=%cond, body=%body
}
"""


def test_a_program_by_hand() -> None:
    loop = Loop.of(HLO)
    assert loop.collectives == {"all-reduce": 4, "all-gather": 1}
    size = 64 * 128 * 4
    kinds = ["copy-start"] * 2 + ["fusion", "transpose"]
    assert loop.rewrites(size) == [f"{kind} of {size:,} bytes" for kind in kinds]
    assert loop.rewrites(size // 4) == [*loop.rewrites(size), f"copy of {size // 4:,} bytes"]


def test_a_program_without_a_loop() -> None:
    with pytest.raises(ValueError, match="the program has no loop"):
        Loop.of(jax.jit(jnp.sin).lower(np.ones(3)).compile().as_text())
