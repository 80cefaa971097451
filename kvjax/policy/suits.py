"""Checks that a policy suits a model, its devices, and what lies beside its parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.checks import shown
from kvjax.mesh.sharding import MODEL, mesh_of
from kvjax.models import Decoder, DecoderConfig

from .budget import Budget
from .policy import Policy


def check_is_policy(policy: Any) -> None:
    """Raises ValueError unless `policy` is a Policy."""
    if not isinstance(policy, Policy):
        given = f"policy={shown(policy)}: expected a Policy"
        raise ValueError(f"{given}, which kvjax.policies.parse makes of a text" if isinstance(policy, str) else given)


def check_suits(policy: Policy, config: DecoderConfig, devices: int) -> None:
    """Raises ValueError for a policy that does not fit a model, or a mesh with so many devices over kv heads."""
    kinds = config.kinds_of_heads
    if policy.allocates and len(kinds) > 1:
        each = " and ".join(map(str, kinds))
        raise ValueError(
            f"the budget {type(policy.budget).__name__} is allocated across layers, in one pool: expected another, as "
            f"the layers have kv heads of several kinds, {each}"
        )
    for heads in kinds:
        policy.budget.check_model(config.num_layers, heads.number)
        check_groups(policy.budget, heads.number, devices)


def check_model(policy: Policy, params: Decoder) -> None:
    """Raises ValueError for a policy that does not fit a model on its devices, or what lies beside its parameters."""
    mesh = mesh_of(params)
    check_suits(policy, params.config, 1 if mesh is None else mesh.shape[MODEL])
    check_attached(policy, params)


def check_groups(budget: Budget, kv_heads: int, devices: int) -> None:
    """Raises ValueError unless the heads that compete lie in groups of equal size, each on one of the devices."""
    groups = None if budget.layout is None else budget.layout.groups
    if groups is None:
        return
    if kv_heads % groups:
        raise ValueError(f"groups={groups} of {kv_heads} kv heads: expected a divisor of {kv_heads}")
    if groups % devices:
        raise ValueError(
            f"{type(budget).__name__} with groups={groups} on a mesh with {devices} devices over kv heads would cut a "
            f"group: expected a multiple of {devices}, with which one device retains the same"
        )


def check_replays(policy: Policy, config: DecoderConfig) -> None:
    """Raises ValueError for passes that measure what is behind all layers, where some read the entries of others."""
    if config.sources and policy.score.needs.whole_prompt and any(part.run is not None for part in _passes(policy)):
        raise ValueError(
            f"{policy.score} measures hidden states behind the last layer: expected another score, as layers that read "
            "the entries of others are not replayed"
        )


def check_attached(policy: Policy, params: Decoder) -> None:
    """Raises ValueError as `check_replays` does, and for networks and statistics that the parameters do not have."""
    check_replays(policy, params.config)
    needs, attention = policy.score.needs, params.layers[0].attention
    # `in` raises AttributeError for a name that an `nnx.Dict` of flax 0.12.4 lacks.
    held, statistics = dict(attention.gates), dict(attention.statistics)
    readers = [(policy.score, needs.gates), *((own, own.gates) for own in (policy.learned,) if own is not None)]
    for reader, name in readers:
        if name and name not in held:
            has = f"have those of {', '.join(held)}" if held else "have none"
            raise ValueError(
                f"{reader} reads gates of {name!r}, and the parameters {has}: expected "
                "params = kvjax.with_gates(params, FOLDER), or the option --gates FOLDER of a command"
            )
        if name in dict(params.gates):
            there, run = params.gates[name].shape[0], _learned_tokens(policy, reader)
            if run > there:
                raise ValueError(
                    f"{reader} runs {run} learned tokens, and the gates of {name!r} have {there}: expected at most "
                    f"{there}"
                )
    if missing := [name for name in needs.statistics if name not in statistics]:
        has = f"have {', '.join(statistics)}" if statistics else "have none"
        raise ValueError(
            f"{policy.score} reads the statistics {', '.join(missing)}, and the parameters {has}: expected "
            "params = kvjax.with_statistics(params, FOLDER), or the option --gates FOLDER of a command"
        )


def _learned_tokens(policy: Policy, reader: Any) -> int:
    """Returns the number of learned tokens that a part of the policy runs."""
    return policy.learned_count if reader is policy.learned else max(part.tokens.shape[1] for part in _passes(policy))


def _passes(policy: Policy) -> Any:
    """Returns the shapes of the passes after a prompt of one token, without the texts that they are made of."""
    shapes = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((1, 1), (1,))]
    return jax.eval_shape(partial(policy.score.passes, texts=((),) * len(policy.score.needs.texts)), *shapes)
