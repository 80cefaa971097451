"""Families of methods, which follow from what a policy declares: its kind, and facts that several kinds share."""

from __future__ import annotations

import inspect
from functools import cache, partial

import jax
import jax.numpy as jnp

from kvjax.checks import is_number
from kvjax.evaluation.entries import Budget
from kvjax.evaluation.header import reads_gates
from kvjax.policies import PRESETS, parse, size_of
from kvjax.policy import PLAIN, Policy

PROMPT = 8192  # tokens of the prompt whose passes are counted
KINDS = (
    "No attention",
    "Attention: prompts are compressed",
    "Attention: decoding evicts too",
    "Expected or predicted attention",
    "A second reading of the prompt",
    "Merging",
    "Changes to another policy",
)


def base_of(preset: str) -> str:
    """The option of a preset that is another policy; empty if there is none."""
    options = inspect.signature(PRESETS[preset]).parameters.values()
    return next((option.name for option in options if isinstance(option.default, Policy)), "")


def replays(policy: Policy) -> list[int]:
    """The tokens of each pass after a prompt of `PROMPT` tokens, if each instruction of the pass has one token."""
    texts = tuple((0,) if isinstance(text, str) else text for text in policy.score.needs.texts)
    tokens, lengths = jax.ShapeDtypeStruct((1, PROMPT), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    passes = jax.eval_shape(partial(policy.score.passes, texts=texts), tokens, lengths)
    return [*(each.tokens.shape[1] for each in passes), *filter(None, (policy.learned_count,))]


def rereads(policy: Policy) -> bool:
    """Tells whether the passes after a prompt have at least as many tokens as the prompt."""
    return sum(replays(policy)) >= PROMPT


def kind(policy: Policy, *, changes_another: bool) -> str:
    """One of `KINDS`."""
    needs = policy.score.needs
    if changes_another:
        return KINDS[6]
    if policy.merge.effects.merges:
        return KINDS[5]
    if rereads(policy):
        return KINDS[4]
    if needs.gates or needs.statistics or needs.queries == "unrotated":
        return KINDS[3]
    if needs.received is None and needs.queries == "none":
        return KINDS[0]
    return KINDS[1] if policy.every is None else KINDS[2]


@cache
def families(text: str) -> tuple[str, ...]:
    """The kind of the policy that a text describes, then its facts; empty for a text that no policy has any more."""
    try:
        policy = parse(text)
    except ValueError:
        return ()
    if policy == parse("full"):
        return ()
    preset = text.partition(":")[0].strip()
    facts = {
        "decoding evicts": policy.every is not None,
        "layers or heads share a budget": policy.allocates,
        "entries merge": policy.merge.effects.merges,
        "the prompt is read twice": rereads(policy),
        "trained gates or measured statistics": reads_gates(policy),
        "fewer bits per entry": policy.storage != PLAIN,
    }
    changes_another = preset in PRESETS and bool(base_of(preset))
    return (kind(policy, changes_another=changes_another), *(name for name, holds in facts.items() if holds))


@cache
def budget_of(text: str) -> Budget | None:
    """The budget of the policy that a text describes; None if it has none, or if no policy has the text any more."""
    try:
        size = size_of(parse(text))
    except ValueError:
        return None
    return size if is_number(size) else None
