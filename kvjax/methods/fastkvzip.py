"""Fast KVzip (Kim et al., arXiv 2601.17668): predicts KVzip's scores from hidden states with gates.

Differences from the paper and its code:

- The best entries of all layers and heads are retained, exactly the budget.
- Four sinks and the newest 128 tokens stay. The released code retains the newest 2 % of the prompt, or 4,096 tokens of
  long prompts: `recent=`.
- The budget is that of the whole prompt, however it is read. The released code compresses long prompts chunk by chunk,
  as `chunk=` with `compress="chunk"` and level="head" do.
- The released training code adds the bias `b` twice, its other code and kvpress once, as here. Gates that the authors
  published are read as they are.
"""

from __future__ import annotations

from typing import Literal

from kvjax.policy import Policy, Protect

from .common.learned import learned
from .registry import preset


@preset
def fastkvzip(
    budget: int | float = 0.3,
    sinks: int = 4,
    recent: int = 128,
    every: int | None = None,
    level: Literal["global", "layer", "head"] = "global",
    groups: int = 1,
) -> Policy:
    """Retains the entries for which a gate predicts the highest scores of KVzip, at the cost of one pass.

    A gate has S learned keys s_i and a bias b per kv head. It projects the hidden state of token c, which attention
    reads in the layer, to a key k and to a query q_g per query head, of 16 channels each, all normalised:

        score[h, c] = mean_g exp(k q_g / 4 + b_g) / (exp(k q_g / 4 + b_g) + sum_i exp(s_i q_g / 4))

    The gates lie beside the parameters: `kvjax.with_gates(params, PATH)` reads those that `kvjax train-gates` writes,
    and files of the authors.

    Args:
        budget: entries of the mean kv head. A float is a share of each row's prompt.
        sinks: the number of first tokens, which are always retained (the released code: 4).
        recent: the number of most recent tokens, which are always retained.
        every: the number of entries that a full head evicts at a time while decoding; None compresses the prompt only.
        level: which heads compete: those of all layers ("global"), those of each layer ("layer"), or none, so that each
            head retains its budget and each layer is compressed before the next one is read ("head").
        groups: the number of groups of consecutive kv heads that compete among themselves. On a mesh that divides kv
            heads over D devices it must be a multiple of D; one device with that number of groups retains the same.

    Raises:
        ValueError: for a value that is not accepted, and for `groups` at a level where they mean nothing. Parameters
            without these gates are refused when a prompt is read.
    """
    return learned("fastkvzip", budget, Protect(sinks, recent), every, level, groups)
