# SPDX-License-Identifier: Apache-2.0
"""Griffe extension: show the labels of docstrings as a list, and comments of fields as text."""

import re
from typing import Any

import griffe

LABELS = ("Shapes", "Units", "Raises", "Source")
_LABEL = re.compile(rf"^({'|'.join(LABELS)}):\s*", re.M)
_COMMENT = re.compile(r"\s#\s(?!type:|noqa)(.+)$")


class DocstringLabels(griffe.Extension):
    """Handles labels such as `Raises: SaccadeError if ...`, which no docstring style supports."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.is_alias or obj.docstring is None:
            return
        obj.docstring.value = labelled(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Use the comment after a field, which may span lines, as the help of an option."""
        if attr.docstring is None and attr.lineno is not None:
            lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
            found = [match[1] for line in lines if (match := _COMMENT.search(line))]
            if found:
                attr.docstring = griffe.Docstring(" ".join(found), parent=attr)


def labelled(text: str) -> str:
    """Return the docstring with each label in bold, in a separate paragraph."""
    return _LABEL.sub(r"\n**\1**: ", text)
