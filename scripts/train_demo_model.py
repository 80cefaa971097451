"""Trains the model in kvjax/demo_model: a small Llama that answers questions about long texts.

    python -m scripts.train_demo_model --folder build/demo_model             # trains or resumes
    python -m scripts.train_demo_model --folder build/demo_model --evaluate  # prints accuracies

The training takes about 20 minutes on two CPU cores. It depends only on the seed: (seed, step) determines each batch.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int
from optax.contrib import MuonDimensionNumbers, muon

from kvjax.attend.causal import causal
from kvjax.checkpoint import save_hf
from kvjax.evaluation.tasks.demo import TASKS, Deck, Facts, example, weave
from kvjax.evaluation.tasks.vocabulary import IDS, PAD, STOP, WORDS, encode, tokenizer
from kvjax.models import Decoder, DecoderConfig, Rope

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=len(WORDS),
    hidden_size=160,
    mlp_size=320,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    windows=(None,) * 4,
    rope=Rope(5e5),
    max_positions=2560,
    tie_embeddings=True,
)
TOKENS_A_STEP = 4096
LENGTHS = (64, 128, 256, 512, 1024, 2048)
STAGES = (  # (the share of the run at which the stage begins, the probability of each length)
    (0.0, (0.60, 0.25, 0.15, 0.00, 0.00, 0.00)),
    (0.06, (0.15, 0.25, 0.25, 0.20, 0.10, 0.05)),
    (0.2, (0.05, 0.10, 0.15, 0.25, 0.25, 0.20)),
)
EVALUATED = (128, 256, 512, 1024, 2048)
LONGEST_ANSWER = 7
LANGUAGE_WEIGHT = 0.2

# Constants of the initial circuit.
FAST_PAIRS = 12  # the fastest rotary pairs, with which layer 0 distinguishes neighbours
SLOW_PAIRS = 13  # the slowest rotary pairs, which hardly rotate over a text; layer 1 compares codes on them
NEIGHBOUR_LOGIT, MATCH_LOGIT = 10.0, 14.0  # per pair, for the attention to a neighbour; for a full match of codes
OUTPUT_GAIN = 2.0
QUIET = 0.1  # the scale of outputs that the circuit does not use, so that they do not mask it

Params = dict[str, Array]  # keyed by the dotted path of a parameter, as in the family's table of weights


class Recipe(NamedTuple):
    """The options that determine a training run."""

    seed: int
    steps: int
    learning_rate: float


class Batch(NamedTuple):
    """B texts with N tokens each."""

    tokens: Int[Array, "B N"]
    positions: Int[Array, "B N"]
    answers: Int[Array, "B N"]  # 1 where a token belongs to an answer or ends it


def lesson(length: int, rng: np.random.Generator) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """A text with the facts of one to three tasks and some questions and answers, and the mask of its answers."""
    names = list(rng.permutation(list(TASKS))[: 1 + int(rng.integers(3))])
    deck, share = Deck(rng), rng.uniform(0.1, 0.4)
    drawn: list[Facts] = []
    room = length
    for name in names:
        facts = TASKS[name](length, rng, deck)
        stated = sum(len(statement.split()) for statement in facts.statements)
        if not drawn or stated < room - length // 2:
            drawn.append(facts)
            room -= stated
    asked = [question for facts in drawn for question in rng.permutation(np.array(facts.questions, object))[:24]]
    dialogue: list[np.ndarray] = []
    answers: list[np.ndarray] = []
    spent = 0
    for question in rng.permutation(np.array(asked, object)):
        ask, answer = encode(question.text), encode(question.answer)
        size = len(ask) + len(answer) + 1
        if spent + size > room - 4 or (spent and spent + size > share * length):
            break
        spent += size
        dialogue += [ask, answer, encode(STOP)]
        answers += [np.zeros(len(ask), np.int32), np.ones(len(answer) + 1, np.int32)]
    statements = [facts.statements for facts in drawn]
    turns = rng.permutation(np.repeat(np.arange(len(statements)), [len(each) for each in statements]))
    queues = [iter(each) for each in statements]
    text = weave([next(queues[turn]) for turn in turns], length - spent, rng)
    return np.concatenate([text, *dialogue]), np.concatenate([np.zeros(len(text), np.int32), *answers])


def stretched(tokens: Int[np.ndarray, "N"], rng: np.random.Generator) -> Int[np.ndarray, "N"]:
    """Positions with jumps after some sentences (PoSE, arXiv 2309.10400), which train long distances on short texts."""
    positions = np.arange(len(tokens))
    if rng.random() < 0.5:
        starts = np.flatnonzero(tokens[:-1] == IDS[STOP]) + 1
        spare = CONFIG.max_positions - len(tokens)
        for start in rng.choice(starts, 2):
            leap = int(rng.integers(spare // 2))
            positions[start:] += leap
    return positions.astype(np.int32)


def batch(recipe: Recipe, step: int) -> Batch:
    rng = np.random.default_rng([recipe.seed, step])
    odds = [odds for begin, odds in STAGES if step >= begin * recipe.steps][-1]
    length = int(rng.choice(LENGTHS, p=odds))
    rows = [lesson(length, rng) for _ in range(TOKENS_A_STEP // length)]
    tokens, answers = (np.stack(column) for column in zip(*rows, strict=True))
    positions = np.stack([stretched(row, rng) for row in tokens])
    return Batch(*map(jnp.asarray, (tokens, positions, answers)))


def induction_circuit(params: dict[str, np.ndarray], config: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    """Replaces the embeddings and the attention of the first two layers by an induction circuit.

    The model needs tied embeddings and two kv heads with two query heads each, as the demo model has.

    Induction means to find an earlier occurrence of the current word and to predict the word that followed it. A small
    model takes long to discover induction and little time to refine it. Layer 0 copies the codes of the two preceding
    tokens to each token. Layer 1 attends to the tokens whose code matches the code of the query and predicts them.
    """
    rng = np.random.default_rng(seed)
    params = {path: np.array(value) for path, value in params.items()}
    for path in params:
        if path.endswith((".output", ".down")):
            params[path] *= QUIET
    M, D = config.hidden_size, config.head_dim
    code = 2 * SLOW_PAIRS
    basis = np.linalg.qr(rng.normal(size=(M, M)))[0].T
    # Parts of the residual stream: a constant direction, the token itself, a code for each of the two preceding tokens.
    constant, before, own = basis[0], np.split(basis[1 : 1 + 2 * code], 2), basis[1 + 2 * code :]
    words = rng.normal(size=(config.vocab_size, len(own))) @ own
    params["embed"] = words / np.linalg.norm(words, axis=1, keepdims=True) + constant

    # RMSNorm scales squared length s to M. These are the lengths of a unit vector after the norm of each layer.
    unit0, unit1 = (M / 2) ** 0.5, (M / 4) ** 0.5
    encode = own[:code] * (len(own) / code) ** 0.5  # a code has about unit length
    query, key, value, output = (params[f"layers.0.attention.{name}"] for name in ("query", "key", "value", "output"))
    pairs = np.arange(FAST_PAIRS)
    angles = config.rope.frequencies(D)[:FAST_PAIRS]
    gain = (NEIGHBOUR_LOGIT / config.scale) ** 0.5 / unit0
    key[:] *= QUIET
    key[:, :, pairs] += gain * constant[:, None, None]
    for head, distance in enumerate((1, 2)):
        query[:, head] *= QUIET
        query[:, head, pairs] += gain * constant[:, None] * np.cos(distance * angles)
        query[:, head, pairs + D // 2] -= gain * constant[:, None] * np.sin(distance * angles)
        output[head, :code] = before[distance - 1] / unit0
    value[:, :, :code] = encode.T[:, None]

    query, key, value, output = (params[f"layers.1.attention.{name}"] for name in ("query", "key", "value", "output"))
    slow = np.concatenate([np.arange(D // 2 - SLOW_PAIRS, D // 2), np.arange(D - SLOW_PAIRS, D)])
    gain = (MATCH_LOGIT / config.scale) ** 0.5 / unit1
    key[:] *= QUIET
    # Query head 0 at "ann is" finds the token two places after "ann"; query head 2 finds the token after its own word.
    for head, carried in ((0, before[0]), (2, encode)):
        query[:, head] *= QUIET
        query[:, head, slow] = gain * carried.T
    key[:, 0, slow], key[:, 1, slow] = gain * before[1].T, gain * before[0].T
    halves = own[:D], own[-D:]
    for kv_head, half in enumerate(halves):
        value[:, kv_head, : len(half)] = half.T
        for head in (2 * kv_head, 2 * kv_head + 1):
            output[head, : len(half)] = half * OUTPUT_GAIN / unit1
    output[1::2] *= QUIET
    return {path: value.astype(np.float32) for path, value in params.items()}


class Trainer:
    """Holds the structure of the decoder, the optimizer and the jitted training step."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.graph, state = nnx.split(Decoder(CONFIG, nnx.Rngs(recipe.seed)))
        self.paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        self.state = state
        peak = recipe.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, 50, recipe.steps, 0.02 * peak)
        self.optimizer = muon(
            schedule,
            weight_decay=0.02,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda params: {path: matrix_axes(path) for path in params},
        )
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.predict = jax.jit(self._predict)

    def initial(self) -> Params:
        params = dict(zip(self.paths, map(np.asarray, jax.tree.leaves(self.state)), strict=True))
        return {path: jnp.asarray(x) for path, x in induction_circuit(params, CONFIG, self.recipe.seed).items()}

    def decoder(self, params: Params) -> Decoder:
        leaves = [params[path] for path in self.paths]
        return nnx.merge(self.graph, jax.tree.unflatten(jax.tree.structure(self.state), leaves))

    def _loss(self, params: Params, batch: Batch) -> tuple[Array, Array]:
        decoder = self.decoder(params)
        hidden, _ = decoder(batch.tokens, causal(batch.positions))
        logits, targets, answers = decoder.logits(hidden[:, :-1]), batch.tokens[:, 1:], batch.answers[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        count = jnp.maximum(answers.sum(), 1)
        answer = (losses * answers).sum() / count
        correct = ((logits.argmax(-1) == targets) * answers).sum() / count
        language = losses.mean()
        return answer + LANGUAGE_WEIGHT * language, jnp.stack([answer, language, correct])

    def _step(self, params: Params, state: optax.OptState, batch: Batch):
        (_, metrics), gradients = jax.value_and_grad(self._loss, has_aux=True)(params, batch)
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, metrics

    def _predict(self, params: Params, tokens: Int[Array, "B N"]) -> Int[Array, "B A"]:
        """The most probable token at each of the last LONGEST_ANSWER places, given all tokens before it."""
        decoder = self.decoder(params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = decoder(tokens, causal(positions))
        return decoder.logits(hidden[:, -LONGEST_ANSWER - 1 : -1]).argmax(-1)

    def correct(self, params: Params, task: str, length: int, count: int, seed: int) -> int:
        """The number of exact answers to `count` new examples; teacher forcing equals greedy decoding here."""
        rng = np.random.default_rng([seed, length, list(TASKS).index(task)])
        examples = [example(task, length, rng) for _ in range(count)]
        answers = np.stack([each.answer for each in examples])
        padding = np.full((count, LONGEST_ANSWER - answers.shape[1]), IDS[PAD], np.int32)
        tokens = np.concatenate([np.stack([each.prompt for each in examples]), answers, padding], axis=1)
        rows = max(2, TOKENS_A_STEP // length)
        hits = 0
        for first in range(0, count, rows):
            # All parts have one shape, so the last part repeats rows.
            part = np.resize(tokens[first : first + rows], (rows, tokens.shape[1]))
            truth = answers[first : first + rows]
            guesses = np.asarray(self.predict(params, jnp.asarray(part)))[: len(truth), : truth.shape[1]]
            hits += int((guesses == truth).all(axis=1).sum())
        return hits

    def table(self, params: Params, count: int, seed: int) -> dict[str, dict[int, int]]:
        return {task: {n: self.correct(params, task, n, count, seed) for n in EVALUATED} for task in TASKS}


def matrix_axes(path: str) -> MuonDimensionNumbers | None:
    """The input and output axes of a linear map, for Muon; None if Adam trains the parameter."""
    name = path.rsplit(".", 1)[-1]
    if name in ("query", "key", "value"):
        return MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))
    if name == "output":
        return MuonDimensionNumbers(reduction_axis=(0, 1), output_axis=(2,))
    return MuonDimensionNumbers() if name in ("gate", "up", "down") else None


def save(path: Path, recipe: Recipe, step: int, seconds: float, params: Params, state: optax.OptState) -> None:
    leaves: dict[str, Any] = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((params, state)))}
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, recipe=np.array(recipe), step=step, seconds=seconds, **leaves)
    partial.replace(path)  # a run that stops while writing keeps the previous checkpoint


def restore(
    path: Path, recipe: Recipe, params: Params, state: optax.OptState
) -> tuple[int, float, Params, optax.OptState]:
    with np.load(path) as saved:
        if tuple(saved["recipe"]) != recipe:
            raise SystemExit(f"{path} is of {Recipe(*saved['recipe'])}: expected {recipe} or another --folder")
        leaves, structure = jax.tree.flatten((params, state))
        params, state = jax.tree.unflatten(structure, [jnp.asarray(saved[str(i)]) for i in range(len(leaves))])
        return int(saved["step"]), float(saved["seconds"]), params, state


def report(table: dict[str, dict[int, int]], count: int) -> str:
    rows = [
        f"| {task} | " + " | ".join(f"{hits / count:.3f}" for hits in row.values()) + " |"
        for task, row in table.items()
    ]
    head = f"| task | {' | '.join(map(str, EVALUATED))} |\n|---|{'---|' * len(EVALUATED)}"
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the weights and the checkpoint")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--stop", type=int, help="stop after this step of the schedule")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--evaluate", type=int, nargs="?", const=200, help="only measure, on this number of examples")
    options = parser.parse_args()

    recipe = Recipe(options.seed, options.steps, options.learning_rate)
    trainer = Trainer(recipe)
    params = trainer.initial()
    state = trainer.optimizer.init(params)
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.folder / "checkpoint.npz"
    start, seconds = 0, 0.0
    if checkpoint.exists():
        start, seconds, params, state = restore(checkpoint, recipe, params, state)
    if options.evaluate:
        print(report(trainer.table(params, options.evaluate, seed=10_000), options.evaluate))
        return

    began = time.monotonic() - seconds
    seen: dict[int, list[np.ndarray]] = {}
    last = min(options.stop or recipe.steps, recipe.steps)
    with ThreadPoolExecutor(1) as worker:
        ahead = worker.submit(batch, recipe, start)
        for step in range(start + 1, last + 1):
            lessons, ahead = ahead.result(), worker.submit(batch, recipe, step)
            params, state, metrics = trainer.step(params, state, lessons)
            seen.setdefault(lessons.tokens.shape[1], []).append(np.asarray(metrics))
            if step % 50 == 0:
                means = {n: np.mean(values, axis=0) for n, values in sorted(seen.items())}
                parts = [f"{n}: {m[2]:.3f} (loss {m[0]:.2f}, {m[1]:.2f})" for n, m in means.items()]
                print(f"step {step} {time.monotonic() - began:.0f} s  " + "  ".join(parts), flush=True)
                seen = {}
            if step % options.every == 0 or step == last:
                save(checkpoint, recipe, step, time.monotonic() - began, params, state)
                save_hf(trainer.decoder(params), options.folder, tokenizer(), overwrite=True)
            if step % (2 * options.every) == 0:
                print(report(trainer.table(params, 12, seed=step), 12), flush=True)


if __name__ == "__main__":
    main()
