"""FINCH (Corallo and Papotti, TACL 2024): the part of a document that its question asks for."""

from __future__ import annotations

from kvjax.pallas_kernels import Reduction
from kvjax.parts import Drop, EvenChunks, TopTokens, WindowAttention, budget_of
from kvjax.policy import Policy, Protect


def finch(budget: int | float = 1024, window: int = 32, chunk: int | None = None, rescale: bool = True) -> Policy:
    """Compresses a prompt that ends with a question, by what the question's tokens attended to; the answer on top.

    score[h, c] = mean over the query group and the question's tokens r of n_r softmax(q_r . k_c), with n_r the number
    of tokens before r. The question is the last `window` tokens of each row and always kept: no delimiter is looked
    for, as kvpress does, which takes one row at a time. Rows whose questions are shorter are scored by the end of
    their document as well.

    The paper reads the document in pieces, each with the question behind it, and cuts each; with `chunk` all is read
    at once and each piece cut by the same share, as in kvpress, but that the question is no part of a piece here. Keys
    keep the rotation of their own positions, where the paper and kvpress rotate those that stay to neighbouring ones.

    Args:
        budget: entries kept of the prompt, the question included; a float is that share of each row's prompt.
        window: tokens of the question.
        chunk: every run of so many tokens of the document keeps the same share of them; None: the best of all stay.
        rescale: multiply by n_r; else each token of the question has the same weight in all.
    """
    return Policy(
        score=WindowAttention(window, reduction=Reduction(rows="mean", group="mean"), rescale=rescale),
        budget=budget_of(budget),
        select=TopTokens() if chunk is None else EvenChunks(length=chunk),
        merge=Drop(),
        protect=Protect(recent=window),
    )
