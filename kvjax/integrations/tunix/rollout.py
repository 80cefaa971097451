"""A rollout worker of tunix that decodes with kvjax, under any cache policy."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

import kvjax
from kvjax import policies
from kvjax.checks import shown
from kvjax.policy import Policy
from kvjax.request.request import as_policy

from .names import check_same, tempered, view_of

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl import common
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ModuleNotFoundError as error:
    raise ImportError(
        f"this module needs {error.name}: docs/guide/rollouts.md has the commands that install it"
    ) from error

log = logging.getLogger(__name__)

# Fields that would change what is computed, with the values that change nothing. Fields of other engines are not read.
UNREAD = {
    "tensor_parallel_size": (-1, 1),
    "data_parallel_size": (-1, 1),
    "expert_parallel_size": (-1, 1),
    "rollout_mapping_config": (None,),
}


class KVJaxRollout(BaseRollout):
    """Samples answers with `kvjax.generate`, from the arrays of the actor.

    `ClusterConfig(rollout_engine=functools.partial(KVJaxRollout, policy="morphkv:budget=512"))` gives it to tunix,
    which passes the first four arguments.

    Answers under a policy that changes what the cache holds are samples of another distribution than the one that is
    trained: they are off-policy. `off_policy` says so, and `RolloutOutput.logprobs` has the log-probabilities under the
    distribution that they were drawn from. With those of `get_per_token_logps`, which attends to all tokens, they give
    the importance ratio exp(full - sampled).

    Attributes:
        policy: what the cache retains.
        logprobs_under: as it was given.
        stats: the measurements of the last call of `generate`; None before it.

    Args:
        rollout_actor: the model that is trained: a `KVJaxActor`, or Llama3, Qwen2 or Qwen3 of tunix without experts and
            LoRA. Answers are decoded from its arrays as they are when `generate` is called, without a copy.
        tokenizer: whatever tunix's `TokenizerAdapter` takes.
        mesh: None, or a mesh of one device, to which the arrays are moved if they are elsewhere.
        rollout_config: its temperature is that of `get_per_token_logps`. Its `data_type`, if it has one, is that of the
            weights that answers are decoded with; another one than the actor's means a copy.
        policy: what the cache retains, as `kvjax.generate` takes it.
        logprobs_under: "policy", or "full" for log-probabilities under the full cache in `RolloutOutput.logprobs`.

    Raises:
        ValueError: for any argument that is not accepted, or if kvjax computes other logits than the actor.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        policy: Policy | str = "full",
        logprobs_under: str = "policy",
    ):
        if logprobs_under not in ("policy", "full"):
            raise ValueError(f"logprobs_under={shown(logprobs_under)}: expected 'policy' or 'full'")
        config = rollout_config or RolloutConfig()
        _check(config)
        self.policy = as_policy(policy) or policies.full()
        self.logprobs_under = logprobs_under
        self._temperature, self._dtype = config.temperature, config.data_type
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        self._device = _device(mesh, rollout_actor)
        graph, state = nnx.split(rollout_actor)
        moved = self._device is not None
        self._actor = nnx.merge(graph, jax.device_put(state, self._device)) if moved else rollout_actor
        self._view = view_of(self._actor)
        self._calls = itertools.count()
        self.stats: kvjax.Stats | None = None
        check_same(self._actor, self._view())
        if self.off_policy:
            log.warning(
                "samples under %s are off-policy: the actor is trained under the full cache; weight them by "
                "exp(get_per_token_logps - logprobs)",
                policies.brief(self.policy),
            )

    @property
    def off_policy(self) -> bool:
        """True if answers are drawn under another cache than the full one, which training attends to."""
        return self.policy != policies.full()

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Answers a batch of prompts.

        Args:
            prompts: texts, which are tokenized as tunix's own sampler does it.
            rollout_config: these fields are read:

                | field | meaning |
                |---|---|
                | `max_tokens_to_generate` | the most tokens of an answer |
                | `max_prompt_length` | the width of the padded prompts; a longer prompt is an error |
                | `temperature` | of sampling and of log-probabilities; 0 takes the most probable token |
                | `top_p`, `top_k` | filters; 1 or None, and -1, 0 or None, keep all tokens |
                | `seed` | what `kvjax.generate` takes; None: the number of calls without a seed so far |
                | `eos_tokens` | the ids that end an answer; None for the tokenizer's |
                | `return_logprobs` | whether `logprobs` are returned |
            **kwargs: none is accepted.

        Returns:
            `tokens` and `logprobs` of each answer with its end token, and `text` without it. The padding token ends an
            answer too, because tunix's trainer masks it, and is not part of it. `logits` is None.

        Raises:
            ValueError: for any argument that is not accepted, before anything is compiled.
        """
        if kwargs:
            raise ValueError(f"{', '.join(sorted(kwargs))}: expected prompts and a RolloutConfig alone")
        _check(rollout_config)
        config, pad = rollout_config, self.pad_id()
        rows = self._encoded(prompts, config.max_prompt_length)
        ends = list(config.eos_tokens) if config.eos_tokens else [self.eos_id()]
        log_probs = config.return_logprobs and self.logprobs_under == "policy"
        params = self._params(config.temperature)
        said = kvjax.generate(
            params,
            rows,
            policy=self.policy,
            max_new_tokens=config.max_tokens_to_generate,
            sampler=_sampler(config),
            seed=next(self._calls) if config.seed is None else config.seed,
            eos=[*ends, pad] if pad < params.config.vocab_size else ends,
            log_probs=log_probs,
        )
        self.stats = said.stats
        tokens = [row[:n] for row, n in zip(said.tokens, said.lengths, strict=True)]
        tokens = [row[:-1] if row[-1] == pad and pad not in ends else row for row in tokens]
        padded = np.full((len(rows), config.max_prompt_length), pad, np.int32)
        for out, row in zip(padded, rows, strict=True):
            out[len(out) - len(row) :] = row
        logprobs = None
        if config.return_logprobs:
            table = said.log_probs
            if table is None:
                table = self._full_logps(padded, tokens, config.temperature)
            logprobs = [row[: len(each)] for row, each in zip(table, tokens, strict=True)]
        texts = [row[:-1] if len(row) and row[-1] in ends else row for row in tokens]
        return RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in texts],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B N"], completion_tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """The log-probabilities of answers under the full cache, at the temperature of the cluster's config.

        The actor itself computes them, so they are those of the trainer.

        Args:
            prompt_tokens: prompts, padded at their beginning.
            completion_tokens: answers, padded at their end.
        """
        return self._logps(prompt_tokens, completion_tokens, self._temperature)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes the parameters of the actor, or some of them.

        Arrays on the device of the rollout are taken as they are, and others are moved there.

        Args:
            params: a state of the actor's variables.
            filter_types: the types of these variables; not needed.
        """
        nnx.update(self._actor, params if self._device is None else jax.device_put(params, self._device))

    def pad_id(self) -> int:
        """The id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The id that ends an answer, unless the config names others."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """The actor whose arrays answers are decoded from."""
        return self._actor

    def _params(self, temperature: float) -> kvjax.models.Decoder:
        """The actor as a decoder whose logits are divided by the temperature."""
        decoder = tempered(self._view(), temperature or 1.0)
        if self._dtype is None:
            return decoder
        graph, state = nnx.split(decoder)
        return nnx.merge(graph, jax.tree.map(lambda x: x.astype(self._dtype), state))

    def _logps(self, prompts: Any, answers: Any, temperature: float) -> Array:
        graph, state = nnx.split(self._actor)
        return common.compute_per_token_logps(
            graph,
            state,
            prompt_tokens=jnp.asarray(prompts),
            completion_tokens=jnp.asarray(answers),
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            temperature=temperature,
        )

    def _full_logps(
        self, prompts: Int[np.ndarray, "B N"], tokens: Sequence[np.ndarray], temperature: float
    ) -> Float32[np.ndarray, "B T"]:
        """The log-probabilities of answers of different lengths under the full cache."""
        answers = np.full((len(tokens), max(map(len, tokens))), self.pad_id(), np.int32)
        for out, row in zip(answers, tokens, strict=True):
            out[: len(row)] = row
        return np.asarray(self._logps(prompts, answers, temperature))

    def _encoded(self, prompts: Sequence[str], longest: int) -> list[list[int]]:
        """The ids of each prompt, as tunix's own sampler has them. Raises ValueError for what tunix would mask."""
        if isinstance(prompts, str) or not len(prompts) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"prompts={shown(prompts)}: expected a list of strings")
        bos, pad = self._tokenizer.bos_id(), self.pad_id()
        rows = []
        for i, prompt in enumerate(prompts):
            ids = list(self._tokenizer.encode(prompt))
            row = self._tokenizer.dedup_bos_ids([bos, *ids] if bos else ids)
            if not 0 < len(row) <= longest:
                raise ValueError(
                    f"prompt {i} has {len(row)} tokens: expected 1 to {longest}, as max_prompt_length has it"
                )
            if pad in row:
                raise ValueError(
                    f"prompt {i} has the padding token {pad}, which tunix masks in training: expected a tokenizer "
                    "whose pad_id() is in no prompt"
                )
            rows.append(row)
        return rows


def _check(config: RolloutConfig) -> None:
    """Raises ValueError for fields of a config that this engine cannot follow."""
    for name, accepted in UNREAD.items():
        if (value := getattr(config, name)) not in accepted:
            raise ValueError(f"{name}={shown(value)}: expected {' or '.join(map(str, accepted))}")
    if not (math.isfinite(config.temperature) and config.temperature >= 0):
        raise ValueError(f"temperature={shown(config.temperature)}: expected a number >= 0")


def _sampler(config: RolloutConfig) -> kvjax.SamplingMethod:
    """The sampler of a config. The temperature is in the decoder, so that log-probabilities have it."""
    if config.temperature == 0:
        return kvjax.Greedy()
    return kvjax.Sampler(top_k=None if config.top_k in (None, 0, -1) else config.top_k, top_p=config.top_p)


def _device(mesh: jax.sharding.Mesh | None, actor: nnx.Module) -> jax.Device | None:
    """The device of a mesh; None if the actor is there. Raises ValueError if there are several."""
    found = {device for array in jax.tree.leaves(nnx.state(actor)) for device in array.devices()}
    wanted = found if mesh is None or mesh.empty else set(mesh.devices.flat)
    for what, devices in (("actor", found), ("rollout", wanted)):
        if len(devices) != 1:
            raise ValueError(f"the {what} has {len(devices)} devices: expected one")
    return None if wanted == found else next(iter(wanted))
