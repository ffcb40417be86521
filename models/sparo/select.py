# SPDX-License-Identifier: Apache-2.0
"""Selection of a SPARO checkpoint's slots: chosen by data, and stored in its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.core.files import read_lines, refuse_existing
from saccade.core.options import Options
from saccade.core.schema import Natural
from saccade.models.checkpoint import Checkpoint, load, save
from saccade.models.data.options import DataOptions
from saccade.models.sparo.zero_shot import default_templates, prompts

if TYPE_CHECKING:
    from saccade.models.sparo.model import Sparo

_SCENES = 1_000  # validation scenes


@dataclass(frozen=True)
class SelectOptions(Options):
    """Options for choosing slots, and the path of the result."""

    out: Path  # JSON to write, for `saccade export --slots`
    # validation data: shapes, or your own: labeled images, or with --by negatives or --masks images
    # with true and false sentences (see docs/data.md)
    data: str = "shapes"
    data_root: Path | None = None  # folder in which the paths of --data begin; default: its own
    skip_bad: Natural = 0  # leave out at most this many unreadable rows
    # rank by zero-shot accuracy, or by telling true sentences from false ones
    by: Literal["accuracy", "negatives"] = "accuracy"
    # instead of ranking, train masks of slots or of their dimensions on false sentences
    masks: Literal["slot", "dimension"] | None = None
    templates: Path | None = None  # file with prompts, one per line, with {} for the label
    epochs: int = 100  # training epochs of the masks
    seed: int = 0  # random seed of the masks' batches
    force: bool = False  # overwrite an existing file at --out

    @property
    def asked(self) -> DataOptions:
        """Return the options of the user's data."""
        return DataOptions(data_root=self.data_root, skip_bad=self.skip_bad)


@dataclass(frozen=True)
class SelectionResult:
    """The selection as written, and the scores that it is based on.

    `scores` are each slot's share of right answers. For masks, they are the share of true
    sentences that are nearer, without and with the mask.
    """

    selection: dict[str, Any]
    scores: tuple[float, ...]


def select(path: Path, options: SelectOptions) -> SelectionResult:
    """Rank slots by the accuracy of each alone, or train masks of the image code.

    Raises: SaccadeError if the checkpoint has no slots or no text tower, or the data cannot be
        used.
    Source: Vani et al. 2024, sections 5.1 and 5.2.
    """
    refuse_existing(options.out, force=options.force)
    checkpoint = load(path)
    from saccade.models.sparo.ranking import selection, write_selection

    model = _model(checkpoint)
    record: dict[str, Any] = {"data": options.data, "checkpoint_sha256": checkpoint.sha256}
    if options.masks is None:
        ranked = _by_negatives if options.by == "negatives" else _by_accuracy
        order, scores = ranked(checkpoint, model, options)
        chosen = selection(kind=options.by, order=order, **record)
    else:
        mask, scores = _masked(checkpoint, model, options)
        chosen = selection(kind=options.masks, mask=mask, **record)
    write_selection(options.out, chosen, replace=options.force)
    return SelectionResult(chosen, scores)


def selected_checkpoint(checkpoint: Checkpoint, slots: Path, out: Path) -> Checkpoint:
    """Write a checkpoint whose weights include the selection in `slots`: its order, its mask.

    Raises: SaccadeError if it is of another family, or the selection is for another checkpoint.
    """
    require("torch", extra="export")
    from saccade.models.sparo.ranking import read_selection, with_selection

    if checkpoint.family != "sparo":
        raise SaccadeError(
            f"--slots {slots}: only checkpoints of family 'sparo' have slots to select, and "
            f"{checkpoint.path} is of family '{checkpoint.family}'. Leave --slots out."
        )
    chosen = read_selection(slots)
    model: Any = with_selection(checkpoint.build(), chosen, checkpoint.sha256)
    origin = {"selected_from_sha256": checkpoint.sha256, "selected_by": chosen["kind"]}
    return save(
        out,
        family=checkpoint.family,
        config=model.config.to_dict(),
        weights=model.state_dict(),
        preprocessing=checkpoint.preprocessing,
        labels=checkpoint.labels,
        calibration=checkpoint.calibration,
        card=checkpoint.card | origin,
    )


def _model(checkpoint: Checkpoint) -> "Sparo":
    config = checkpoint.config
    if checkpoint.family != "sparo" or config["pooling"] != "sparo" or not config["text"]:
        raise SaccadeError(
            f"{checkpoint.path}: a checkpoint of family '{checkpoint.family}' without slots in "
            "two towers. Pass a CLIP with SPARO, which has slots to select."
        )
    model: Any = checkpoint.build()
    if model.config.masked:
        model.slot_mask.fill_(1)  # the new selection replaces an earlier one
    return model


def _by_accuracy(
    checkpoint: Checkpoint, model: "Sparo", options: SelectOptions
) -> tuple[list[int], tuple[float, ...]]:
    from saccade.models.data.datasets import load_data
    from saccade.models.sparo.ranking import image_slots, rank_slots, text_slots

    data = load_data(
        options.data, "validation", preprocessing=checkpoint.preprocessing, asked=options.asked
    )
    written = prompts(data.class_names, _templates(model, options))
    texts = text_slots(model, [text for sentences in written for text in sentences])
    texts = texts.reshape(len(written), -1, *texts.shape[1:])
    order, scores = rank_slots(image_slots(model, data.images), data.labels, texts)
    return order, tuple(scores.tolist())


def _templates(model: "Sparo", options: SelectOptions) -> tuple[str, ...]:
    if options.templates is not None:
        return read_lines(options.templates, "template")
    return default_templates(model.config.tokenizer)


def _by_negatives(
    checkpoint: Checkpoint, model: "Sparo", options: SelectOptions
) -> tuple[list[int], tuple[float, ...]]:
    from saccade.models.sparo.ranking import rank_by_negatives

    order, scores = rank_by_negatives(*_true_and_false(checkpoint, model, options))
    return order, tuple(scores.tolist())


def _true_and_false(
    checkpoint: Checkpoint, model: "Sparo", options: SelectOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes of images, of their sentences and of false ones; shapes [n l v] each."""
    from saccade.models.data.image_texts import load_contrasts
    from saccade.models.data.scene_texts import captioned
    from saccade.models.data.shapes import scenes
    from saccade.models.sparo.ranking import image_slots, text_slots

    if options.data != "shapes":
        preprocessing = checkpoint.preprocessing
        assert preprocessing is not None, "a model with an image tower"
        statements = load_contrasts(options.data, "validation", options.asked, preprocessing, None)
        images = image_slots(model, statements.images)[statements.owner]
        true, false = (
            text_slots(model, texts, truncate=True)
            for texts in (statements.captions, statements.negatives)
        )
        return images, true, false
    described = captioned(scenes("validation", _SCENES, side_px=model.config.height_px))
    images = image_slots(model, described.images)[described.owner]
    true = text_slots(model, described.captions)[described.owner]
    return images, true, text_slots(model, described.negatives)


def _masked(
    checkpoint: Checkpoint, model: "Sparo", options: SelectOptions
) -> tuple[np.ndarray, tuple[float, ...]]:
    from saccade.models.sparo.ranking import train_masks

    assert options.masks is not None
    codes = _true_and_false(checkpoint, model, options)
    _, before = train_masks(*codes, kind=options.masks, epochs=0)
    mask, after = train_masks(*codes, kind=options.masks, epochs=options.epochs, seed=options.seed)
    return mask, (before, after)
