# SPDX-License-Identifier: Apache-2.0
"""The user's images for a model that may see them through a ResNet, and words of their texts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import image_fields
from saccade.models.data.samples.source import DataDescription, SampleSource
from saccade.models.preprocessing import Preprocessing
from saccade.models.resnet_sizes import BLOCKS, MEAN, STD, STRIDE, sizes_of
from saccade.models.training.options import TrainOptions
from saccade.models.training.regularization import ImageChanges
from saccade.models.training.task import Recipe, Task
from saccade.models.word_tokens import frequent_words, split_words

_SEEN = 1_000  # images used for mean and std


def with_counts(options: TrainOptions, recipe: Recipe, counts: Mapping[str, int]) -> Recipe:
    """Return the recipe with these further `extra` numbers, or those that `--set` gives.

    Raises: SaccadeError if one is not a whole number of at least 1.
    """
    extra = {**recipe.extra, **counts}
    for name, usual in counts.items():
        value = extra[name] = options.set.get(name, usual)
        if type(value) is not int or value < 1:
            raise SaccadeError(
                f"--set {name}={value}: expected a whole number of at least 1. Correct it, or "
                f"leave it out for {usual:,}."
            )
    return replace(recipe, extra=extra)


class ImageTextsTask(Task):
    """A task on the user's images with texts."""

    training: Any  # a split, as `data.image_texts.captioned_split` or `question_split` returns it
    validation: Any

    def read(
        self,
        options: TrainOptions,
        opened: Callable[[str, DataDescription], SampleSource],
        split_of: Callable[..., Any],
        encoder: str,
    ) -> DataDescription:
        """Read both splits, and return what the options say about the data.

        `opened` returns a source, of which `split_of` returns a split. `encoder` is the one that
        the family has without `--set`.

        Raises: SaccadeError as these two do.
        """
        name, given = str(options.data), DataDescription.of(options.labels, options.data_root)
        source, images = opened(name, given), _wanted_images(options, encoder)
        how = {"preprocessing": images, "side_px": options.new_side_px, "asked": options.asked}
        splits = {part: split_of(source, name, part, **how) for part in ("train", "validation")}
        self.training, self.validation = splits.values()
        self.data = self.training.name
        self.data_sha256 = {part: split.sha256 for part, split in splits.items()}
        self.changes = ImageChanges(self.recipe, images=self.training.images)
        return given


def _wanted_images(options: TrainOptions, encoder: str) -> Preprocessing | None:
    """Return how images are read: as those of `--init`, in color for a ResNet, or None.

    `encoder` is the one that the family has without `--set`.
    """
    if options.asked.preprocessing is not None or options.value("encoder", encoder) not in BLOCKS:
        return options.asked.preprocessing
    side_px = options.new_side_px
    return Preprocessing(side_px, side_px, 3, (0.0,) * 3, (1.0,) * 3)


def encoder_fields(options: TrainOptions, images: np.ndarray, encoder: str) -> dict[str, Any]:
    """Return the fields of a configuration about these images, as `_wanted_images` reads them.

    A ResNet takes the mean and std of ImageNet, as its weights do; its cells are of 32 pixels.

    Shapes: images uint8 [n h w c].
    """
    name = options.value("encoder", encoder)
    if name not in BLOCKS:
        return image_fields(images, images[:_SEEN])
    _, height, width, channels = images.shape
    return {
        "height_px": height,
        "width_px": width,
        "channels": channels,
        "mean": MEAN,
        "std": STD,
        "feature_dim": sizes_of(name).features,
        "grid": (max(1, height // STRIDE), max(1, width // STRIDE)),
    }


def chosen_words(
    options: TrainOptions, texts: Sequence[str], named: Callable[[int], str], *, extra: Any
) -> tuple[str, ...]:
    """Return the words of texts that occur often enough, or those of `--init`, which has them all.

    `named` returns what the user calls the row of a text.

    Raises: SaccadeError if there are none, or the checkpoint of `--init` lacks one, with its row.
    """
    most, least = extra["most_words"], extra["word_count"]
    words = frequent_words(texts, most=most, least_count=least)
    if len(words) < 2:
        raise SaccadeError(
            f"--data {options.data}: found {len(words)} words that occur at least {least} times "
            "in the training split, expected 2 or more. Lower --set word_count, or add texts."
        )
    if options.start is None:
        return words
    known = tuple(options.start.config["words"])
    if unknown := sorted(set(words) - set(known)):
        row = next(i for i, text in enumerate(texts) if unknown[0] in split_words(text))
        raise SaccadeError(
            f"--data {options.data}: {named(row)}: {unknown[0]!r:.80} is not among the "
            f"{len(known):,} words of --init {options.init} ({len(unknown):,} words of the data "
            "are not). Raise --set word_count, so that rarer words are read as unknown, or train "
            "without --init."
        )
    return known


def longest_text(texts: Iterable[str], most: int) -> int:
    """Return the number of words of the longest text, at most `most`."""
    return min(most, max(len(split_words(text)) for text in texts))
