"""The vocabulary of the demo model, 512 plain words grouped by their role in a text, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, STOP = "<pad>", "<unk>", "."

# A chat is a text: the messages in order, and a full stop after each answer, which ends without it.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '' if loop.first else ' ' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + eos_token }}{% endif %}{% endfor %}"
)


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FUNCTION = _split("<pad> <unk> . : the code codes of is are and equals means says one vote most votes for recall what")

NAMES = _split("""
    adam alan alice amir anna arno beth boris bruno carl cecil celia chloe clara cora dana daniel david diana dora edgar
    edith elena elias ella emil emma erik esther ethan eva felix fiona frank frida gina glen grace greta hana harry
    hazel hector helen henry hugo ida igor irene iris isaac ivan jack jacob jane jason joan john jonas judith julia
    karen karl kate kevin klara lara laura leo lena liam lily linda louis lucas lucy maria mark martha martin mary max
    megan mia mila mona nadia nina noah nora oliver olga omar oscar otto paula peter petra quinn ralph rita robert
    rosa ruth sam sara simon sofia stella thomas victor wendy
    """)

THINGS = _split("""
    anchor arrow basket battery beacon bell bench blanket bottle bowl box bracelet brick bridge broom bucket button
    cabinet camera candle canvas card carpet castle chain chair chalk chimney circle clock cloud coin compass copper
    cork cradle crayon crown crystal curtain cushion desk diamond door drawer drum engine envelope fan feather fence
    flag flute fountain frame fridge gate glass globe glue gold guitar handle harbor harp helmet hinge hook iron ivory
    jar jewel jug kettle key kite ladder lamp lantern leaf lens letter lever lock magnet map marble mask mast matchbox
    medal mirror mug napkin necklace needle net oar organ paddle painting paper parcel pearl pebble pencil piano
    picture pillow pipe planet plate pocket poster purse puzzle radio ribbon ring rocket rope ruby sail shelf
    silver spoon statue sword
    """)

CLASSES: dict[str, tuple[str, ...]] = {
    "animals": _split("tiger lion wolf bear horse zebra camel goat sheep rabbit otter eagle raven salmon shark whale"),
    "foods": _split(
        "bread cheese butter honey rice pasta soup apple lemon cherry melon onion carrot potato pepper cake"
    ),
    "tools": _split(
        "hammer saw drill wrench pliers shovel rake axe chisel file sickle spade clamp level trowel crowbar"
    ),
    "clothes": _split("shirt jacket coat scarf glove boot shoe sock skirt dress belt hat sweater vest apron cape"),
}

LABELS = _split("red blue green yellow black white purple orange")

ADJECTIVES = _split("""
    old young quiet loud bright dark warm cold tall short narrow wide gentle proud busy lazy clever happy lonely early
    late calm wild soft rough heavy light brave simple strange famous distant empty hidden modern ancient
    golden secret patient honest merry solemn curious tired polite humble graceful
    """)

NOUNS = _split("""
    farmer sailor teacher doctor painter singer baker driver pilot writer dancer student soldier judge nurse tailor
    river garden forest village mountain valley island city street market school church tower station museum library
    winter summer morning evening storm wind rain snow sun moon sea lake road field meadow hill
    crowd neighbor stranger traveler child mother father brother sister friend
    fisherman gardener hunter captain king queen prince knight monk poet clerk cook miller
    desert ocean canyon harvest shadow echo orchard cottage palace temple tavern cellar attic
    """)

VERBS = _split("""
    watches follows finds leaves remembers crosses visits admires paints describes reaches greets helps carries
    forgets passes loves fears guards studies surrounds welcomes warms wakes shelters hears sees meets calls teaches
    awaits changes hides moves seeks leads
    covers trusts invites avoids ignores amuses escorts rescues rewards questions troubles surprises
    """)

WORDS: tuple[str, ...] = (
    FUNCTION + NAMES + THINGS + sum(CLASSES.values(), ()) + LABELS + ADJECTIVES + NOUNS + VERBS
)  # fmt: skip
IDS: dict[str, int] = {word: i for i, word in enumerate(WORDS)}


def encode(text: str) -> Int[np.ndarray, "N"]:
    """The int32 ids of the whitespace-separated words of a text. Raises ValueError if a word is unknown."""
    words = text.split()
    if unknown := sorted({word for word in words if word not in IDS}):
        raise ValueError(f"{', '.join(unknown)}: expected words of the demo vocabulary of {len(WORDS)} words")
    return np.array([IDS[word] for word in words], np.int32)


def decode(ids: Iterable[int]) -> str:
    """The words of `ids`, separated by spaces."""
    return " ".join(WORDS[i] for i in ids)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over WORDS with the ids of `encode`.

    Unknown words become `<unk>`. The full stop is the end token. Decoding with `skip_special_tokens=True` drops the
    special tokens, including the full stop.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import, and only this function needs it

    words = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=STOP,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
