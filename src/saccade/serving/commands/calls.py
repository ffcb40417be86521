# SPDX-License-Identifier: Apache-2.0
"""Verbs that ask a running server about images."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.escaped import escaped_line
from saccade.files import read_lines, refuse_existing, write_atomically
from saccade.serving.client.call_options import (
    AnswerOptions,
    CallOptions,
    CaptionOptions,
    ClassifyOptions,
    EditOptions,
    EmbedOptions,
    SegmentOptions,
    ShowOptions,
)
from saccade.serving.client.client import Classification, Client
from saccade.serving.commands.command import Answer, Image, Images, Result


def classify(image: Images, options: ClassifyOptions) -> Result:
    """Classify images through a running server."""
    from saccade.serving.client.zero_shot import read_labelling

    _some(image)
    labelling = read_labelling(options.labels, options.templates)
    with _client(options) as client:
        answers = client.classify(
            image,
            budget=options.budget,
            min_score=options.min_score,
            max_latency_ms=options.max_latency_ms,
            top=options.top,
            labels=labelling.labels if labelling else (),
            templates=labelling.templates if labelling else (),
        )
    return _labelled(image, answers)


def embed(image: Images, options: EmbedOptions) -> Result:
    """Embed images, or texts, through a running server and store the vectors."""
    from saccade.serving.client.embeddings import check_embeddings_file, save_embeddings

    if options.texts is None:
        _some(image)
    elif image:
        raise SaccadeError("Images and --texts were given together. Embed them one by one.")
    check_embeddings_file(options.out, append=options.append, force=options.force)
    with _client(options) as client:
        if options.texts is None:
            names: Sequence[str] = [str(path) for path in image]
            embeddings = client.embed(image, budget=options.budget)
        else:
            names = read_lines(options.texts, "text")
            embeddings = client.embed_text(names, options.budget, truncate=options.truncate)
    save_embeddings(options.out, embeddings, names, append=options.append, force=options.force)
    count, width = embeddings.vectors.shape
    data: dict[str, Any] = {"out": str(options.out), "images": count, "dimensions": width}
    data |= {
        "variant": embeddings.variant,
        "sha256": embeddings.sha256,
        "slots_sha256": embeddings.slots_sha256,
    }
    return Answer(data, f"{options.out}: {count} x {width} from {escaped_line(embeddings.variant)}")


def segment(image: Images, options: SegmentOptions) -> Result:
    """Segment an image: the slot each pixel belongs to, as PNG files."""
    _some(image)
    files = [options.out / f"{path.stem}-slots.png" for path in image]
    if twice := sorted({file.name for file in files if files.count(file) > 1}):
        raise SaccadeError(f"two images would be written to {twice[0]}. Name them apart.")
    for file in files:
        refuse_existing(file, force=options.force)
    with _client(options) as client:
        answers = client.segment(image, options.budget, options.seed, options.slots)
    options.out.mkdir(parents=True, exist_ok=True)
    for file, one in zip(files, answers, strict=True):
        write_atomically(file, masks_png(one.owners))
    pairs = list(zip(image, files, answers, strict=True))
    data = [{"image": str(path), "masks": str(file), **one.to_dict()} for path, file, one in pairs]
    lines = [
        f"{escaped_line(file)}: {len(one.masks)} slots of {escaped_line(path)}"
        f"  ({escaped_line(one.variant)})"
        for path, file, one in pairs
    ]
    return Answer(data, "\n".join(lines))


def answer(image: Images, options: AnswerOptions) -> Result:
    """Answer a question about images."""
    _some(image)
    if not options.question.strip():
        raise SaccadeError("No question given. Ask one: --question 'what shape is left ?'")
    with _client(options) as client:
        questions = [options.question] * len(image)
        answers = client.answer(
            image, questions, options.budget, options.top, truncate=options.truncate
        )
    return _labelled(image, answers)


def caption(image: Images, options: CaptionOptions) -> Result:
    """Describe images in a sentence each."""
    _some(image)
    with _client(options) as client:
        answers = client.caption(
            image, options.budget, options.beam, options.max_length, options.end
        )
    return _of_images(image, answers, lambda one: escaped_line(one.text))


def edit(image: Image, options: EditOptions) -> Result:
    """Move, scale or remove one slot of an image; the model draws the result."""
    from saccade.serving.client.editing import change_of

    refuse_existing(options.out, force=options.force)
    change = change_of(options)
    with _client(options) as client:
        pixels = client.edit(image, change, options.budget)
    write_atomically(options.out, image_png(pixels))
    height, width = pixels.shape[:2]
    data = {"out": str(options.out), "image": str(image), "slot": options.slot}
    return Answer(data, f"{options.out}: {width} x {height} pixels, slot {options.slot}")


def show(image: Image, options: ShowOptions) -> Result:
    """Draw what the model looked at: maps, masks, or a circuit."""
    from saccade.serving.commands.show import looked_at

    refuse_existing(options.out, force=options.force)
    picture, data = looked_at(image, options)
    write_atomically(options.out, picture)
    text = f"{options.out}: {escaped_line(data['title'])}"
    return Answer({"out": str(options.out), **data}, text)


def _client(options: CallOptions) -> Client:
    return Client(options.url, options.model, timeout_s=options.timeout_s)


def _labelled(images: Sequence[Path], answers: Sequence[Classification]) -> Answer:
    def words(one: Classification) -> str:
        return ", ".join(
            f"{escaped_line(label)} {100 * share:.1f} %" for label, share in one.labels
        )

    return _of_images(images, answers, words)


def _of_images(
    images: Sequence[Path], answers: Sequence[Any], words: Callable[[Any], str]
) -> Answer:
    """Answers for every image, a line each."""
    pairs = list(zip(images, answers, strict=True))
    data = [{"image": str(path), **one.to_dict()} for path, one in pairs]
    lines = [
        f"{escaped_line(path)}: {words(one)}  ({escaped_line(one.variant)})" for path, one in pairs
    ]
    return Answer(data, "\n".join(lines))


def _some(images: tuple[Path, ...]) -> None:
    if not images:
        raise SaccadeError("No image given. Name one or more PNG, JPEG or WebP files.")


# Told apart by most eyes, dark and light in turn; more slots than colours begin anew.
COLOURS = (
    *((230, 159, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (86, 180, 233)),
    *((213, 94, 0), (240, 228, 66), (102, 51, 0), (153, 153, 153), (51, 34, 136), (34, 34, 34)),
)


def masks_png(owners: np.ndarray) -> bytes:
    """A palette PNG: a pixel's index is its slot.

    Shapes: owners uint8 [h w].
    """
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(owners, np.uint8), "P")
    count = int(owners.max()) + 1
    colours = [COLOURS[slot % len(COLOURS)] for slot in range(count)]
    image.putpalette([level for colour in colours for level in colour])
    return _saved(image)


def image_png(pixels: np.ndarray) -> bytes:
    """Pixels as a PNG file.

    Shapes: uint8 [h w c].
    """
    from PIL import Image

    return _saved(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))


def _saved(image: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")  # type: ignore[attr-defined]
    return file.getvalue()
