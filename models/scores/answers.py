# SPDX-License-Identifier: Apache-2.0
"""Accuracy of an answer against those of several people, as VQA's evaluation computes it."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_PERIOD = re.compile(r"\.(?!\d)")  # one in a number stays
_THOUSANDS = re.compile(r"\d,\d")
_ARTICLES = {"a", "an", "the"}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_AS_DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(_NUMBERS)}}
# Contractions that are other words, or none, without their apostrophes.
_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't
haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't
mightn't've must've mustn't needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've
shouldn't shouldn't've someone'd someone'd've someone'll
someone's something'd something'd've something'll that's there'd there'd've there're there's they'd
they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""
_OF_PEOPLE = ("somebody'd've", "somebody'll", "somebody's")
_NEEDED = 3  # people whose agreement makes an answer right
KINDS = ("yes/no", "number", "other")


def _written(word: str) -> list[str]:
    """Return a contraction with each choice of its apostrophes left out, the whole word last."""
    parts = word.split("'")
    marks = product(("", "'"), repeat=len(parts) - 1)
    return [parts[0] + "".join(map("".join, zip(mark, parts[1:], strict=True))) for mark in marks]


_CONTRACTIONS = {
    written: word for word in (*_CONTRACTED.split(), *_OF_PEOPLE) for written in _written(word)
}


@lru_cache(maxsize=2**16)
def normalized(answer: str) -> str:
    """Return an answer in the form in which answers are compared.

    Lower case; no articles; number words up to ten as digits; contractions with apostrophes.
    Punctuation beside a space is left out, and all of it in an answer with a number such as 1,000;
    other punctuation becomes a space. A period stays in front of a digit.

    Source: the VQA evaluation (Antol et al. 2015), without the one entry that removes an
            apostrophe. It leaves answers as they are if all ten are equal.
    """
    text = answer.replace("\n", " ").replace("\t", " ").strip()
    closed = bool(_THOUSANDS.search(text))
    changed = text
    for mark in _PUNCTUATION:
        beside = f"{mark} " in text or f" {mark}" in text
        changed = changed.replace(mark, "" if beside or closed else " ")
    words = _PERIOD.sub("", changed).lower().split()
    digits = (_AS_DIGITS.get(word, word) for word in words)
    return " ".join(_CONTRACTIONS.get(word, word) for word in digits if word not in _ARTICLES)


def soft_scores(answers: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of every answer that was given, in its normalized form.

    An answer is right if 3 of the others gave it, and right in part if fewer did; this is averaged
    over leaving out each person. Of ten, 1, 2, 3 and more make 0.3, 0.6, 0.9 and 1. Of two or three
    people, all others must agree. The answer of one person is right.

    Source: Antol et al. 2015 (VQA: Visual Question Answering), section 4; ten answers there.
    """
    counted = Counter(map(normalized, answers))
    people = counted.total()
    if people == 1:
        return dict.fromkeys(counted, 1.0)
    needed = min(_NEEDED, people - 1)
    return {
        answer: (
            count * min(1.0, (count - 1) / needed) + (people - count) * min(1.0, count / needed)
        )
        / people
        for answer, count in counted.items()
    }


def usual_answer(answers: Sequence[str]) -> str:
    """Return the most frequent answer in its normalized form; of several, the first one."""
    return Counter(map(normalized, answers)).most_common(1)[0][0]


def kind_of(answers: Sequence[str]) -> str:
    """Return the kind of the usual answer, one of KINDS."""
    usual = usual_answer(answers)
    if usual in ("yes", "no"):
        return KINDS[0]
    return KINDS[1] if usual.replace(".", "", 1).isdigit() else KINDS[2]
