"""Keyformer (Adnan et al., MLSys 2024, arXiv 2403.09054): heavy hitters under noise."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import Drop, NoisyAttention, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def keyformer(
    budget: int | float = 0.6,
    recent: int | float = 0.3,
    temperature: float = 1.0,
    growth: float = 0.01,
    noise: Literal["gumbel", "none"] = "gumbel",
    seed: int = 0,
    every: int | None = 1,
) -> Policy:
    """Recent tokens and key tokens: those that receive the most of attention whose logits are noisy and tempered.

    score[h, c] = sum over every query row r of the prompt and the answer of softmax((q_r . k_c / sqrt(D) + g_rc) / tau)
    on c, mean of the query group, with g from the standard Gumbel distribution and tau = temperature + growth * tokens
    decoded by the row. The noise is a function of the seed, the layer, the query head and the positions of r and c;
    tokens that are dropped never return. The released code adds scores up over the rows of a batch; here each row has
    its own.

    Args:
        budget: what a query sees, itself included; a float is that share of each row's prompt (the paper: 0.6).
        recent: tokens kept for being recent; a float is that share of the budget (the paper: 0.3).
        temperature: tau while reading a prompt.
        growth: of tau with each token decoded.
        noise: "none" leaves the temperature alone at work; with growth=0 as well this is H2O.
        seed: of the noise.
        every: evict so many tokens at a time; None compresses the prompt only.
    """
    return Policy(
        score=NoisyAttention(temperature, growth, noise, seed),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=recent),
        every=every,
    )
