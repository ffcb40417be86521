# SPDX-License-Identifier: Apache-2.0
"""Griffe extension: the labels of our docstrings become a list, comments of fields their text."""

import re
from typing import Any

import griffe

LABELS = ("Shapes", "Units", "Raises", "Source")
_LABEL = re.compile(rf"^({'|'.join(LABELS)}):\s*", re.M)
_COMMENT = re.compile(r"\s#\s(?!type:|noqa)(.+)$")


class DocstringLabels(griffe.Extension):
    """`Raises: SaccadeError if ...` stands on one line here, which no docstring style knows."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.is_alias or obj.docstring is None:
            return
        obj.docstring.value = labelled(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """An option's help is the comment behind its field; a further line of it may follow."""
        if attr.docstring is None and attr.lineno is not None:
            lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
            found = [match[1] for line in lines if (match := _COMMENT.search(line))]
            if found:
                attr.docstring = griffe.Docstring(" ".join(found), parent=attr)


def labelled(text: str) -> str:
    """The docstring with each label in bold and in a paragraph of its own."""
    return _LABEL.sub(r"\n**\1**: ", text)
