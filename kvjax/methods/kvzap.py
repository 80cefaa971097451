"""KVzap (Jegou et al., arXiv 2601.07891): predicts KVzip's scores from hidden states with small networks.

Differences from the paper:

- The best entries of all layers and heads are retained, exactly the budget, because the arrays of a cache have fixed
  shapes. With level="global" all heads and layers compete, as they do under one threshold. The paper evicts what scores
  below a threshold, so that memory follows the text.
- The newest 128 tokens stay.
- The paper's networks predict a normalised variant of KVzip's scores. `kvjax train-gates` trains on the scores of
  `kvzip`. Networks that the authors published are read as they are.
"""

from __future__ import annotations

from typing import Literal

from kvjax.policy import Policy, Protect

from .common.learned import learned
from .registry import preset


@preset
def kvzap(
    budget: int | float = 0.3,
    sinks: int = 0,
    recent: int = 128,
    every: int | None = None,
    level: Literal["global", "layer", "head"] = "global",
    groups: int = 1,
) -> Policy:
    """Retains the entries for which a network predicts the highest scores of KVzip, at the cost of one pass.

        score[h, c] = f_l(x_c)[h]

    f_l estimates the logarithm of KVzip's score. x_c is the hidden state of token c that attention reads in layer l,
    after the norm before attention; f_l is linear, or W_2 gelu(W_1 x + b_1) + b_2. The networks are gates beside the
    parameters: `kvjax.with_gates(params, FOLDER)` reads those that `kvjax train-gates` writes or the authors published.

    Args:
        budget: entries of the mean kv head. A float is a share of each row's prompt.
        sinks: the number of first tokens, which are always retained (the paper: none).
        recent: the number of most recent tokens, which are always retained (the paper's w = 128).
        every: the number of entries that a full head evicts at a time while decoding; None compresses the prompt only.
        level: which heads compete: those of all layers ("global"), those of each layer ("layer"), or none, so that each
            head retains its budget and each layer is compressed before the next one is read ("head").
        groups: the number of groups of consecutive kv heads that compete among themselves. On a mesh that divides kv
            heads over D devices it must be a multiple of D; one device with that number of groups retains the same.

    Raises:
        ValueError: for a value that is not accepted, and for `groups` at a level where they mean nothing. Parameters
            without these gates are refused when a prompt is read.
    """
    return learned("kvzap", budget, Protect(sinks, recent), every, level, groups)
