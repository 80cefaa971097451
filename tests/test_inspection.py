"""Compares recordings with the caches of `generate`, and tests the page, in a browser if one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.cache import Entries, Slots
from kvjax.inspection import Recording, page, record
from kvjax.models import Decoder
from tests.patience import PATIENCE
from tests.products import part
from tests.tiny import held

PROMPT = (
    np.random.default_rng(7).permutation(99)[:44].tolist()
)  # tokens must differ, because a merge of equal values changes nothing
NEW = 6
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


RECORDED = ("morphkv:budget=24,window=4", "full", "snapkv:budget=24,window=4", "dynamickv:budget=24,window=4")


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("text", part(RECORDED, [text for text in RECORDED if not text.startswith("snapkv")]))
def test_recordings_are_what_caches_hold(tiny: Decoder, text: str) -> None:
    """Compares the recording after each step with a call of `generate` of that length."""
    policy = kvjax.policies.parse(text)
    recording = record(tiny, PROMPT, policy=policy, max_new_tokens=NEW)
    assert (recording.prompt, recording.steps, recording.left.shape) == (44, NEW - 1, (2, 2, 44 + NEW - 1))
    for step in range(NEW):
        expected = kvjax.generate(tiny, [PROMPT], policy=policy, max_new_tokens=step + 1)
        ours = [[np.flatnonzero(head).tolist() for head in layer] for layer in recording.held(step)]
        assert ours == held(expected.cache, 0)
    assert recording.tokens.tolist() == PROMPT + expected.tokens[0].tolist()
    evicted = np.unique(recording.left[recording.left <= recording.steps]).tolist()
    assert evicted == ([] if text == "full" else [0, 1, 2, 3, 4, 5] if text.startswith("morphkv") else [0])


@pytest.mark.slow
def test_recordings_draw_what_generate_draws(tiny: Decoder) -> None:
    """With keys, with the tokens that were seen, and until the end."""
    sampler = kvjax.Sampler(temperature=1.2, repetition_penalty=1.5)
    options: dict[str, Any] = {"policy": RECORDED[0], "max_new_tokens": NEW, "sampler": sampler, "seed": 5}
    expected = kvjax.generate(tiny, [PROMPT], **options, eos=()).tokens[0].tolist()
    assert record(tiny, PROMPT, **options, eos=()).tokens.tolist() == PROMPT + expected
    ended = record(tiny, PROMPT, **options, eos=expected[2])
    assert ended.tokens.tolist() == PROMPT + expected[: expected.index(expected[2]) + 1]


@jax.jit
def layers_of(entries: Entries) -> list[Slots]:
    return [entries.layer(i, slots) for i, slots in enumerate(entries.bounds)]


def entries(cache: kvjax.KVCache) -> list[list[dict[int, np.ndarray]]]:
    """The value at each position that a cache holds, by layer and kv head."""
    layers = layers_of(cache.entries)
    held = [zip(np.asarray(layer.positions[0]), np.asarray(layer.values[0]), strict=True) for layer in layers]
    return [[{int(p): x for p, x in zip(*head, strict=True) if p >= 0} for head in layer] for layer in held]


MERGING = (
    "kvmerger:budget=24,recent=8,merge.heavy=4,merge.theta=None",
    "d2o:budget=24,layer_budgets=False",
    "d2o:budget=24,dense_first=1,dense_last=0",
    "cam:budget=24,tokens=4",
)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("text", part(MERGING, MERGING[1:]))
def test_merged_entries_are_made_of_what_went_into_them(text: str, tiny: Decoder, shallow: Decoder) -> None:
    """No other entry changes. Values have 8 channels, so the sum of fewer than 8 entries has unique weights.

    The layers of the second D2O, of which one retains everything, share a pool.
    """
    policy = kvjax.policies.parse(text)
    params = tiny if policy.allocates else shallow
    recording = record(params, PROMPT, policy=policy, max_new_tokens=NEW)
    assert recording.into is not None
    caches = [kvjax.prefill(params, [PROMPT], policy=policy, compress="never")]
    caches += [kvjax.generate(params, [PROMPT], policy=policy, max_new_tokens=step + 1).cache for step in range(NEW)]
    values = [entries(cache) for cache in caches]
    merged = several = 0
    for step, layer, head in np.ndindex(NEW, *recording.left.shape[:2]):
        before, after = values[step][layer][head], values[step + 1][layer][head]
        gone = np.flatnonzero((recording.left[layer, head] == step) & (recording.came < max(step, 1)))
        assert set(gone.tolist()) == before.keys() - after.keys()
        into = {int(p): int(recording.into[layer, head, p]) for p in gone}
        assert set(into.values()) - {-1, -2} <= after.keys() & before.keys()
        shared = -2 in into.values()
        changed = {p for p in before.keys() & after.keys() if not np.allclose(after[p], before[p], atol=1e-5)}
        if shared:
            assert len(changed) > 1
            several += 1
        else:
            assert changed == set(into.values()) - {-1}
        for target in set(into.values()) - {-1, -2}:
            parts = np.stack([before[target], *(before[p] for p in into if into[p] == target)], axis=1)
            weights = np.linalg.lstsq(parts, after[target], rcond=None)[0]
            np.testing.assert_allclose(parts @ weights, after[target], atol=1e-4)
            if parts.shape[1] < 8:
                assert np.all(weights > 1e-4)
                merged += 1
    assert (several > 0, merged > 0) == ((True, False) if text.startswith("cam") else (False, True))
    still = recording.left > recording.steps
    assert set(recording.into[still]) == {-1}


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "kvmerger:budget=24,recent=8,merge.heavy=4,merge.theta=0.3,every=2",
        "attention_matching:base=snapkv,base.budget=24,base.window=4,queries=6",
    ],
)
def test_merges_in_loops_and_solutions_are_followed(text: str, shallow: Decoder) -> None:
    """Of a merge that some steps leave out, and of values that are fitted to all entries."""
    recording = record(shallow, PROMPT, policy=text, max_new_tokens=NEW)
    assert recording.into is not None
    targets = recording.into[recording.into != -1]
    if text.startswith("attention_matching"):
        assert (recording.into[recording.left == 0] == -2).all()
        return
    assert (recording.left[recording.into >= 0] > 0).any()
    assert (targets >= 0).all()
    for layer, head, position in np.argwhere(recording.into >= 0):
        own = recording.left[layer, head]
        assert own[recording.into[layer, head, position]] > own[position]


@pytest.mark.slow
def test_texts_and_ends(shallow: Decoder, tokenizer: PreTrainedTokenizerFast) -> None:
    free = record(shallow, "ba ce di", max_new_tokens=NEW, tokenizer=tokenizer)
    assert "".join(free.texts) == tokenizer.decode(free.tokens)
    assert free.texts[:2] == ("<s>", "ba")
    end = int(free.tokens[free.prompt + 2])
    ended = record(shallow, "ba ce di", max_new_tokens=NEW, tokenizer=tokenizer, eos=end)
    stop = free.prompt + free.tokens[free.prompt :].tolist().index(end) + 1
    assert ended.tokens.tolist() == free.tokens[:stop].tolist()
    assert record(shallow, [5, 7], max_new_tokens=1).texts[:2] == ("5 ", "7 ")


def test_several_rows_are_refused(tiny: Decoder) -> None:
    with pytest.raises(ValueError, match="the prompt has 2 rows: expected one"):
        record(tiny, [PROMPT, PROMPT])


@pytest.fixture
def recording() -> Recording:
    """A random recording of two layers with two and three heads; the texts of some tokens are markup."""
    rng = np.random.default_rng(1)
    left = rng.integers(0, 6, (2, 3, 14))
    left[..., 10:] = rng.integers(2, 6, (2, 3, 4))
    left = np.maximum(left, np.maximum(np.arange(14) - 9, 0))  # no entry leaves before it exists
    left[0, 2] = -1
    texts = ("a", " </script>", "<!--", " <b>&amp;", "\n", ' "', "é\u2028", *(f" w{i}" for i in range(8)))
    into = np.where((left < 5) & (left >= 0), rng.integers(-2, 14, left.shape), -1)
    return Recording(np.arange(15) + 100, texts, 10, "some:policy=1", left, into, "some model")


def embedded(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="recording">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_holds_the_recording_and_nothing_from_elsewhere(recording: Recording) -> None:
    html = page(recording)
    document = embedded(html)
    assert document["texts"] == list(recording.texts)
    assert document["tokens"] == recording.tokens.tolist()
    assert document["left"] == recording.left.tolist()
    assert recording.into is not None
    assert document["into"] == recording.into.tolist()
    assert (document["prompt"], document["steps"], document["policy"]) == (10, 4, "some:policy=1")
    assert document["model"] == "some model"
    assert html.count("<script") == html.count("</script>") == 2
    assert not re.search(r"https?:|src=|href=|@import|url\(", html)


def test_steps_are_those_of_the_recording(recording: Recording) -> None:
    """Its last step is 4. A page is of a recording."""
    np.testing.assert_array_equal(recording.held(-1), recording.held(4))
    for step in (5, -6, 1.0, None):
        with pytest.raises(ValueError, match=rf"step={step}: expected an integer in 0 .. 4, or in -5 .. -1"):
            recording.held(step)
    with pytest.raises(ValueError, match="recording is of type str: expected a Recording"):
        page("recording")


# Simulates a reader and collects what the page shows.
VISIT = """
<script>
const failures = [], shown = [];
window.addEventListener("error", (event) => failures.push(event.message));
const look = () => shown.push({
  kept: spans.map((span) => Number(span.dataset.kept)),
  gone: spans.map((span) => span.classList.contains("gone")),
  later: spans.map((span) => getComputedStyle(span).visibility === "hidden"),
  bars: bars.map(({ count }) => Number(count.textContent)),
  said: at("said").textContent,
});
const choose = (input, value) => {
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
};
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
look();
choose(layerInput, "1");
look();
choose(headInput, "2");
look();
press("ArrowRight");
look();
choose(layerInput, "-1");
choose(headInput, "-1");
press("End");
press("ArrowRight");
look();
spans[3].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
spans[3].click();
const open = [at("token").classList.contains("open"), pinned];
at("unpin").click();
open.push(at("token").classList.contains("open"), pinned);
spans[3].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
const token = { text: document.querySelector("#token .what").textContent, kept: at("kept").textContent,
  evicted: [...document.querySelectorAll("#token .evicted")].map((line) => line.textContent),
  kin: spans.flatMap((span, i) => (span.classList.contains("kin") ? [i] : [])),
  cells: [...at("cells").children].map((cell) => cell.classList.contains("kept")) };
press("Home");
pin(13);
token.later = at("token").textContent;
pin(14);
token.last = at("token").textContent;
pin(-1);
document.querySelector("h1").style.height = "12rem"; // as if the header had many lines
at("text").style.height = "200vh";
scrollTo(0, 300);
at("play").click();
setTimeout(() => {
  const played = [Number(stepInput.value), at("play").textContent];
  const text = at("text").textContent;
  const [about, title] = ["about", "policy"].map((id) => at(id).textContent);
  const boxes = spans.map((span) => span.textContent);
  const edge = document.querySelector("header").getBoundingClientRect().bottom;
  const covered = document.querySelector("aside").getBoundingClientRect().top - edge;
  const result = { failures, covered, open, about, title, boxes, shown, token, played, text };
  element("pre", JSON.stringify(result), document.body).id = "result";
}, 10000);
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on PATH")
def test_a_page_in_a_browser(recording: Recording, tmp_path: Path) -> None:
    """Opens the page, chooses a layer and a head, steps, points at a token, plays, and compares with the recording."""
    assert BROWSER is not None
    assert recording.into is not None
    file = tmp_path / "page.html"
    file.write_text(page(recording).replace("</body>", VISIT + "</body>"), encoding="utf-8")
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--window-size=1200,700",
        "--dump-dom",
    )
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    run = subprocess.run(
        [BROWSER, *options, profile, file.as_uri()], capture_output=True, encoding="utf-8", timeout=PATIENCE
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found is not None, run.stderr
    result = json.loads(unescape(found[1]))
    assert result["failures"] == []
    assert result["title"] == "some model, some:policy=1"
    assert result["about"] == 'a </script><!-- <b>&amp; "é w0 w1 w2 w3 w4 w5 w6 w7'
    assert result["open"] == [True, 3, False, -1]
    assert result["boxes"][1::12] == ["</script>", "w6"]
    views = [(0, [0, 1], [0, 1, 2]), (0, [1], [0, 1, 2]), (0, [1], [2]), (1, [1], [2]), (4, [0, 1], [0, 1, 2])]
    assert len(result["shown"]) == len(views)
    for seen, (step, layers, heads) in zip(result["shown"], views, strict=True):
        now, before = recording.held(step), recording.held(max(step - 1, 0))
        chosen = np.ix_(layers, heads)
        assert seen["kept"] == [*now[chosen].sum((0, 1)).tolist(), 0]
        assert seen["gone"] == [*(before & ~now)[chosen].any((0, 1)).tolist(), False]
        assert seen["later"] == [position > 10 + step for position in range(15)]
        there = recording.left[:, heads, 0] >= 0
        bars = now[:, heads].sum((1, 2)) / np.maximum(there.sum(1), 1)
        np.testing.assert_allclose(seen["bars"], bars, atol=0.051)
        mean = now[chosen].sum() / there[layers].sum()
        assert f"a chosen head holds {round(mean, 1):g} entries on average" in seen["said"]
        if step:
            gone = (before & ~now)[chosen].sum()
            assert (
                f"; this step evicted {gone} {'entry' if gone == 1 else 'entries'} of the chosen heads" in seen["said"]
            )
    left = recording.left[:, :, 3]
    assert result["token"]["text"] == " <b>&amp;"
    assert result["token"]["kept"] == f"held by {(left > 4).sum()} of 5 heads"
    assert result["token"]["cells"] == (left > 4).ravel().tolist()
    with_prompt = " when the prompt was compressed"
    said: Counter[str] = Counter()
    kin: set[int] = set()
    for layer, head in np.ndindex(2, 3):
        until, target = int(left[layer, head]), int(recording.into[layer, head, 3])
        if 0 <= until <= 4:
            when = f" in step {until}" if until else ""
            where = "several entries" if target < 0 else f"{json.dumps(recording.texts[target])} at {target}"
            merging = f"merged{when} into {where}{'' if until else with_prompt}"
            dropped = f"evicted in step {until}" if until else f"dropped{with_prompt}"
            said[dropped if target == -1 else merging] += 1
            kin |= {target} - {-1, -2}
        own = recording.left[layer, head]
        kin |= set(np.flatnonzero((recording.into[layer, head] == 3) & (own >= 0) & (own <= 4)).tolist())
    assert Counter(result["token"]["evicted"]) == Counter(f"in {n}: {text}" for text, n in said.items())
    assert result["token"]["kin"] == sorted(kin)
    assert result["played"] == [4, "play"]
    assert "This token gets its entry in step 4." in result["token"]["later"]
    assert "This token has no entry: the answer ends with it." in result["token"]["last"]
    assert 0 < result["covered"] < 50
    assert result["text"] == "".join(recording.texts)
