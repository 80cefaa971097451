"""The loop that trains gates. It resumes where it was interrupted."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Float
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvjax.checkpoint.errors import CheckpointError, one_line
from kvjax.checks import check_one_kind, installs
from kvjax.files.saved_caches import fingerprint
from kvjax.files.writing import check_folder, new_file, write_file
from kvjax.models import Decoder
from kvjax.runtime.modes import own_modes

from .files import FILES, Gates, write_gates
from .objective import Objective, Recipe, Weights

TRAINING = "training"  # the folder of the state, the curve and the settings of a run
SETTINGS, CURVE, STATE, BATCHES = "settings.json", "curve.jsonl", "state", "batches"
Report = Callable[[Mapping[str, float]], None]  # a callback that receives each line of the curve


@dataclass(frozen=True)
class InTurn:
    """The batch of a step: one of `count`, each of which is drawn when it is first used.

    Attributes:
        draw: makes the batch of an index in 0 .. count - 1.
        count: the number of different batches.
        folder: holds them, so that an interrupted run does not draw them again, unless a file is damaged.
    """

    draw: Callable[[int], tuple[Array | np.ndarray, ...]]
    count: int
    folder: Path

    def __call__(self, step: int) -> tuple[np.ndarray, ...]:
        index = step % self.count
        path = self.folder / f"{index}.safetensors"
        if (found := _read(path)) is None:
            found = tuple(map(np.asarray, self.draw(index)))
            self.folder.mkdir(exist_ok=True)
            with new_file(path) as new:
                save_file({str(at): array for at, array in enumerate(found)}, new)
        return found


def _read(path: Path) -> tuple[np.ndarray, ...] | None:
    """The arrays of a file; None if it is absent or damaged."""
    try:
        arrays = load_file(path)
        return tuple(arrays[str(at)] for at in range(len(arrays)))
    except (FileNotFoundError, SafetensorError, KeyError):
        return None


@own_modes()
def train(
    params: Decoder,
    objective: Objective,
    recipe: Recipe,
    out: Path,
    *,
    facts: Mapping[str, Any],
    save_every: int = 100,
    report: Report = lambda line: None,
) -> Gates:
    """Trains gates, and writes them to a folder.

    The folder has the state of the run in `training/`: an Orbax checkpoint after every `save_every` steps, the settings
    in settings.json, and curve.jsonl with a line {"step", "loss", "learning_rate", "seconds"} per step. The same call
    goes on from the last checkpoint, to the same gates. With `recipe.distinct`, training/batches/ holds the batches
    until the gates are written.

    Args:
        params: the model, which does not change.
        objective: what is minimised.
        recipe: the settings that all methods have.
        out: an absent or empty folder, or one of an interrupted run with the same settings.
        facts: how the gates are made: the settings of this run beside its model's dtype and weights, and lines of the
            card.
        save_every: the number of steps between two checkpoints.
        report: receives each line of the curve.

    Raises:
        ValueError: the extra `train` is not installed, the folder holds something else than this run, or layers have kv
            heads of several kinds.
        CheckpointError: the interrupted run in the folder is damaged.
        OSError: the folder cannot be written.
        FloatingPointError: a loss is NaN or infinite.
    """
    check_one_kind("gates", params.config)
    optax = _optax()
    own = {**objective.sizes, **objective.settings}
    chosen = {name: value for name, value in dataclasses.asdict(recipe).items() if value is not None}
    model = {"dtype": params.embed.dtype.name, "weights": f"hash {fingerprint(params)}"}
    settings = {"method": objective.method, **facts, **own, **chosen, **model}
    folder = _begun(out, settings)
    warm_up = max(recipe.steps // 20, 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, warm_up, max(recipe.steps, warm_up + 1))
    optimizer = optax.adamw(schedule, weight_decay=0.0)

    @jax.jit
    def update(
        weights: Weights, state: Any, params: Decoder, batch: tuple[Any, ...]
    ) -> tuple[Weights, Any, Float[Array, ""]]:
        loss, gradient = jax.value_and_grad(objective.loss)(weights, params, batch)
        change, state = optimizer.update(gradient, state, weights)
        return objective.bounded(optax.apply_updates(weights, change)), state, loss

    count = recipe.distinct
    batch = objective.batch if count is None else InTurn(objective.batch, count, folder / BATCHES)
    weights = objective.initial()
    state = optimizer.init(weights)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager((folder / STATE).absolute(), options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            try:
                restored = manager.restore(first, args=ocp.args.StandardRestore((weights, state)))
            except (ValueError, OSError, LookupError) as error:
                raise _damaged(folder / STATE, one_line(error)) from error
            weights, state = jax.tree.map(np.asarray, restored)  # of no device, as the model may be on a mesh
        lines = [line for line in _curve(folder) if line["step"] <= first]
        write_file(folder / CURVE, "".join(f"{json.dumps(line)}\n" for line in lines))
        began = time.monotonic() - (lines[-1]["seconds"] if lines else 0.0)
        for step in range(first + 1, recipe.steps + 1):
            weights, state, loss = update(weights, state, params, batch(step - 1))
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of step {step} is {float(loss)} with learning_rate={recipe.learning_rate}: expected a "
                    "finite loss, as a smaller learning rate gives in another folder"
                )
            line = {
                "step": step,
                "loss": float(loss),
                "learning_rate": float(schedule(step - 1)),
                "seconds": round(time.monotonic() - began, 3),
            }
            with (folder / CURVE).open("a") as curve:
                curve.write(f"{json.dumps(line)}\n")
            report(line)
            if step % save_every == 0 or step == recipe.steps:
                manager.save(step, args=ocp.args.StandardSave((weights, state)))
    layers = tuple({name: np.asarray(tensor) for name, tensor in layer.items()} for layer in weights)
    gates = Gates(objective.method, dict(objective.sizes), layers)
    write_gates(gates, out, facts=settings, overwrite=True)
    shutil.rmtree(folder / BATCHES, ignore_errors=True)
    return gates


def check_training(out: Path) -> None:
    """Raises ValueError if optax is absent, or if `out` can hold no new run and no interrupted one."""
    _optax()
    check_folder(out, overwrite=True)
    if (out / FILES[0]).exists():
        raise ValueError(f"{out} holds gates, or a model: expected an empty or absent folder, or an interrupted run")
    if out.exists() and {path.name for path in out.iterdir()} - {TRAINING}:
        raise ValueError(f"{out} is not empty: expected an empty or absent folder, or an interrupted run")


def _begun(out: Path, settings: Mapping[str, Any]) -> Path:
    """The folder of a run, which is new or has these settings."""
    check_training(out)
    folder = out / TRAINING
    mine = json.loads(json.dumps(settings))
    if (folder / SETTINGS).exists():
        theirs = _read_settings(folder / SETTINGS)
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if differing:
            name = differing[0]  # method and model come before what follows from them
            raise ValueError(
                f"{out} has a run with {name}={theirs.get(name)}, not {mine.get(name)}: expected the same settings, or "
                "another folder"
            )
        return folder
    if (folder / STATE).exists():
        raise _damaged(folder, f"it has a state and no {SETTINGS}")
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / SETTINGS, json.dumps(mine, indent=2) + "\n")
    return folder


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings of a run. Raises CheckpointError for a damaged file."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, one_line(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "it is no JSON object")
    return found


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(path, [f"{problem}; expected what an interrupted run wrote, or another folder"])


def _curve(folder: Path) -> Iterator[dict[str, float]]:
    """The lines of the curve up to a damaged one; a kill may have cut the last one short."""
    path = folder / CURVE
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
            whole = all(math.isfinite(found[name]) for name in ("step", "seconds"))
        except (ValueError, TypeError, LookupError):
            return
        if not whole:
            return
        yield found


def _optax() -> Any:
    try:
        import optax
    except ImportError:
        raise ValueError(f"training needs optax: expected {installs('train')}") from None
    return optax
