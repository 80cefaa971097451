"""ExpectedAttention (Devoto et al., arXiv 2510.00636): what queries to come will attend to."""

from __future__ import annotations

from kvjax.parts import Drop, ExpectedAttention, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def expected_attention(
    budget: int | float = 1024,
    sinks: int = 4,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
) -> Policy:
    """Compresses the prompt once, by the attention expected of queries that are not there yet.

    Queries before rotation are taken for Gaussian, with the mean m and the covariance C of the prompt's own. With R the
    mean RoPE matrix of the next `future` positions, a query to come gives token c, in expectation, the logit

        z_c = scale * k_c . R m + scale^2 / 2 * k_c . R C R' k_c,    score[h, c] = (mean_g softmax_c(z) + epsilon) |v_c|

    with the softmax over all tokens but the sinks, and the mean over the query group. Needs no attention weights.

    Args:
        budget: entries kept of the prompt, sinks included; a float is that share of each row's prompt.
        sinks: first tokens, always kept; neither their queries nor their keys count.
        future: positions to come over which rotations are averaged.
        covariance: the second term of the logit.
        value_norm: weigh attention with the value's norm.
        epsilon: added to the attention first; kvpress' registry has 0.01 (its class, and this, 0).
    """
    return Policy(
        score=ExpectedAttention(sinks, future, covariance, value_norm, epsilon),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks),
    )
