"""A model class for lm-evaluation-harness, which runs its tasks under a cache policy. Needs the extra `lm-eval`.

    lm_eval --model kvjax --model_args pretrained=PATH,policy=snapkv:budget=1024;window=32 --tasks gsm8k

A version of lm_eval without plugin support (0.4.13 and older) does not find the model. With these versions, call
`python -m kvjax.evaluation.lm_eval_model`, which takes the same arguments.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.cache import bucket
from kvjax.checkpoint import load_named, mesh_sizes
from kvjax.checks import installs, shown
from kvjax.decoding import sampling
from kvjax.engine.refill import ReadBatch, Refill
from kvjax.evaluation import programs
from kvjax.evaluation.continuations import marks, score
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.reading.room import with_room
from kvjax.request.request import Request, read_request

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ImportError(f"this module needs {error.name}: expected {installs('lm-eval')}") from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

T = TypeVar("T")
Ids = list[int]
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

log = logging.getLogger(__name__)


@register_model("kvjax")
class KVJaxLM(TemplateLM):
    """A checkpoint under a policy, as a model of lm-evaluation-harness.

    All tokens of a prompt except the last are prefilled and compressed. The last token and the answer are decoded from
    the retained entries. Continuations are scored in the same way, token by token, so a policy that evicts entries
    while decoding also does so there.

    Args:
        pretrained: a folder in Hugging Face or Orbax form, a GGUF file, or the name of a repository on the hub.
        policy: a policy as in `kvjax generate`, with semicolons in place of commas, because lm_eval splits its
            arguments at commas.
        dtype: float32, bfloat16 or float16; the stored dtype by default.
        mesh: the shape of the device mesh, DATAxMODEL.
        gates: folders or repositories of gates and statistics that the policy reads, with semicolons between them.
        batch_size: the number of prompts per batch, and of answers that are decoded together.
        max_length: the largest number of tokens of a prompt and its answer; the model's limit by default. A longer
            prompt loses its beginning, with a warning.
        max_gen_toks: the largest number of tokens of an answer, for tasks that do not define it.
        chunk: the number of tokens that prefill reads at a time; None reads a prompt at once.
        seed: the seed of sampling. A sampled answer depends on the seed and on the number of its request.
        max_batch_size: not accepted; the harness may pass it.
        device: ignored. The harness passes "cuda:0" by default, and JAX chooses its own devices.

    Raises:
        ValueError: if an argument is not accepted or the checkpoint cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str = "full",
        dtype: str | None = None,
        mesh: str = "1x1",
        gates: str = "",
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        chunk: int | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size={shown(batch_size)}: expected an integer >= 1")
        if max_batch_size is not None:
            raise ValueError(
                f"max_batch_size={shown(max_batch_size)}: expected None; batch_size is the number of prompts per batch"
            )
        self.policy = kvjax.policies.parse(policy.replace(";", ","))
        self.params, tokenizer = load_named(pretrained, dtype, mesh_sizes(mesh), gates.split(";") if gates else ())
        self.tokenizer: Any = tokenizer
        self.pretrained, self.batch_size, self.chunk, self.seed = pretrained, int(batch_size), chunk, seed
        self.max_length = max_length or self.params.config.max_positions
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.pretrained.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        if add_special_tokens is None:  # a chat template may have added the first special token
            begun = self.tokenizer.bos_token is not None and string.startswith(self.tokenizer.bos_token)
            add_special_tokens = not begun
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[tuple[Ids, int]]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append((self.tok_encode(request.args[0]), i))
        texts = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvjax: generate_until") as bar:
            for key, group in groups.items():
                wanted: dict[str, Any] = dict(normalize_gen_kwargs(json.loads(key), self.max_gen_toks))
                room = self.max_length - wanted["max_gen_toks"]
                if room < 1:
                    raise ValueError(
                        f"max_gen_toks={wanted['max_gen_toks']}: expected less than max_length={self.max_length}"
                    )
                sampler = _sampler(wanted)
                batches = self._batches(self._cut(group, [room] * len(group)))
                read = (self._asked(batch, sampler, wanted) for batch in batches)
                for ended in Refill(self.params).run(read):
                    text = ended.text
                    if not wanted["until"]:
                        text = self.tokenizer.decode(ended.tokens, skip_special_tokens=True)
                    i = ended.name
                    texts[i] = postprocess_generated_text(text, wanted["until"], None)
                    self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                    bar.update()
        return texts

    def _asked(
        self, batch: list[tuple[Ids, int]], sampler: sampling.SamplingMethod, wanted: dict[str, Any]
    ) -> ReadBatch:
        """Reads the prompts of a batch of requests, by their numbers."""
        contexts, numbers = [context for context, _ in self._filled(batch)], [i for _, i in self._filled(batch)]
        asked: dict[str, Any] = {
            "max_new_tokens": wanted["max_gen_toks"],
            "sampler": sampler,
            "seed": self.seed if isinstance(sampler, sampling.Greedy) else [self.seed + i for i in numbers],
            "stop": wanted["until"],
            "tokenizer": self.tokenizer,
        }
        if len(contexts[0]) == 1:
            asked |= {"prompt": contexts, "policy": self.policy}
        else:
            _, cache, _ = self._context(contexts)
            last = cache.put_rows(np.array([context[-1] for context in contexts], np.int32))
            asked |= {"prompt": None, "cache": replace(cache, pending=jnp.asarray(last))}
        return ReadBatch.of(self.params, names=numbers[: len(batch)], **asked)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Ids, Ids]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = [(0.0, True)] * len(requests)
        of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, (_, context, _) in enumerate(requests):
            # A context with several continuations is read once. A context of one token, as in rolling windows, is a row
            # for each request, so that batches are full.
            of[(*context, -1 - i) if len(context) == 1 else tuple(context)].append(i)
        groups = list(of.values())
        longest = [max(len(requests[i][2]) for i in asked) for asked in groups]
        # The last token of a continuation is not an input.
        rooms = [self.max_length - max(size - 1, 0) for size in longest]
        rows = self._cut([(requests[asked[0]][1], asked) for asked in groups], rooms)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="kvjax: loglikelihood") as bar:
            for batch in self._batches(rows):
                logits, cache, single = self._context([context for context, _ in batch])
                for turn in zip_longest(*(asked for _, asked in batch)):
                    said = [[] if i is None else requests[i][2] for i in turn]
                    found = self._scores([context[-1] for context, _ in batch], said, logits if single else None, cache)
                    for i, one in zip(turn, found, strict=False):
                        if i is None:
                            continue
                        scores[i] = one
                        bar.update()
                        if requests[i][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[i][0], one)
        return scores

    def _context(self, contexts: list[Ids]) -> tuple[Float[Array, "B V"], KVCache, bool]:
        """Prefills all tokens of each context except the last, or the one token of contexts that have only one.

        Returns:
            The logits of the next token, the cache, and whether the contexts have one token only.
        """
        single = len(contexts[0]) == 1
        prompts = [c if single else c[:-1] for c in self._filled(contexts)]
        programs.make_room((self.policy, len(prompts), bucket(max(map(len, prompts)))))
        request = Request.of(self.params, prompts, policy=self.policy, tokenizer=self.tokenizer, chunk=self.chunk)
        return *read_request(self.params, request), single

    def _scores(
        self, last: Ids, said: list[Ids], logits: Float[Array, "B V"] | None, cache: KVCache
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding generates it.

        Args:
            last: the last token of each context, which is decoded before the continuation.
            said: the continuations; an empty one scores 0.
            logits: the logits after the last token, if it has been read already; None otherwise.
            cache: the cache of the contexts.
        """
        last, said = self._filled(last), self._filled(said)
        steps = bucket(max(map(len, said)))
        inputs, targets = np.zeros((2, len(said), steps), np.int32)
        for row, (before, tokens) in enumerate(zip(last, said, strict=True)):
            targets[row, : len(tokens)] = tokens
            inputs[row, : len(tokens)] = [before, *tokens][: len(tokens)]
        lengths = np.array(list(map(len, said)), np.int32)
        said_any, first = lengths > 0, None
        if logits is not None:  # decoding starts at the second token
            first = map(fetch, marks(logits, cache.put_rows(targets[:, 0])))
            inputs, targets, lengths = np.roll(inputs, -1, 1), np.roll(targets, -1, 1), np.maximum(lengths - 1, 0)
        arrays = map(cache.put_rows, (inputs, targets, lengths))
        sums, greedy = map(fetch, score(self.params, with_room(cache, steps), *arrays))
        if first is not None:
            chosen, same = first
            sums, greedy = sums + np.where(said_any, chosen, 0), greedy & (same | ~said_any)
        if not np.isfinite(sums).all():
            raise FloatingPointError(
                f"the log-probability of a continuation is {sums[~np.isfinite(sums)][0]}: expected finite logits; the "
                "checkpoint is broken, or a number exceeds the dtype"
            )
        return list(zip(sums.tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, Ids, Ids]] = []
        owners = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(i)
        sums = np.zeros(len(requests))
        for i, (one, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[i] += one
        for request, one in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, float(one))
        return sums.tolist()

    def _cut(self, rows: list[tuple[Ids, T]], rooms: list[int]) -> list[tuple[Ids, T]]:
        """Limits each context to the number of tokens in `rooms` by removing its beginning."""
        if any(room < 1 for room in rooms):
            raise ValueError(
                f"a continuation is longer than max_length={self.max_length} tokens: expected a shorter one"
            )
        kept = [(context[-room:], asked) for (context, asked), room in zip(rows, rooms, strict=True)]
        cut = sum(len(new) < len(old) for (new, _), (old, _) in zip(kept, rows, strict=True))
        if cut:
            log.warning("%d of %d prompts are too long for the model and lost their beginning", cut, len(rows))
        return kept

    def _batches(self, rows: list[tuple[Ids, T]]) -> Iterable[list[tuple[Ids, T]]]:
        """Batches with the longest contexts first. Contexts of one token have batches of their own."""
        for single in (False, True):
            some = sorted((row for row in rows if (len(row[0]) == 1) is single), key=lambda row: -len(row[0]))
            for start in range(0, len(some), self.batch_size):
                yield some[start : start + self.batch_size]

    def _filled(self, rows: list[T]) -> list[T]:
        """Repeats the last row up to `batch_size` rows, so that few programs are compiled."""
        return rows + rows[-1:] * (self.batch_size - len(rows))


def _sampler(wanted: dict[str, Any]) -> sampling.SamplingMethod:
    unknown = set(wanted) - {*SAMPLING, "until", "max_gen_toks", "do_sample"}
    if unknown:
        raise ValueError(
            f"generation arguments {sorted(unknown)}: expected only {', '.join(SAMPLING)}, until, do_sample"
        )
    if not wanted.get("do_sample") or not wanted.get("temperature"):
        return sampling.Greedy()
    return sampling.parse(",".join(f"{name}={wanted[name]}" for name in SAMPLING if wanted.get(name) is not None))


def main() -> None:
    """Runs the command line of lm_eval with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
