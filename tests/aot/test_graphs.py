"""Launches outside of CUDA graphs, counted in XLA's lists of launches."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from benchmarks.aot.graphs import compile_listed, outside_graphs

LAUNCHES = """\
000: kCommandBuffer [source       | next=010 (1)]
    001: kCopy         [source       | sink        ] kCopy
010: kWhile         [prev=000 (1) | next=059 (1)]
condition:
    011: kCustomKernel [source | sink] loop_and_fusion_1 grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        012: kCustomKernel [source        | next=035 (16)] loop_select_fusion_4 grid: [1, 1, 1]
        026: kConditional  [prev=017 (2)  | next=027 (1) ]
          false_branch:
            019: kCustomKernel [source       | next=022 (3)] loop_broadcast_fusion_2 grid: [1, 1, 1]
    035: kWhile         [prev=034 (1) | next=000 (1)]
condition:
        036: kCustomKernel [source | sink] wrapped_compare_1 grid: [1, 1, 1]
      body:
        000: kCommandBuffer [source | sink]
            037: kCustomKernel [source       | next=039 (2)] input_concatenate_fusion_1 grid: [128, 1, 1]
059: kCopy         [prev=010 (1) | sink        ] kCopy
"""


def test_what_is_outside_of_graphs() -> None:
    assert outside_graphs(LAUNCHES) == Counter(kCustomKernel=2, kWhile=1)


def test_a_loop_in_a_graph() -> None:
    lines = LAUNCHES.splitlines()[2:]
    assert not outside_graphs("\n".join(["000: kCommandBuffer []", *("    " + line for line in lines)]))


def test_a_program_without_loops() -> None:
    with pytest.raises(ValueError, match="the program has no loop"):
        outside_graphs("000: kCommandBuffer []\n    001: kCopy [] kCopy\n")


def test_programs_of_other_devices_have_no_list() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    with pytest.raises(ValueError, match="no list of launches: expected a program for GPUs"):
        compile_listed(lowered)
