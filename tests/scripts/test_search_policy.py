"""The search over parts: what it measures, what it accepts, and the sizes of what it compares."""

from contextlib import suppress
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks.measured_lines import MeasuredLines
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.model import load_model
from kvjax.evaluation.tasks.vocabulary import WORDS
from scripts import search_policy as search
from tests.tiny import full_logits

GRID = Grid.of({"model": "demo", "policies": ["full"], "tasks": ["demo/needle"]})


@pytest.fixture(scope="module")
def demo():
    return load_model(GRID)


@pytest.fixture(scope="module")
def of_prompts():
    return search.of_prompts(0.25)


@pytest.mark.parametrize("use", ["seen", "unknown", "dialogue"])
def test_uses_divide_the_same_texts(demo, use) -> None:
    samples = search.samples_of(GRID, demo[1], use, 256, 2, "search")
    seen = search.samples_of(GRID, demo[1], "seen", 256, 2, "search")
    assert len(samples) == len(seen) == 6
    for sample, other in zip(samples, seen, strict=True):
        assert sample.name == other.name
        whole, same = (np.concatenate([x.prompt, x.turn, x.steps]) for x in (sample, other))
        np.testing.assert_array_equal(whole, same)
        assert sample.counted == other.counted < sample.steps.size
    assert (samples[0].turn.size > 0) == (use == "unknown")


def test_halves_have_no_task_in_common(demo) -> None:
    halves = [{s.name for s in search.samples_of(GRID, demo[1], "seen", 256, 2, half)} for half in search.WORDS]
    assert all(halves)
    assert not halves[0] & halves[1]


def test_another_seed_draws_prompts_and_names_of_its_own(demo) -> None:
    halves = [
        search.samples_of(GRID.but(seed=seed), demo[1], "seen", 256, 2, half)
        for seed in (0, 1)
        for half in search.WORDS
    ]
    prompts = [{tuple(sample.prompt) for sample in half} for half in halves]
    assert sum(map(len, prompts)) == len(set.union(*prompts))
    assert [sample.name.endswith(", seed 1") for half in halves for sample in half] == [False] * 10 + [True] * 10


def test_another_seed_takes_the_texts_that_follow(demo, tmp_path) -> None:
    folder = tmp_path / search.ESSAYS
    folder.mkdir()
    text = " ".join(WORDS * 2)
    (folder / "a.txt").write_text(text)
    found = [
        np.concatenate([sample.prompt, sample.steps])
        for seed in (0, 1)
        for half in search.WORDS
        for sample in search.samples_of(GRID.but(seed=seed, data=str(tmp_path)), demo[1], "answers", 64, 2, half)
    ]
    ids = demo[1](text, add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(np.concatenate(found), ids[: 8 * 66])


@pytest.mark.slow
@pytest.mark.parametrize("use", ["unknown", "dialogue"])
def test_bits_are_those_of_the_whole_text_under_the_full_cache(demo, use) -> None:
    params, tokenizer = demo
    samples = search.samples_of(GRID, tokenizer, use, 256, 1, "search")
    ((_, bits, greedy),) = search.measure(params, tokenizer, samples, [kvjax.policies.full()])
    texts = [np.concatenate([s.prompt, s.turn, s.steps]) for s in samples]
    logits = full_logits(params, [text[:-1] for text in texts], 320)
    for sample, text, mine, found, same in zip(samples, texts, logits, bits, greedy, strict=True):
        n = sample.counted
        answer, last = text[-n:], jnp.asarray(mine)[-n:].astype(jnp.float32)
        chosen = last[jnp.arange(n), answer] - jnp.log(jnp.sum(jnp.exp(last), axis=1))
        np.testing.assert_allclose(found, -float(chosen.mean()) / np.log(2), rtol=1e-3, atol=1e-4)
        assert same == bool((jnp.argmax(last, 1) == answer).all())


def test_most_choices_suit_the_start(of_prompts) -> None:
    for space in (of_prompts, search.of_answers(128)):
        made = 0
        for changes in space.parts.values():
            for change in changes.values():
                with suppress(ValueError):
                    made += change(space.start) is not None
        assert made > 20
        evicts = [kvjax.policies.parse(text).every is not None for text in space.presets]
        assert all(evicts) if space is not of_prompts else not any(evicts)


def test_storages_hold_the_same_bytes(of_prompts, demo) -> None:
    params, _ = demo
    sizes = []
    for change in of_prompts.parts["storage"].values():
        cache = kvjax.plan_cache(
            params.config, change(of_prompts.start), batch=1, length=8192, new_tokens=1, dtype=jnp.bfloat16
        )
        slots = sum(cache.entries.mean_slots) * params.config.num_kv_heads
        sizes.append(cache.nbytes - 4 * slots)  # without positions
    np.testing.assert_allclose(sizes, sizes[0], rtol=0.03)


def test_a_change_must_help_by_more_than_its_interval(of_prompts) -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(40)

    def measured(policies):
        """A window of 16 is better, one of 64 is better on average only."""
        windows = [policy.protect.recent for policy in policies]
        bits = [2.0 + {16: -1.0 + 0.01 * noise, 64: -0.01 + noise - noise.mean()}.get(w, 0 * noise) for w in windows]
        return np.stack([np.stack([b, 0 * b], axis=1) for b in bits])

    windows = of_prompts.parts["window"]
    best = search.climbed(replace(of_prompts, parts={"window": windows}), measured, 2)
    assert best.protect.recent == 16
    only = {name: windows[name] for name in ("32", "64")}
    assert search.climbed(replace(of_prompts, parts={"window": only}), measured, 2) == of_prompts.start


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--use", "answers"], "DATA is missing"),
        (["--use", "dialogue"], "--budget 0.1: expected a number of entries for dialogue"),
        (["--use", "dialogue", "--budget", "4"], "--budget 4: .*a budget of 4 entries: expected"),
        (["--use", "seen", "--compare", "snapkv:budgets=1"], "--compare: .*budgets"),
        (["--use", "seen", "--seed", "-1"], "--seed -1: expected an integer >= 0"),
    ],
)
def test_what_it_does_not_accept(monkeypatch, tmp_path, options, error) -> None:
    monkeypatch.setattr("sys.argv", ["search_policy.py", "demo", *options, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=error):
        search.main()


@pytest.mark.slow
def test_the_second_call_measures_what_is_missing(demo, tmp_path, monkeypatch) -> None:
    params, tokenizer = demo
    samples = search.samples_of(GRID, tokenizer, "seen", 256, 1, "search")
    policies = [kvjax.policies.snapkv(0.5, window=8), kvjax.policies.knorm(0.5)]

    def lines() -> object:
        return MeasuredLines(tmp_path / "x.jsonl", {"model": "demo"}, ("policy", "sample"))

    first = search.Measured(params, tokenizer, lines())(policies[:1], samples)
    asked, measure = [], search.measure

    def watched(*args):
        asked.append(args[-1])
        return measure(*args)

    monkeypatch.setattr(search, "measure", watched)
    both = search.Measured(params, tokenizer, lines())(policies, samples)
    assert asked == [[policies[1]]]
    np.testing.assert_array_equal(both[0], first[0])
