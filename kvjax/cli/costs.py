"""Computes what a cache costs under a policy from shapes alone, for `kvjax info` and `kvjax plan`."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kvjax.cli.choices import CHOICES

if TYPE_CHECKING:
    from kvjax.engine import Footprint
    from kvjax.models import DecoderConfig

SHARE = 4  # the default budget is the length of the prompt, divided by this
OF_ONE_MODEL = ("gates", "importance", "curve", "shares")  # options of presets


def budget_of(length: int) -> int:
    """The default budget for prompts of a length."""
    return max(length // SHARE, 64)


def recommended(length: int, config: DecoderConfig) -> list[str]:
    """The policies `full` and those of `CHOICES` that suit the model, with 1/4 of the prompt as budget."""
    texts = [choice.policy.format(budget=budget_of(length)) for choice in CHOICES]
    return ["full", *(text for text in texts if _refusal(text, config) is None)]


def presets(length: int, config: DecoderConfig) -> list[str]:
    """Every preset that suits the model, with 1/4 of the prompt as budget.

    Presets that wrap a policy wrap SnapKV, or H2O if they need a policy that evicts while decoding. `rising` has a
    share of all tokens in place of its base's budget.
    """
    return [text for text, refusal in _tried(length, config).values() if refusal is None]


def left_out(length: int, config: DecoderConfig) -> dict[str, str]:
    """The presets that `presets` leaves out, and why."""
    return {name: refusal for name, (_, refusal) in _tried(length, config).items() if refusal is not None}


def _tried(length: int, config: DecoderConfig) -> dict[str, tuple[str, str | None]]:
    """The text of each preset with that budget, and why it is refused."""
    from kvjax.policies import PRESETS

    found: dict[str, tuple[str, str | None]] = {}
    for name, preset in PRESETS.items():
        given = inspect.signature(preset).parameters
        if of_one_model := [option for option in OF_ONE_MODEL if option in given]:
            found[name] = name, f"its option {of_one_model[0]}= is of one model"
            continue
        options = [f":share={1 / SHARE}"] if name == "rising" else _options(given, budget_of(length))
        texts = [f"{name}{option}" for option in options]
        each = [(text, _refusal(text, config)) for text in texts]
        found[name] = next((one for one in each if one[1] is None), each[0])
    return found


def _options(given: Collection[str], budget: int) -> list[str]:
    """The options that give a preset a budget, as texts: the first one that suits is used."""
    if "budget" in given:
        return [f":budget={budget}"]
    for option in ("base", "policy"):
        if option in given:
            return [f":{option}={wrapped},{option}.budget={budget}" for wrapped in ("snapkv", "h2o")]
    return [""]


def _refusal(text: str, config: DecoderConfig) -> str | None:
    """Returns why a policy has no such options, or does not suit the layers and heads of a model; None if it does."""
    from kvjax.checks import check_one_kind
    from kvjax.gates.adapters import adapter_sizes
    from kvjax.gates.forms import FORMS
    from kvjax.policies import parse
    from kvjax.policy.suits import check_replays, check_suits

    try:
        policy = parse(text)
        needs, learned = policy.score.needs, policy.learned
        check_suits(policy, config, devices=1)
        check_replays(policy, config)
        for what, read in (("statistics", needs.statistics), ("gates", needs.gates or learned)):
            if read:
                check_one_kind(what, config)
        if learned is not None or (needs.gates and FORMS[needs.gates].learned is not None):
            adapter_sizes(config)
    except ValueError as error:
        return str(error)
    return None


def footprint_of(
    config: DecoderConfig, policy: str, weights: int, dtype: Any, *, length: int, new_tokens: int, chunk: int = 512
) -> Footprint:
    """The bytes of an engine on one device, which reads short prompts together."""
    from kvjax.engine import Footprint
    from kvjax.engine.plans import Plans
    from kvjax.engine.sizes import TOGETHER, Sizes
    from kvjax.policies import parse

    sizes = Sizes.of(TOGETHER, length, new_tokens, chunk=chunk)
    return Footprint.of(config, Plans.of(config, parse(policy), sizes, dtype, None, ()), weights)
