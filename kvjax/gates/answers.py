"""The model's own answers, which learned tokens are trained for."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from kvjax.generate import generate
from kvjax.models import Decoder


def answered(
    params: Decoder, texts: Int[np.ndarray, "B N"], count: int
) -> tuple[Int[np.ndarray, "B N+A"], Int[np.ndarray, "B"]]:
    """Returns texts with the model's greedy answers of up to A = `count` tokens, padded behind, and their lengths."""
    out = generate(params, texts, policy="full", max_new_tokens=count)
    answers = np.pad(np.maximum(out.tokens, 0), ((0, 0), (0, count - out.tokens.shape[1])))
    return np.concatenate([texts, answers], axis=1), np.asarray(out.lengths, np.int32)
