# SPDX-License-Identifier: Apache-2.0
"""Verbs that send images to a running server."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from saccade.core.errors import SaccadeError
from saccade.core.escaping import escaped_line
from saccade.core.files import read_lines, refuse_existing, write_atomically
from saccade.core.options import flag
from saccade.core.verbosity import say
from saccade.models.attention_maps import Drawing, MapRow, ShowRequest
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.serving.bench.replay.options import ReplayOptions
from saccade.serving.client import operations
from saccade.serving.client.answers import Segmentation
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
from saccade.serving.client.client import Change, Classification, Client
from saccade.serving.client.texts import unknown_words
from saccade.serving.commands.command import Answer, Image, Images, Result
from saccade.serving.commands.image_files import (
    ImageAnswers,
    image_answers,
    image_files,
    named,
    watching,
)
from saccade.serving.commands.pictures import (
    edited_picture,
    image_png,
    maps_png,
    masks_png,
    read_pixels,
    slots_picture,
)

# Opens a connection to a model: `Client` to a server, or `LoadedArtefact` to one in this process,
# which has the same methods.
Connect = Callable[[], AbstractContextManager[Any]]


def classify(image: Images, options: ClassifyOptions) -> Result:
    """Classify images through a running server.

    Examples:
        # get three labels per image
        saccade classify cat.png dog.png --model digits-sum
        # use at most a quarter of the budget
        saccade classify cat.png --model digits-sum --budget 0.25
    """
    return classification(image, options, partial(_client, options))


def classification(image: Sequence[Path], options: ClassifyOptions, connect: Connect) -> Answer:
    """Classify images over a connection to a model."""
    from saccade.serving.client.texts import read_labelling

    files = image_files(image)
    labelling = read_labelling(options.labels, options.templates)
    given: dict[str, Any] = vars(labelling) if labelling else {"labels": (), "templates": ()}
    with connect() as client:
        ask = partial(_with_options(operations.classify, options), **given)
        return _labelled(image_answers(files, ask, client))


def embed(image: Images, options: EmbedOptions) -> Result:
    """Embed images or texts through a running server and store the vectors.

    Examples:
        # embed two images
        saccade embed cat.png dog.png --model sparo --out build/images.npz
        # embed the lines of a text file
        saccade embed --texts captions.txt --model sparo --out build/texts.npz
    """
    return embedding(image, options, partial(_client, options))


def embedding(image: Sequence[Path], options: EmbedOptions, connect: Connect) -> Answer:
    """Embed images or texts over a connection to a model, and store the vectors."""
    from saccade.serving.client.embeddings import check_embeddings_file, save_embeddings

    if options.texts is None:
        files = image_files(image)
    elif image:
        raise SaccadeError(
            "Found both images and --texts, expected one of them. Embed them in two commands."
        )
    of_images = ("policy", "max_risk", "max_latency_ms", "strict", "space")
    odd = [flag(name) for name in of_images if getattr(options, name) not in (None, False)]
    if options.texts and odd:
        raise SaccadeError(
            f"Found {odd[0]} with --texts, expected images: the maps between spaces are fitted on "
            "images. Embed texts with --budget."
        )
    check_embeddings_file(options.out, append=options.append, force=options.force)
    with connect() as client:
        if options.texts is None:
            done = image_answers(files, _with_options(operations.embed, options), client)
            names: Sequence[str] = [str(path) for path in done.paths]
            embeddings = done.answers
        else:
            done = None
            names = read_lines(options.texts, "text")
            steps = operations.embed_text(names, options.budget, truncate=options.truncate)
            with watching("texts", len(names)) as watch:
                embeddings = client.run(steps, watch)
    save_embeddings(options.out, embeddings, names, append=options.append, force=options.force)
    count, width = embeddings.vectors.shape
    data: dict[str, Any] = {"out": str(options.out), "images": count, "dimensions": width}
    data |= {
        "variant": embeddings.variant,
        "sha256": embeddings.sha256,
        "slots_sha256": embeddings.slots_sha256,
        "refused": done.refusals() if done else [],
    }
    text = f"{options.out}: {count} x {width} from {escaped_line(embeddings.variant)}"
    if embeddings.by:
        counts = Counter(name for name, _ in embeddings.by)
        data |= {"by": dict(counts), "certified": embeddings.certified}
        listed = ", ".join(f"{escaped_line(name)}: {n}" for name, n in counts.items())
        text += f", in its space ({listed}{'' if embeddings.certified else '; not all certified'})"
    return Answer(data, text, done.exit_code if done else 0)


def segment(image: Images, options: SegmentOptions) -> Result:
    """Segment images: draw the slot of each pixel next to the image, as PNG files.

    Examples:
        # draw which slot each pixel belongs to
        saccade segment scene.png --model slots --out build/masks
        # use eight slots and two rounds of attention
        saccade segment scene.png --model slots --slots 8 --budget t2 --out masks
    """
    return segmentation(image, options, partial(_client, options))


def segmentation(image: Sequence[Path], options: SegmentOptions, connect: Connect) -> Answer:
    """Segment images over a connection to a model, and draw the slots."""
    images = image_files(image)
    places = {path: options.out / f"{path.stem}-slots.png" for path in images}
    names = [places[path].name for path in images]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SaccadeError(f"Two images would be written to {twice[0]}. Rename one of them.")
    if options.out.exists() and not options.out.is_dir():
        raise SaccadeError(f"{options.out}: found a file, expected a folder. Pass another --out.")
    for place in places.values():
        refuse_existing(place, force=options.force)
    with connect() as client:
        done = image_answers(images, _with_options(operations.segment, options), client)
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = list(zip(done.paths, done.answers, strict=True))
    for path, one in pairs:
        raw = options.raw
        png = masks_png(one.owners) if raw else slots_picture(read_pixels(path), one.owners)
        write_atomically(places[path], png)
    data = [
        {"image": str(path), "masks": str(places[path]), **one.to_dict()} for path, one in pairs
    ]
    lines = [
        f"{escaped_line(places[path])}: {len(one.masks)} slots of {escaped_line(path)}"
        f"  ({escaped_line(_answered_by(one))})"
        for path, one in pairs
    ]
    return Answer([*data, *done.refusals()], "\n".join(lines), done.exit_code)


def answer(image: Images, options: AnswerOptions) -> Result:
    """Answer a question about images.

    Examples:
        # ask a question about an image
        saccade answer scene.png --model vqa --question 'what shape is left ?'
        # get only the best answer
        saccade answer scene.png --model vqa --question 'is there a circle ?' --top 1
    """
    return answers_to(image, options, partial(_client, options))


def answers_to(image: Sequence[Path], options: AnswerOptions, connect: Connect) -> Answer:
    """Answer a question about images over a connection to a model."""
    files = image_files(image)
    if not options.question.strip():
        raise SaccadeError("No question given. Pass one: --question 'what shape is left ?'")
    question, ask = options.question, _with_options(operations.answer, options)
    with connect() as client:
        done = image_answers(
            files, lambda batch: ask(batch, questions=[question] * len(batch)), client
        )
        view = client.view()
        unknown = unknown_words(question, view.runtime_metadata(view.variants[0]))
    if unknown:
        words = ", ".join(map(repr, unknown))
        treated = "it as an unknown word" if len(unknown) == 1 else "them as unknown words"
        say(
            f"The model does not know {words} and treated {treated}. Pass --strict to refuse such "
            "questions."
        )
    return _labelled(done, unknown_words=list(unknown))


def caption(image: Images, options: CaptionOptions) -> Result:
    """Describe each image in a sentence.

    Examples:
        # describe an image in a sentence
        saccade caption scene.png --model captioner
        # search with five sentences at a time, of at most 12 words
        saccade caption scene.png --model captioner --beam 5 --max-length 12
    """
    return captions(image, options, partial(_client, options))


def captions(image: Sequence[Path], options: CaptionOptions, connect: Connect) -> Answer:
    """Describe images over a connection to a model."""
    files = image_files(image)
    with connect() as client:
        done = image_answers(files, _with_options(operations.caption, options), client)
    return _of_images(done, lambda one: escaped_line(one.text))


def edit(image: Image, options: EditOptions) -> Result:
    """Move, scale or remove one slot of an image, and let the model draw the result.

    Examples:
        # move the content of slot 1 to the right
        saccade edit scene.png --model slots --slot 1 --move 0.3,0 --out moved.png
        # remove slot 1
        saccade edit scene.png --model slots --slot 1 --remove --out removed.png
    """
    refuse_existing(options.out, force=options.force)
    down, right = options.move
    if not (down or right or options.remove) and options.scale == 1:
        raise SaccadeError(
            "Found no change, expected --move DOWN,RIGHT, --scale FACTOR or --remove. "
            f"To move slot {options.slot} down: --move 0.3,0"
        )
    change = Change(**{field.name: getattr(options, field.name) for field in fields(Change)})
    with _client(options) as client, named(image):
        edited = client.edit(image, change, options.budget)
    png = image_png(edited) if options.raw else edited_picture(read_pixels(image), edited)
    write_atomically(options.out, png)
    height, width = edited.shape[:2]
    data = {"out": str(options.out), "image": str(image), "slot": options.slot}
    beside = "" if options.raw else ", drawn next to the image"
    text = f"{options.out}: slot {options.slot} changed, {width} x {height} pixels{beside}"
    return Answer(data, text)


def replay(
    options: ReplayOptions,
    log: Annotated[
        Positional[Path | None],
        arg(help="CSV or JSON lines: time, and optionally size, budget and caller"),
    ] = None,
) -> Result:
    """Send the requests of an arrival log to a running server, and tell which are in time.

    Requests are sent when they are due, however earlier ones end, and their times count from then.
    Without a log, arrivals are generated: random ones, bursts, or a step.

    Examples:
        # replay an hour at twice its speed
        saccade replay requests.csv --model digits --deadline-ms 100 --speed 2
        # bursts at 0.7 of the capacity
        saccade replay --model digits --arrivals gamma:0.7x,4 --deadline-ms 100
    """
    from saccade.serving.bench.replay.replay import replay

    return replay(log, options, image_files((options.images,)) if options.images else ())


def show(image: Image, options: ShowOptions) -> Result:
    """Draw what the model looked at: maps, masks, or a circuit.

    Examples:
        # draw where a model looked
        saccade show cat.png --model sot --out build/shown.png
        # compare two models side by side
        saccade show cat.png --model sot --against other --out build/both.png
    """
    refuse_existing(options.out, force=options.force)
    pixels = read_pixels(image)
    with _client(options) as client, named(image):
        view = client.view()
        first = drawing_of(ShowRequest(client, view, image, pixels, options))
    data: dict[str, Any] = {"title": first.title, **first.figures}
    if isinstance(first, Drawing):
        picture = first.png
    else:
        rows = [first]
        if options.against:
            with Client(options.url, options.against, options.timeout_s) as other:
                view.check_family(other.view())
                second = drawing_of(ShowRequest(other, other.view(), image, pixels, options))
            assert isinstance(second, MapRow), "models of one family are drawn in the same way"
            rows.append(second)
            data["against"] = {"title": second.title, **second.figures}
        picture = maps_png(rows, pixels)
    write_atomically(options.out, picture)
    text = f"{options.out}: {escaped_line(data['title'])}"
    return Answer({"out": str(options.out), **data}, text)


def drawing_of(request: ShowRequest) -> MapRow | Drawing:
    """Return what the model looked at, as its family draws it.

    Raises: SaccadeError if the family has nothing to show.
    """
    family = request.view.family
    picture = entry_of(family).picture
    if picture is None:
        raise SaccadeError(
            f"{request.view.model} is a model of family '{family}', for which there is nothing to "
            "show. Choose another model."
        )
    drawing: MapRow | Drawing = imported(picture)(request)
    return drawing


def _with_options(operation: Callable[..., Any], options: CallOptions) -> Callable[..., Any]:
    """Return the operation with the options that have names of its parameters."""
    given = vars(options)
    names = inspect.signature(operation).parameters.keys() & given.keys()
    return partial(operation, **{name: given[name] for name in names})


def _client(options: CallOptions) -> Client:
    return Client(options.url, options.model, timeout_s=options.timeout_s)


def _labelled(done: ImageAnswers[list[Classification]], **more: Any) -> Answer:
    def words(one: Classification) -> str:
        return ", ".join(
            f"{escaped_line(label)} {100 * share:.1f} %" for label, share in one.labels
        )

    return _of_images(done, words, by=_answered_by, **more)


def _answered_by(one: Classification | Segmentation) -> str:
    """Return the variant of an answer, and how it was chosen if not by the request alone."""
    step = "" if one.steps is None else f", step {one.steps}"
    certified = ", not certified" if one.certified is False else ""
    degraded = isinstance(one, Classification) and one.degraded
    return one.variant + step + certified + (", degraded" if degraded else "")


def _of_images(
    done: ImageAnswers[list[Any]],
    words: Callable[[Any], str],
    by: Callable[[Any], str] = attrgetter("variant"),
    **more: Any,
) -> Answer:
    """Return the answers, one line per image; in JSON each also contains `more`."""
    pairs = list(zip(done.paths, done.answers, strict=True))
    data = [{"image": str(path), **one.to_dict(), **more} for path, one in pairs]
    lines = [
        f"{escaped_line(path)}: {words(one)}  ({escaped_line(by(one))})" for path, one in pairs
    ]
    return Answer([*data, *done.refusals()], "\n".join(lines), done.exit_code)
