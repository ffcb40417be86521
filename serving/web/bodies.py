# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: their fields, and texts and images in the forms that clients send."""

import binascii
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Pattern, WrongValue, field_kinds, typed
from saccade.serving.client.call_options import Top

MOST_INPUTS = 2048  # of one request, as at OpenAI: vector stores send as many
_CALLER = Pattern(r"[^/\x00-\x1f]{0,64}", "at most 64 characters without a slash")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S*", re.IGNORECASE)
_DATA = re.compile(r"data:[^\s,]*[;/][^\s,]*,", re.IGNORECASE)
_TEXT_KEYS, _IMAGE_KEYS = ("text", "input_text"), ("image", "image_url", "input_image")
_FORMS = (
    'a text, an image as "data:image/jpeg;base64,...", {"image": "<base64>"} or {"type": '
    '"image_url", "image_url": {"url": "data:..."}}'
)
_T = TypeVar("_T")


class WebRefusal(SaccadeError):
    """A request that gets this HTTP status; `code` and `param` are fields of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, kw_only=True)
class EmbeddingsBody:
    """A request for embeddings; `truncate` cuts long texts, and is not one of OpenAI's fields."""

    model: str
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    user: Annotated[str, _CALLER] = ""
    truncate: bool = False


@dataclass(frozen=True, kw_only=True)
class ClassifyBody:
    """A request for classes: those of the model, or `labels` for a model of images and texts."""

    model: str
    input: Any
    labels: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    top: Top = 3
    user: Annotated[str, _CALLER] = ""


def read_body(kind: type[_T], content: Any) -> _T:
    """Return the fields of a body; null is as good as no value.

    Raises: WebRefusal that names the first field that is wrong.
    """
    if not isinstance(content, dict):
        raise WebRefusal(f"The body is {content!r:.40}, expected an object with model and input.")
    kinds, fields = field_kinds(kind), {}  # type: ignore[arg-type]
    for name in dict.fromkeys(("model", "input", *content)):
        try:
            check_one_of("A field", name, kinds)
            if content.get(name) is not None:
                fields[name] = typed(kinds[name], content[name], f"{name}: ")
            elif name in ("model", "input"):
                raise WebRefusal(f"The body has no {name}. Add it.", param=name)
        except WebRefusal:
            raise
        except SaccadeError as error:
            text = error.finding if isinstance(error, WrongValue) else str(error)
            raise WebRefusal(text, param=name[:60]) from error
    return kind(**fields)


def read_inputs(value: Any) -> list[str | bytes]:
    """Return texts as strings and images as the bytes of their files.

    Raises: WebRefusal that names the first input that is neither.
    """
    if not isinstance(value, list):
        return [_read_input(value, "input")]
    if not 0 < len(value) <= MOST_INPUTS:
        found = f"found a list of {len(value)}, expected 1 to {MOST_INPUTS} texts and images"
        raise WebRefusal(f"input: {found}. Send several requests.", param="input")
    return [_read_input(item, f"input[{index}]") for index, item in enumerate(value)]


def _read_input(item: Any, where: str) -> str | bytes:
    if isinstance(item, dict):
        parts = {key: part for key, part in item.items() if key != "type"}
        name, part = next(iter(parts.items()), ("", None))
        part = part.get("url") if isinstance(part, dict) else part
        if len(parts) == 1 and isinstance(part, str) and name in (*_TEXT_KEYS, *_IMAGE_KEYS):
            return part if name in _TEXT_KEYS else _read_image(part, where)
    elif isinstance(item, str):
        is_image = _DATA.match(item) or _ADDRESS.fullmatch(item)
        return _read_image(item, where) if is_image else item
    advice = ""
    if isinstance(item, int) or (isinstance(item, list) and all(type(n) is int for n in item)):
        advice = (
            " These are tokens, but the model has its own tokenizer: send the text itself "
            "(LangChain: check_embedding_ctx_length=False)."
        )
    raise WebRefusal(f"{where}: found {item!r:.60}, expected {_FORMS}.{advice}", param=where)


def _read_image(text: str, where: str) -> bytes:
    """Return the bytes of an image from a data URL, or from base64 alone."""
    head, comma, data = text.partition(",")
    if _ADDRESS.match(text):
        wrong = (
            'no address is ever fetched. Send the image itself as "data:image/jpeg;base64,...". '
            'To embed the address itself, send {"text": "..."}'
        )
    elif comma and not (head[:5].lower() == "data:" and head[-7:].lower() == ";base64"):
        wrong = "expected data:image/jpeg;base64,..."
    else:
        try:
            if image := binascii.a2b_base64(data if comma else text, strict_mode=True):
                return image
            wrong = "the image has 0 bytes"
        except ValueError as error:
            wrong = f"its base64 is broken ({error}). Encode the file again, without line breaks"
    raise WebRefusal(f"{where}: found {text!r:.60}, {wrong}.", param=where)
