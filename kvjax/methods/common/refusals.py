"""The refusals that several parts have. A message does not name its part: `Policy` begins it with who refuses."""

from __future__ import annotations

from kvjax.checks import shown
from kvjax.policy import Policy


def check_own_positions(policy: Policy, why: str) -> None:
    """Raises ValueError unless each token keeps its own position in the cache.

    Args:
        why: says what the part does with keys at their own positions, as in "projects keys".
    """
    if policy.positions != "original":
        raise ValueError(f"it {why}; it cannot be combined with positions={policy.positions!r}")


def check_first_rotation(policy: Policy) -> None:
    """Raises ValueError for rotated places, if a score uses the keys of a prompt as its queries saw them."""
    check_own_positions(policy, "scores the prompt's keys as they were rotated when they came in")


def check_window(window: int, policy: Policy) -> None:
    """Raises ValueError unless a policy protects the window whose queries score the entries before it."""
    if isinstance(policy.protect.recent, float) or policy.protect.recent < window:
        raise ValueError(
            f"it scores the entries older than its window of {window}, and {policy.protect} does not protect that "
            f"window; expected recent={window} or more"
        )


def check_sinks(sinks: int, policy: Policy) -> None:
    """Raises ValueError unless a policy protects the first tokens, which are not scored."""
    if policy.protect.sinks < sinks:
        raise ValueError(
            f"it does not score the first {sinks} tokens, and {policy.protect} does not protect them; expected "
            f"sinks={sinks} or more"
        )


def check_prompts_only(policy: Policy) -> None:
    """Raises ValueError if a policy evicts while decoding, for a part that scores prompts only."""
    if policy.every is not None:
        raise ValueError(
            f"it scores a prompt, and nothing that is decoded; it cannot be combined with every={policy.every}"
        )


def check_in_order(policy: Policy, what: object) -> None:
    """Raises ValueError if decoding overwrites slots, which leaves entries in no order.

    Args:
        what: the part, or what the part does, that needs entries in order of position.
    """
    if policy.every is not None:
        raise ValueError(
            f"{what} needs entries in order of position, and every={policy.every} overwrites slots in any order; they "
            "cannot be combined"
        )


def check_by_entry(policy: Policy, why: str) -> None:
    """Raises ValueError if a policy's selection compares chunks or pages by their mean scores.

    Args:
        why: the reason why means of the scores have no meaning, as in "scores entries by when they leave".
    """
    if policy.select.compares == "means":
        raise ValueError(
            f"it {why}, and the selection {type(policy.select).__name__} compares means of scores; they cannot be "
            "combined"
        )


def check_plain_budget(base: Policy) -> None:
    """Raises ValueError if a base's budget is part of its method, so that another one in its place would lose that."""
    if not base.budget.plain:
        raise ValueError(
            f"it replaces its base's budget, and {shown(base.budget)} is part of that base's method; choose a base "
            "whose budget is a number of entries or a share of the prompt, without options"
        )
