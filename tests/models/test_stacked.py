"""Tensors that hold all experts: any slice is read with the fewest experts, and parameters are written into them."""

import numpy as np
import pytest

from kvjax.models import FusedRows, StackedWeight, hf_shapes
from tests.models.test_weights import Recorded, indices

X, E, F = 4, 6, 5
RNG = np.random.default_rng(0)
GATE_UP, BIASES, DOWN = (RNG.normal(size=shape).astype(np.float32) for shape in ((X, E, 2 * F), (X, 2 * F), (X, F, E)))
CASES = {
    "gate": (StackedWeight("gate", "gate_up", rows=FusedRows(0, 1, 2)), GATE_UP, GATE_UP[..., ::2]),
    "up": (StackedWeight("up", "gate_up", rows=FusedRows(1, 2, 2)), GATE_UP, GATE_UP[..., 1::2]),
    "up's bias": (StackedWeight("up_bias", "biases", rows=FusedRows(1, 2, 2)), BIASES, BIASES[:, 1::2]),
    "down": (StackedWeight("down", "down"), DOWN, DOWN),
}


@pytest.mark.parametrize("elements_per_read", [2**22, 2 * F])
@pytest.mark.parametrize(("weight", "tensor", "parameter"), CASES.values(), ids=CASES)
def test_any_slice_is_read(weight, tensor, parameter, elements_per_read, monkeypatch):
    monkeypatch.setattr("kvjax.models.stacked.READ", elements_per_read)
    assert weight.hf_shape(parameter.shape) == tensor.shape
    for index in indices(parameter.shape):
        recorded = Recorded(tensor)
        read = weight.read(recorded, parameter.shape, index, np.float16)
        np.testing.assert_array_equal(read, parameter[index].astype(np.float16))
        assert read.flags.c_contiguous
        assert recorded.reads.max() == 1
        touched = recorded.reads.any(axis=-1)  # rows of experts
        np.testing.assert_array_equal(touched[index[:-1]], True)
        assert touched.sum() == touched[index[:-1]].size


def test_parameters_are_written_into_their_tensors():
    for names in (("gate", "up"), ("down",)):
        parts = [CASES[name] for name in names]
        tensor = parts[0][1]
        table, shapes = [weight for weight, _, _ in parts], {weight.path: x.shape for weight, _, x in parts}
        assert hf_shapes(table, shapes) == {table[0].name: tensor.shape}
        written = np.full(tensor.shape, np.nan, np.float32)
        for weight, _, parameter in parts:
            weight.write(parameter, written)
        np.testing.assert_array_equal(written, tensor)


def test_a_part_that_is_missing():
    with pytest.raises(ValueError, match="gate do not cover the rows of the tensor gate_up exactly once"):
        hf_shapes([CASES["gate"][0]], {"gate": (X, E, F)})
