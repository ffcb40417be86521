# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that call a running server."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CallOptions:
    """Options for sending an image to a running server."""

    model: str  # name of the router in the repository
    # the largest variant with at most this budget, or a budget: fast, t2
    budget: float | str | None = None
    url: str = "127.0.0.1:8001"  # the server's gRPC address
    timeout_s: float = 10.0  # deadline of one request


@dataclass(frozen=True)
class ClassifyOptions(CallOptions):
    """Constraints on the answer: at most one way to choose the variant."""

    min_score: float | None = None  # the fastest variant surely at least this good
    max_latency_ms: float | None = None  # the best variant with a measured p95 within this
    policy: str | None = None  # the chain of variants of that name, as `saccade calibrate` wrote it
    max_risk: float | None = None  # the cheapest policy certified for at most this; 0: full model
    strict: bool = False  # with a policy: refuse an answer that is not certified
    top: int = 3  # labels an image
    labels: Path | None = None  # zero-shot: a text file with a label a line
    templates: Path | None = None  # with --labels: a prompt a line, with {} for the label


@dataclass(frozen=True)
class EmbedOptions(CallOptions):
    """Options of embed: where the embeddings go."""

    out: Path = Path("embeddings.npz")  # vectors, names, variant and its hash
    texts: Path | None = None  # in place of images: a text file with a text a line
    truncate: bool = False  # cut texts that are longer than the model reads
    append: bool = False  # add to an existing file of the same variant
    force: bool = False  # replace what stands at --out


@dataclass(frozen=True)
class SegmentOptions(CallOptions):
    """Options of segment: where the slots of an image begin, and where the masks go."""

    out: Path = Path("masks")  # folder for <image>-slots.png: the image beside its slots
    raw: bool = False  # write the slots alone, one pixel per mask pixel, its index the slot
    seed: int = 0  # draws where the slots begin
    slots: int | None = None  # how many; default: as in training
    force: bool = False  # replace files in --out


@dataclass(frozen=True)
class AnswerOptions(CallOptions):
    """Options of answer: the question that is asked of each image."""

    question: str = ""  # the same for all images
    truncate: bool = False  # cut a question that is longer than the model reads
    policy: str | None = None  # the chain of variants of that name, as `saccade calibrate` wrote it
    max_risk: float | None = None  # the cheapest policy certified for at most this; 0: full model
    # refuse a question with words that the model does not know, and with a policy an answer that is
    # not certified
    strict: bool = False
    top: int = 3  # answers per image


@dataclass(frozen=True)
class CaptionOptions(CallOptions):
    """Options of the search for a sentence; default: as the model was trained."""

    beam: int | None = None  # sentences kept at a time; 1: the likeliest word at each step
    max_length: int | None = None  # words at most
    end: str | None = None  # the word that ends a sentence


@dataclass(frozen=True)
class EditOptions(CallOptions):
    """Options of edit: the change to one slot of the image."""

    slot: int = 0  # which one, as `saccade segment` numbers them
    move: tuple[float, ...] = (0.0, 0.0)  # down and right, in halves of the picture
    scale: float = 1.0  # multiplies its size
    remove: bool = False  # leave the slot out
    seed: int = 0  # draws where the slots begin
    slots: int | None = None  # how many; default: as in training
    out: Path = Path("edited.png")  # the image beside what the model draws
    raw: bool = False  # write what the model draws alone, in its own size
    force: bool = False  # replace what stands at --out


@dataclass(frozen=True)
class ShowOptions(CallOptions):
    """Options of show: the content of the picture beside the image."""

    out: Path = Path("looked.png")  # the picture
    question: str = ""  # of a model that answers questions
    against: str | None = None  # another router of the same family, to compare its maps
    seed: int = 0  # draws where the slots begin
    force: bool = False  # replace what stands at --out
