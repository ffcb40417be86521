# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that call a running server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from saccade.core.options import Options
from saccade.core.schema import Positive, Range

Top = Annotated[int, Range(1, 100_000)]


@dataclass(frozen=True)
class CallOptions(Options):
    """Options for sending images to a running server."""

    model: str  # name of the router in the repository
    # use the largest variant within this budget: a number, or a name such as fast or t2
    budget: float | str | None = None
    url: str = "127.0.0.1:8001"  # the server's gRPC address
    # deadline of each request, in seconds; default: from the pace of the requests before
    timeout_s: Positive | None = None


@dataclass(frozen=True)
class PolicyOptions(CallOptions):
    """Options for images of which easy ones may stop early."""

    policy: str | None = None  # follow the policy of this name, written by `saccade calibrate`
    max_risk: float | None = None  # follow the cheapest policy certified for it; 0: full model
    strict: bool = False  # with a policy: refuse if an answer would not be certified


@dataclass(frozen=True)
class ClassifyOptions(PolicyOptions):
    """Options of classify: at most one of those that choose the variant, or the policy."""

    min_score: float | None = None  # fastest variant whose lower 95 % bound is at least this
    # use the best variant with a measured p95 of at most this; with a policy or from a repository
    # with --slo-ms: answer within this time, with less compute under load
    max_latency_ms: float | None = None
    top: Top = 3  # labels per image
    labels: Path | None = None  # zero-shot: a text file with one label per line
    templates: Path | None = None  # with --labels: one prompt per line, with {} for the label


@dataclass(frozen=True)
class EmbedOptions(PolicyOptions):
    """Options of embed: where to write the embeddings."""

    # with a policy or from a repository with --slo-ms: embed within this time
    max_latency_ms: float | None = None
    # map embeddings into the space of the variant with this budget or name, whose index to search
    space: str | None = None
    out: Path = Path("embeddings.npz")  # file for vectors, names, the variant and its hash
    texts: Path | None = None  # instead of images: a file with one caption or sentence per line
    truncate: bool = False  # cut texts that are longer than the model reads
    append: bool = False  # add to an existing file of the same space
    force: bool = False  # replace an existing file at --out


@dataclass(frozen=True)
class SegmentOptions(PolicyOptions):
    """Options of segment: where the slots of an image start, and where to write the masks."""

    out: Path = Path("masks")  # folder for <image>-slots.png: each image next to its slots
    raw: bool = False  # write only the slots: a PNG in which each pixel's index is its slot
    seed: int = 0  # seed for the positions where the slots start
    slots: int | None = None  # number of slots; default: as in training
    force: bool = False  # replace existing files in --out


@dataclass(frozen=True)
class AnswerOptions(PolicyOptions):
    """Options of answer: the question about each image."""

    question: str = ""  # the question, the same for all images
    truncate: bool = False  # cut a question that is longer than the model reads
    # refuse a question that contains words the model does not know; with a policy, also refuse if
    # an answer would not be certified
    strict: bool = False
    top: Top = 3  # answers per image


@dataclass(frozen=True)
class CaptionOptions(CallOptions):
    """Options of caption: how to search for a sentence; default: as in training."""

    beam: int | None = None  # sentences kept at each step; 1 takes the most likely word each time
    max_length: int | None = None  # maximum number of words
    end: str | None = None  # word that ends a sentence


@dataclass(frozen=True)
class EditOptions(CallOptions):
    """Options of edit: the change to one slot of the image."""

    slot: int = 0  # number of the slot, as `saccade segment` shows it
    move: tuple[float, float] = (0.0, 0.0)  # down and right, in halves of the image
    scale: float = 1.0  # factor for the size of the slot
    remove: bool = False  # leave the slot out
    seed: int = 0  # seed for the positions where the slots start
    slots: int | None = None  # number of slots; default: as in training
    out: Path = Path("edited.png")  # file for the image next to what the model draws
    raw: bool = False  # write only what the model draws, at the model's size
    force: bool = False  # replace an existing file at --out


@dataclass(frozen=True)
class ShowOptions(CallOptions):
    """Options of show: what to draw next to the image."""

    out: Path = Path("looked.png")  # file for the picture
    question: str = ""  # question, for a model that answers questions
    against: str | None = None  # another router of the same family, to compare the maps
    seed: int = 0  # seed for the positions where the slots start
    force: bool = False  # replace an existing file at --out
