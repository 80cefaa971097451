"""RoPE frequencies against transformers, for several prompt lengths, and the rotation against complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import Rope, config_from_hf, rotate

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

D = 16
LENGTHS = (1, 31, 32, 33, 100, 4000)
SHORT, LONG = [1 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
BASE = {"rope_theta": 5e4, "original_max_position_embeddings": 32}
SCALINGS = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "llama3", **BASE, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", **BASE, "factor": 4.0},
    {"rope_type": "yarn", **BASE, "factor": 4.0, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
    {"rope_type": "yarn", **BASE, "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", **BASE, "factor": 0.5, "mscale": 2.0},
    {"rope_type": "yarn", **BASE, "factor": None, "attention_factor": 1.25},
    {"rope_type": "longrope", **BASE, "short_factor": SHORT, "long_factor": LONG},
    {"rope_type": "longrope", **BASE, "short_factor": SHORT, "long_factor": LONG, "factor": 2.0},
    {"rope_type": "longrope", **BASE, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.5},
]


def config(fields, **others):
    return transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=D,
        max_position_embeddings=32 if fields["rope_type"] == "dynamic" else 128,
        rope_parameters=dict(fields),
        **others,
    )


@pytest.mark.parity
@pytest.mark.parametrize("fields", SCALINGS, ids=lambda fields: fields["rope_type"])
def test_frequencies_are_those_of_transformers(fields):
    theirs = config(fields)
    rope = config_from_hf(theirs.to_dict()).rope
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[fields["rope_type"]]
    rows = rope.row_frequencies(D, jnp.array(LENGTHS))
    assert (rows is not None) == rope.depends_on_length == (fields["rope_type"] in ("dynamic", "longrope"))
    for i, length in enumerate(LENGTHS):
        expected, factor = compute(theirs, "cpu", seq_len=length)
        np.testing.assert_allclose(rope.frequencies(D) if rows is None else rows[i], expected, rtol=2e-6)
        assert rope.attention_factor == pytest.approx(factor)
    if rows is not None:
        assert np.abs(np.asarray(rows[-1]) / rows[0] - 1).max() > 0.5
        with pytest.raises(ValueError, match="need the lengths"):
            rope.frequencies(D)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.75])
def test_the_first_channels_rotate_and_the_others_are_unchanged(fraction, rows):
    B, H, N = 2, 3, 5
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, H, N, D)).astype(np.float32)
    positions = rng.integers(0, 100, (B, 1, N))
    R = int(D * fraction)
    frequencies = Rope(100.0, partial_rotary_factor=fraction).frequencies(D)
    assert frequencies.shape == (R // 2,)
    if rows:
        frequencies = np.stack([frequencies, 0.5 * frequencies])
    rotated = np.asarray(rotate(x, positions, frequencies, 1.5))
    angles = positions[..., None] * (frequencies[:, None, None] if rows else frequencies)
    expected = (x[..., : R // 2] + 1j * x[..., R // 2 : R]) * 1.5 * np.exp(1j * angles)
    np.testing.assert_allclose(rotated[..., : R // 2], expected.real, atol=1e-4)
    np.testing.assert_allclose(rotated[..., R // 2 : R], expected.imag, atol=1e-4)
    np.testing.assert_array_equal(rotated[..., R:], x[..., R:])
