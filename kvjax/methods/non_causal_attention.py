"""Non-causal attention, of Compactor (Chari and Van Durme, arXiv 2507.08143): lets all tokens of a chunk vote.

Differences from kvpress's NonCausalAttnPress:

- The last chunk has as many tokens as are left. kvpress pads it with keys that weigh as much as a logit of 0, and with
  queries that attend to all alike.
- kvpress standardises the scores of a layer, which changes no selection within the layer.
- As in the authors' code and kvpress, logits are not scaled.
"""

from __future__ import annotations

from kvjax.policy import Policy, Protect

from .common.budgets import budget_of
from .common.non_causal import NonCausalAttention
from .registry import preset


@preset
def non_causal_attention(budget: int | float = 1024, chunk: int = 256, sinks: int = 0, recent: int = 0) -> Policy:
    """Compresses the prompt once, by the attention between the tokens of a chunk, earlier or later.

        received[g, c] = sum over the queries r of the chunk of c of softmax over the chunk of (q_r . k)_c
        score[h, c] = mean over c and its two neighbours of |v_c| * mean over the query group of received[g, c]

    Later tokens get as many votes as earlier ones, and no question is needed. The answer is added to the retained
    entries.

    Args:
        budget: the number of entries retained of the prompt. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        chunk: the number of tokens in a chunk.
        sinks: the number of first tokens that are always retained.
        recent: the number of most recent tokens that are always retained.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + recent + 1.
    """
    return Policy(
        score=NonCausalAttention(chunk),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
    )
