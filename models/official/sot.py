# SPDX-License-Identifier: Apache-2.0
"""The authors' SoT checkpoints: every token embedding, every head."""

from dataclasses import replace

from saccade.errors import SaccadeError
from saccade.models.official.authors_images import AuthorsImages, authors_images
from saccade.models.official.claims import check_claims, whole_number
from saccade.models.official.conversion import Converted, Official
from saccade.models.official.sot_head_keys import read_head
from saccade.models.official.sot_token_keys import GRID, read_embedding
from saccade.models.official.vit_keys import BLOCK, Reading, block_fields, hint, take_specials
from saccade.models.sot.config import IMAGENET_MEAN, IMAGENET_STD, SoTConfig

HEADS = {240: 4, 384: 6, 528: 8}  # of SoT-Tiny, -Small, -Base by their width


def convert(official: Official) -> Converted:
    """Read a SoT; --config takes the authors' own dictionary for what the tensors do not tell.

    Raises: SaccadeError if the file is no SoT, or a part of it is not known.
    Source: the authors' SoT at commit 5da3c37e.
    """
    reading = Reading(official.path, official.tensors)
    positions = reading.shape("pos_embed")[1]
    if positions != 1 + GRID * GRID:
        raise SaccadeError(
            f"{official.path}: pos_embed is for {positions} tokens, expected {1 + GRID * GRID} as "
            "in every SoT. Convert a ViT or DeiT with SOURCE 'vit' or 'deit'."
        )
    fields = {"position": "sinusoid"} | block_fields(reading)
    fields["heads"] = _heads(official, fields["dim"])
    fields |= read_embedding(reading, "visual_tokens.tokens.", official.config)
    told = {
        "ViTConfig.embed_dim": fields["dim"],
        "ViTConfig.depth": fields["layers"],
        "in_chans": fields["channels"],
        "img_size": fields["height_px"],
    }
    claims = {name: (hint(official.config, *name.split(".")), told[name]) for name in told}
    check_claims(official.path, claims)
    head, notes = read_head(reading, "classifier.", fields["dim"], official.config)
    reading.rename((*BLOCK, (r"norm\.(weight|bias)", r"trunk.norm.\1")))
    take_specials(reading, ("cls_token",), "pos_embed")
    config = imagenet(fields | head)
    return converted(official, reading, config, authors_images("sot", config), notes)


def imagenet(fields: dict[str, object]) -> SoTConfig:
    """The configuration, with ImageNet's mean and standard deviation (their mean, where grey)."""
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if fields["channels"] == 1:
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)  # type: ignore[assignment]
    return SoTConfig.from_dict({"mean": mean, "std": std} | fields)


def converted(
    official: Official,
    reading: Reading,
    config: SoTConfig,
    images: AuthorsImages,
    notes: tuple[str, ...],
) -> Converted:
    """The answer of a converter of this family."""
    exact = None
    if config.second_order and config.normalization == "svpn-fast" and config.svpn_epsilon:
        exact = replace(config, svpn_epsilon=0.0)
    return Converted(
        family="sot",
        config=config,
        weights=reading.weights,
        names=reading.names,
        preprocessing=images.preprocessing,
        images_from=images.origin,
        labels=official.labels or (),
        ignored=reading.ignored,
        notes=notes,
        exact=exact,
    )


def _heads(official: Official, dim: int) -> int:
    given = hint(official.config, "ViTConfig", "num_heads", default=HEADS.get(dim))
    if given is None:
        raise SaccadeError(
            f"{official.path}: tokens are {dim} wide, which is none of SoT-Tiny, -Small and -Base, "
            "and the number of attention heads cannot be read from the file. Pass it with "
            '--config: {"ViTConfig": {"num_heads": 4}}.'
        )
    return whole_number(given, "ViTConfig.num_heads")
