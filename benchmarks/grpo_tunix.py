"""GRPO with tunix on a tiny task, by rollouts of kvjax and by tunix's own. docs/guide/rollouts.md installs tunix.

    python -m benchmarks.grpo_tunix --out grpo.jsonl

The actor is the demo model as tunix's Qwen2, with biases of zero. The task is to go on with a text in words whose first
letter is in the first half of the alphabet; the reward is the share of such words. Each side trains from the same
weights on the same prompts. Afterwards all sides sample the same prompts in turns, at equal batch. The output is JSON
lines: a line per step of each side, and a line per side with its speed and memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

import kvjax
from kvjax.checkpoint.parameters import by_path
from kvjax.integrations.tunix import KVJaxRollout
from kvjax.integrations.tunix.names import their_name

SIDES = ("vanilla", "full", "morphkv:budget=32,window=8")
GROUP = 8  # answers per prompt


def actor() -> qwen2.Qwen2:
    """The demo model as tunix's Qwen2."""
    params, _ = kvjax.load("demo")
    config = params.config
    made = qwen2.Qwen2(
        qwen2.ModelConfig(
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            embed_dim=config.hidden_size,
            hidden_dim=config.mlp_size,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            rope_theta=config.rope.theta,
            norm_eps=config.norm_epsilon,
            use_tied_embedding=config.tie_embeddings,
        ),
        rngs=nnx.Rngs(0),
    )
    arrays = {their_name(path): array for path, array in by_path(params).items()}
    flat = nnx.to_flat_state(nnx.state(made))
    named = {path: (variable, ".".join(map(str, path))) for path, variable in flat}
    filled = {path: variable.replace(arrays.get(name, variable[...])) for path, (variable, name) in named.items()}
    nnx.update(made, nnx.from_flat_state(filled))
    return made


def prompts(rng: np.random.Generator, count: int, length: int, tokenizer: Any) -> list[str]:
    """Texts of `length` words that are drawn from the vocabulary."""
    first = len(tokenizer.all_special_ids) + 1
    return [tokenizer.decode(rng.integers(first, len(tokenizer), length)) for _ in range(count)]


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of an answer's words that begin with a to m."""
    words = [[word for word in text.split() if word[0].isalpha()] for text in completions]
    return [sum(word[0] <= "m" for word in row) / max(1, len(row)) for row in words]


def config(arguments: argparse.Namespace, length: int) -> RolloutConfig:
    return RolloutConfig(
        max_tokens_to_generate=arguments.new,
        max_prompt_length=length,
        kv_cache_size=length + arguments.new,
        temperature=1.0,
        top_p=1.0,
        return_logprobs=True,
        eos_tokens=[1],  # the unknown word, so that answers are about equally long
    )


def cluster_of(model: nnx.Module, side: str, arguments: argparse.Namespace) -> rl_cluster.RLCluster:
    """The trainer and the rollouts of one side, on one device."""
    _, tokenizer = kvjax.load("demo")
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = rl_cluster.Role
    return rl_cluster.RLCluster(
        actor=model,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)},
            rollout_engine=side if side == "vanilla" else partial(KVJaxRollout, policy=side),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(arguments.rate), eval_every_n_steps=10_000, max_steps=arguments.steps
            ),
            rollout_config=config(arguments, arguments.prompt),
        ),
    )


def train(cluster: rl_cluster.RLCluster, side: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of one side: the reward, the loss, the seconds of each rollout, and how far off-policy it is."""
    _, tokenizer = kvjax.load("demo")
    lines: list[dict[str, Any]] = []
    worker = cluster.rollout
    sample = worker.generate

    def watched(texts: list[str], rollout_config: RolloutConfig) -> Any:
        """Samples as the worker does, with a seed per step, and notes what it took."""
        key = jax.random.fold_in(jax.random.PRNGKey(arguments.seed), len(lines))
        begin = time.perf_counter()
        out = sample(texts, RolloutConfig(**vars(rollout_config) | {"seed": key}))
        seconds = time.perf_counter() - begin
        ratios = np.concatenate([full - drawn for full, drawn in zip(_full(worker, out), out.logprobs, strict=True)])
        weights = np.exp(ratios)
        lines.append(
            {
                "side": side,
                "step": len(lines),
                "reward": float(np.mean(reward(texts, out.text))),
                "rollout_seconds": seconds,
                "tokens": sum(map(len, out.tokens)),
                "mean_abs_log_ratio": float(np.abs(ratios).mean()),
                "effective_share": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
            }
        )
        return out

    worker.generate = watched
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0),
    )
    rng = np.random.default_rng(arguments.seed)
    batches = (
        {"prompts": np.array(prompts(rng, arguments.batch, arguments.prompt - 1, tokenizer))}
        for _ in range(arguments.steps)
    )
    learner.train(list(batches))
    losses = cluster._rl_metrics_logger.get_metric_history("actor", "loss", "train")
    for line, loss in zip(lines, losses, strict=False):
        line["loss"] = float(loss)
    return lines


def _full(worker: Any, out: Any) -> list[np.ndarray]:
    """The log-probabilities of each answer under the full cache."""
    longest = max(map(len, out.tokens))
    answers = np.array([np.append(row, [worker.pad_id()] * (longest - len(row))) for row in out.tokens], np.int32)
    scored = np.asarray(worker.get_per_token_logps(out.left_padded_prompt_tokens, answers))
    return [row[: len(tokens)] for row, tokens in zip(scored, out.tokens, strict=True)]


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second and the bytes of the cache of each side, which take turns on the same prompts."""
    _, tokenizer = kvjax.load("demo")
    model, length = actor(), arguments.long
    asked = config(arguments, length)
    sizes = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64}
    workers: dict[str, Any] = {
        side: VanillaRollout(model, tokenizer, CacheConfig(cache_size=asked.kv_cache_size, **sizes))
        if side == "vanilla"
        else KVJaxRollout(model, tokenizer, rollout_config=asked, policy=side)
        for side in SIDES
    }
    rows = prompts(np.random.default_rng(1), arguments.batch, length - 1, tokenizer) * GROUP
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(arguments.turns + 1):
        for side, worker in workers.items():
            begin = time.perf_counter()
            out = worker.generate(rows, asked)
            if turn:  # the first turn compiles
                rates[side].append(sum(map(len, out.tokens)) / (time.perf_counter() - begin))
    vanilla = 2 * 4 * len(rows) * asked.kv_cache_size * np.prod(list(sizes.values()))
    return [
        {
            "side": side,
            "rows": len(rows),
            "prompt": length,
            "tokens_per_second": statistics.median(rates[side]),
            "ratio_to_vanilla": statistics.median(a / b for a, b in zip(rates[side], rates["vanilla"], strict=True)),
            "cache_bytes": int(vanilla if side == "vanilla" else workers[side].stats.cache_bytes),
        }
        for side in SIDES
    ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("grpo.jsonl"))
    parser.add_argument("--side", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="prompts per step")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt in training")
    parser.add_argument("--long", type=int, default=384, help="tokens of a prompt where speed is measured")
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5, help="of the sides, where speed is measured; 0 leaves that out")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    with arguments.out.open("a") as file:
        for side in arguments.side:
            for line in train(cluster_of(actor(), side, arguments), side, arguments):
                print(json.dumps(line), file=file, flush=True)
        for line in speed(arguments) if arguments.turns else ():
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
