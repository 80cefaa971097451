"""Computes what a cache costs under a policy from shapes alone, for `kvjax info` and `kvjax plan`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kvjax.cli.choices import CHOICES

if TYPE_CHECKING:
    from kvjax.engine import Footprint
    from kvjax.models import DecoderConfig

SHARE = 4  # the default budget is the length of the prompt, divided by this


def budget_of(length: int) -> int:
    """The default budget for prompts of a length."""
    return max(length // SHARE, 64)


def recommended(length: int, config: DecoderConfig) -> list[str]:
    """The policies `full` and those of `CHOICES` that suit the model, with 1/4 of the prompt as budget."""
    texts = [choice.policy.format(budget=budget_of(length)) for choice in CHOICES]
    return ["full", *(text for text in texts if _suits(text, config))]


def presets(length: int, config: DecoderConfig) -> list[str]:
    """Every preset that suits the model, with 1/4 of the prompt as budget; presets that wrap a policy wrap SnapKV."""
    from kvjax.policies import PRESETS

    budget = budget_of(length)
    options = {
        "budget": f":budget={budget}",
        "base": f":base=snapkv,base.budget={budget}",
        "policy": f":policy=snapkv,policy.budget={budget}",
    }
    of_one_model = {"gates", "importance", "curve", "shares"}
    texts = (
        name + next((text for option, text in options.items() if option in inspect.signature(preset).parameters), "")
        for name, preset in PRESETS.items()
        if of_one_model.isdisjoint(inspect.signature(preset).parameters)
    )
    return [text for text in texts if _suits(text, config)]


def _suits(text: str, config: DecoderConfig) -> bool:
    """Returns whether a model has enough layers and heads for a policy that divides its budget among them."""
    from kvjax.policies import parse
    from kvjax.policy.suits import check_suits

    try:
        check_suits(parse(text), config, devices=1)
    except ValueError:
        return False
    return True


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
