# SPDX-License-Identifier: Apache-2.0
"""Extract the English from a file: paragraphs of Markdown, docstrings, comments and messages.

Code in a passage becomes a placeholder that reads as one word, so that rules see whole sentences.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.lexers import get_lexer_for_filename
from pygments.token import Comment, Literal, Name, String, Text, _TokenType
from pygments.util import ClassNotFound

CODE = "`code`"
VALUE = "{}"
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_ADMONITION = re.compile(r'^[!?]{3}\+? \w+(?: "(.*)")?$')
_INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_HASH = re.compile(r"(?:^|\s)#(?!!)\s?:?(.*)$")
_DECORATION = re.compile(r"^\s*(?:#+|//+|/?\*+)\s?|\*/\s*$")
_STRINGS = (String, Literal.Scalar, Name.Constant, Name.Variable)
_NOT_COMMENTS = (Comment.Preproc, Comment.PreprocFile, Comment.Hashbang)
_LICENSE = "SPDX-License-Identifier"
# The marker of an exception: its reason is not checked.
_MARKER = re.compile(r"prose: allow [a-z-]+ \(.+?\)")
# Strings with fewer than three words are keys, names and parts of paths.
_SENTENCE = re.compile(r"[A-Za-z]{2,}[,:;]? [\w{}`'-]+[,:;]? [\w{}`'(-]+")
_NOT_ENGLISH = re.compile(r"[<>]\w+[^<>]*>|\\[dws]|SELECT |^\s*(?:def|import|from|class) \w+")


@dataclass(frozen=True)
class Passage:
    """A paragraph, docstring, block of comments or string, and the lines that it is on."""

    kind: str  # markdown, docstring, comment or message
    line: int
    words: str
    last_line: int = 0  # of a message, which code may put together from several lines

    def line_of(self, start: int, lines: list[str]) -> int:
        """Return the line of the file with the words at this offset."""
        if self.kind != "message":
            return self.line + self.words.count("\n", 0, start)
        found = re.findall(r"[\w'-]+", self.words[start:])[:2]
        for words in (" ".join(found), *found[:1]):
            for number in range(self.line, self.last_line + 1):
                if words in lines[number - 1]:
                    return number
        return self.line


def passages_of(path: Path) -> list[Passage]:
    """Return the passages of a file; none for a file of an unknown kind."""
    readers = {".md": _markdown, ".py": _python, ".ipynb": _notebook}
    if path.suffix in readers:
        return list(readers[path.suffix](path.read_text()))
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        return []
    tokens = lexer.get_tokens(path.read_text())
    if {"html", "text"} & set(lexer.aliases):
        tokens = [(String if kind is Text else kind, value) for kind, value in tokens]
    return list(_tokens(tokens))


def _markdown(source: str) -> Iterator[Passage]:
    for token in _MARKDOWN.parse("\n".join(_without_admonitions(source.split("\n")))):
        if token.type == "inline" and token.map and token.children:
            words = "".join(_inline(child) for child in token.children)
            yield Passage("markdown", token.map[0] + 1, words)


def _without_admonitions(lines: list[str]) -> Iterator[str]:
    """Turn admonitions (`!!! note`) into paragraphs: their indented lines are code in Markdown."""
    inside = False
    for line in lines:
        if found := _ADMONITION.match(line):
            inside = True
            yield found[1] or ""
        else:
            inside = inside and (not line or line.startswith("    "))
            yield line.removeprefix("    ") if inside else line


def _inline(token: Token) -> str:
    if token.type in ("softbreak", "hardbreak"):
        return "\n"
    if token.type == "code_inline":
        return CODE
    return token.content if token.type in ("text", "image") else ""


def _notebook(source: str) -> Iterator[Passage]:
    for cell in json.loads(source)["cells"]:
        if cell["cell_type"] == "markdown":
            content = "".join(cell["source"])
            first = json.dumps(content.partition("\n")[0], ensure_ascii=False)[1:-1]
            above = source[: max(source.find(first), 0)].count("\n")
            for passage in _markdown(content):
                yield Passage("markdown", above + passage.line, passage.words)


def _python(source: str) -> Iterator[Passage]:
    documents: set[int] = set()
    parts: set[int] = set()  # of f-strings, whose words are read with the whole
    columns: dict[int, list[tuple[int, int]]] = {}  # of strings, by line
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            documents.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            parts.update(id(value) for value in node.values)
        elif not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        last = node.end_lineno or node.lineno
        for line in range(node.lineno, last + 1):
            begin = node.col_offset if line == node.lineno else 0
            end = node.end_col_offset or 0 if line == last else 1 << 30
            columns.setdefault(line, []).append((begin, end))
        if id(node) in parts:
            continue
        words = _string(node)
        if id(node) in documents:
            yield from _docstring(node.lineno, words)
        elif _SENTENCE.search(words) and not _NOT_ENGLISH.search(words):
            yield Passage("message", node.lineno, _without_code(words), last)
    yield from _comments(source, columns)


def _string(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(value) for value in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else VALUE


def _docstring(line: int, words: str) -> Iterator[Passage]:
    for paragraph in re.split(r"(\n\s*\n)", words):
        lines = paragraph.split("\n")
        if paragraph.strip() and not any(each.lstrip().startswith(">>>") for each in lines):
            yield Passage("docstring", line, _without_code(paragraph))
        line += paragraph.count("\n")


def _comments(source: str, columns: dict[int, list[tuple[int, int]]]) -> Iterator[Passage]:
    """Yield comments: a `#` that is in no string. Much faster than Python's own tokenizer."""
    blocks: list[tuple[int, str]] = []
    for number, line in enumerate(source.split("\n"), 1):
        match = _HASH.search(line) if "#" in line else None
        strings = columns.get(number, ())
        while match and any(begin <= match.start() < end for begin, end in strings):
            match = _HASH.search(line, match.start() + 1)
        if match and line[: match.start()].strip():
            yield Passage("comment", number, _without_code(match[1]))
        elif match:
            blocks.append((number, match[1]))
    yield from _joined(blocks)


def _tokens(tokens: Iterable[tuple[_TokenType, str]]) -> Iterator[Passage]:
    """Yield comments and strings of configuration files, scripts, C++ and web pages."""
    line = 1
    comments: list[tuple[int, str]] = []
    string: list[str] = []  # YAML's lexer makes a token of each word of a string
    for kind, value in [*tokens, (Comment, "")]:
        if kind in Text.Whitespace or any(kind in each for each in _STRINGS):
            string.append(value)
        else:
            words = "".join(string)
            if _SENTENCE.search(words):
                start = line - words.lstrip().count("\n")
                yield Passage("message", start, _without_code(words.strip("\"' \n")), line)
            string = []
        if kind in Comment and not any(kind in each for each in _NOT_COMMENTS):
            for number, words in enumerate(value.rstrip("\n").split("\n"), line):
                comments.append((number, _DECORATION.sub("", words)))
        line += value.count("\n")
    yield from _joined(comments)


def _joined(comments: list[tuple[int, str]]) -> Iterator[Passage]:
    """Join comments on lines that follow each other."""
    block: list[tuple[int, str]] = []
    for number, words in [*comments, (-1, "")]:
        if block and number != block[-1][0] + 1:
            yield Passage("comment", block[0][0], _without_code("\n".join(w for _, w in block)))
            block = []
        if _LICENSE not in words:
            block.append((number, words))


def _without_code(words: str) -> str:
    """Put the placeholder in place of code, and keep the number of lines."""
    words = _MARKER.sub("", words)
    return _INLINE_CODE.sub(lambda found: CODE + "\n" * found[0].count("\n"), words)
