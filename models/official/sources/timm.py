# SPDX-License-Identifier: Apache-2.0
"""What timm's trunks share: their JSON, the names of their blocks, torchvision's for the same, and
a trunk without a classifier as an embedding of images."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from saccade.models.official.authors_images import PretrainedCfg, authors_images, published
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.tables import Row, Rows, as_rows, as_vector, rows_of, stacked_rows
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import Pooling, SparoConfig
from saccade.models.sparo.trunk import TRUNK as SPARO_TRUNK
from saccade.models.trunks import TrunkShape

if TYPE_CHECKING:
    from torch import Tensor

    from saccade.models.official.authors_images import AuthorsImages


# timm's layers of a block by ours.
BLOCK = {
    "norm_attention.*": "norm1.*",
    "attention.qkv.*": "attn.qkv.*",
    "attention.out.*": "attn.proj.*",
    "norm_mlp.*": "norm2.*",
    "widen.*": "mlp.fc1.*",
    "narrow.*": "mlp.fc2.*",
}
VIT_BLOCKS = rows_of("trunk.blocks.#.", "blocks.#.", BLOCK)
# timm's names by torchvision's, of its ViT and its Swin.
_TORCHVISION = (
    Row("cls_token", "class_token"),
    Row("pos_embed", "encoder.pos_embedding"),
    Row("patch_embed.proj.*", "conv_proj.*"),
    Row("norm.*", "encoder.ln.*"),
    Row("head.*", "heads.head.*"),
    Row("pre_logits.fc.*", "heads.pre_logits.*"),
    *(
        Row(f"blocks.#.{ours}*", f"encoder.layers.encoder_layer_#.{theirs}*")
        for theirs, ours in {
            "ln_1.": "norm1.",
            "self_attention.in_proj_": "attn.qkv.",
            "self_attention.out_proj.": "attn.proj.",
            "ln_2.": "norm2.",
            "mlp.0.": "mlp.fc1.",
            "mlp.linear_1.": "mlp.fc1.",
            "mlp.3.": "mlp.fc2.",
            "mlp.linear_2.": "mlp.fc2.",
        }.items()
    ),
    Row("patch_embed.proj.*", "features.0.0.*"),
    Row("patch_embed.norm.*", "features.0.2.*"),
    *(
        row
        for stage in range(4)
        for row in (
            Row(f"layers.{stage}.blocks.#.mlp.fc1.*", f"features.{2 * stage + 1}.#.mlp.0.*"),
            Row(f"layers.{stage}.blocks.#.mlp.fc2.*", f"features.{2 * stage + 1}.#.mlp.3.*"),
            Row(f"layers.{stage}.blocks.#.*.*", f"features.{2 * stage + 1}.#.*.*"),
            Row(f"layers.{stage}.blocks.#.attn.*.*", f"features.{2 * stage + 1}.#.attn.*.*"),
            Row(f"layers.{stage}.downsample.*.*", f"features.{2 * stage + 2}.*.*"),
        )
    ),
)


def is_torchvision(official: Original) -> bool:
    """Return True if a file's keys are those of torchvision's ViT or Swin."""
    keys = {*(official.backbone or {}), *official.tensors}
    return not {"conv_proj.weight", "features.0.0.weight"}.isdisjoint(keys)


def timm_reading(official: Original) -> Reading:
    """Read a file of timm or torchvision, and that of --backbone, by timm's names."""
    tensors = {**(official.backbone or {}), **official.tensors}
    if not is_torchvision(official):
        return Reading(official.path, tensors)
    return Reading.renamed(official.path, tensors, _TORCHVISION)


def published_side(config: Mapping[str, Any] | None) -> int | None:
    """Return the side of the images in timm's or OpenCLIP's JSON, if it is there."""
    read = published(config)
    if read is None:
        return None
    size = read[1].input_size if isinstance(read[1], PretrainedCfg) else read[1].size
    return size[-1] if size else None


def block_fields(reading: Reading) -> dict[str, Any]:
    """Return the fields for width, depth and hidden width of timm's blocks."""
    hidden, dim = reading.shape("blocks.0.mlp.fc1.weight", 2)
    return {
        "dim": dim,
        "layers": reading.depth("blocks.#."),
        "mlp_dim": hidden,
        "qkv_bias": "blocks.0.attn.qkv.bias" in reading.tensors,
    }


def token_rows(specials: tuple[str, ...], position: str, count: int = 0) -> Rows:
    """Return the rows of class tokens and registers, if any, stacked, and of the positions.

    `count` tokens have no position if the others form a square, as in DeiT III; they get zeros.
    """

    def places(x: "Tensor") -> "Tensor":
        import torch

        own = as_rows(x)
        if not count or not is_square(len(own)):
            return own
        return torch.cat((own.new_zeros(count, own.shape[1]), own))

    tokens = (Row("trunk.class_tokens", specials, stacked_rows),) if specials else ()
    return (*tokens, Row("trunk.position", position, places))


def is_square(count: int) -> bool:
    """Return True if that many tokens form a square grid, so none of them is a class token.

    With one or two class tokens, the count is never a square.
    """
    return count > 1 and round(count**0.5) ** 2 == count


# A trunk without a classifier.
NOTES: dict[Pooling, str] = {
    "cls": "no classifier: the embedding is the class token, brought to length 1",
    "map": "the embedding is what the attention pooling reads, brought to length 1",
    "mean": "no classifier: the embedding is the mean of the patches, brought to length 1",
}


def embedding(
    official: Original,
    reading: Reading,
    shape: TrunkShape,
    rows: Rows,
    images: "str | AuthorsImages",
    pooling: Pooling = "mean",
    notes: tuple[str, ...] = (),
) -> Conversion:
    """Return a trunk, whose rows have SoT's names, as an embedding of family 'sparo'.

    `images` are its preprocessing, or the source whose authors' it is.
    """
    import torch

    fields = SPARO_TRUNK.fields(shape)
    config = SparoConfig(**fields, text=False, pooling=pooling, embed_dim=shape.width)
    reading.take(tuple(placed for row in rows for placed in _placed(row, config)))
    if not shape.qkv_bias:
        for name in [name for name in reading.weights if name.endswith("attention.qkv.weight")]:
            zeros = torch.zeros(len(reading.weights[name]))
            reading.put(f"{name.removesuffix('weight')}bias", zeros)
    if pooling == "cls":
        reading.put("image_pool.project.weight", torch.eye(shape.width))
    if isinstance(images, str):
        images = authors_images(images, config, layers=shape.layers, patch_px=shape.patch_px)
    return reading.converted(official, "sparo", config, images, (*notes, NOTES[pooling]))


def _placed(row: Row, config: SparoConfig) -> Rows:
    """Return a row of a trunk with SPARO's name of its tensor instead of SoT's."""
    name = row.ours.removeprefix("trunk.")
    if name == row.ours:
        return (row,)
    if name == "class_tokens":
        registers = (Row("image.registers", row.keys[1:], stacked_rows),) if row.keys[1:] else ()
        return (Row("image.class_token", row.keys[0], as_vector), *registers)
    vit = config.trunk == "vit"
    places = {"embed.project.": "image.patches."} if vit else {}
    if not config.shape.is_resnet:
        places["norm."] = f"{config.trunk_norm}."
    for theirs, ours in (places | {"": "image." if vit else "image.trunk."}).items():
        if name.startswith(theirs):
            return (row._replace(ours=ours + name.removeprefix(theirs)),)
    return ()


def classifier(
    official: Original,
    reading: Reading,
    config: SoTConfig,
    images: "AuthorsImages",
    notes: tuple[str, ...] = (),
) -> Conversion:
    """Return a trunk with its head as a model of family 'sot'."""
    exact = None
    if config.second_order and config.normalization == "svpn-fast" and config.svpn_epsilon:
        exact = replace(config, svpn_epsilon=0.0)
    return reading.converted(official, "sot", config, images, notes, exact)
