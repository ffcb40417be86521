# SPDX-License-Identifier: Apache-2.0
"""The rules of rules.toml: patterns of English that the project does not write."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from english import Passage

LENGTH = "long-sentence"
_SENTENCE_END = re.compile(r"""(?<=[.!?:])["')]*\s+(?=["'(]*[A-Z`\d{])""")


@dataclass(frozen=True)
class Found:
    """Words that a rule does not allow, and where in the passage they start."""

    rule: str
    start: int
    words: str
    instead: str


@dataclass(frozen=True)
class Rule:
    """One entry of rules.toml; `kinds` is empty where the rule applies to every kind of passage."""

    name: str
    why: str
    instead: str
    patterns: tuple[re.Pattern[str], ...]
    unless: tuple[re.Pattern[str], ...]
    kinds: frozenset[str]
    except_files: tuple[str, ...]
    bad: tuple[str, ...]
    good: tuple[str, ...]

    def find(self, words: str) -> Iterator[Found]:
        """Yield the matches that overlap neither with an exception nor with each other."""
        found = [match for pattern in self.patterns for match in pattern.finditer(words)]
        if not found:
            return
        taken = [match.span() for unless in self.unless for match in unless.finditer(words)]
        for match in found:
            if all(match.end() <= start or end <= match.start() for start, end in taken):
                taken.append(match.span())
                yield Found(self.name, match.start(), " ".join(match[0].split()), self.instead)


class Rules:
    """Everything that rules.toml contains."""

    def __init__(self, path: Path) -> None:
        document = tomllib.loads(path.read_text())
        self.files: list[str] = document["files"]["read"]
        self.longest: int = document["files"]["longest_sentence"]
        self._words = {name: "|".join(words) for name, words in document["words"].items()}
        self.rules = [self._rule(name, entry) for name, entry in document["rules"].items()]

    def find(self, passage: Passage, name: str) -> Iterator[Found]:
        """Yield everything in a passage that the rules do not allow in this file."""
        for rule in self.rules:
            excepted = any(fnmatch(name, each) for each in rule.except_files)
            if not excepted and (not rule.kinds or passage.kind in rule.kinds):
                yield from rule.find(passage.words)
        if passage.kind == "markdown":
            yield from self._long_sentences(passage.words)

    def _long_sentences(self, words: str) -> Iterator[Found]:
        start = 0
        for end in [*(found.end() for found in _SENTENCE_END.finditer(words)), len(words)]:
            sentence = words[start:end].split()
            if len(sentence) > self.longest:
                instead = f"split it: {len(sentence)} words, expected at most {self.longest}"
                yield Found(LENGTH, start, " ".join(sentence[:8]) + " ...", instead)
            start = end

    def _rule(self, name: str, entry: dict[str, Any]) -> Rule:
        flags = re.NOFLAG if entry.get("case", False) else re.IGNORECASE

        def patterns(key: str) -> tuple[re.Pattern[str], ...]:
            return tuple(re.compile(self._expand(each), flags) for each in _list(entry, key))

        return Rule(
            name=name,
            why=entry["why"],
            instead=entry["instead"],
            patterns=patterns("pattern"),
            unless=patterns("unless"),
            kinds=frozenset(_list(entry, "kinds")),
            except_files=tuple(_list(entry, "except_files")),
            bad=tuple(_list(entry, "bad")),
            good=tuple(_list(entry, "good")),
        )

    def _expand(self, pattern: str) -> str:
        """Let a space match any white space, and <name> one of a group of words."""
        for name, words in self._words.items():
            pattern = pattern.replace(f"<{name}>", f"(?:{words})")
        return pattern.replace(" ", r"\s+")


def _list(entry: dict[str, Any], key: str) -> list[str]:
    value = entry.get(key, [])
    return [value] if isinstance(value, str) else value
