# SPDX-License-Identifier: Apache-2.0
"""Which source a file looks like, for the message when it was read as another."""

from collections.abc import Iterable

from saccade.errors import SaccadeError

# Ends of names that only files of a source have together; the most particular first.
_MARKS = {
    "nac": ("input_latents.codes_", "read_in.read_in_attention.receiver_layernorm.weight"),
    "sparo-clip": ("visual.sparo.q_emb", "text_sparo.q_emb"),
    "open-clip": ("visual.conv1.weight", "token_embedding.weight"),
    "sparo-dino": ("sparo.q_emb", "cls_token"),
    "tvmax-vqa": ("img_feat_linear.weight", "attflat_img.mlp.linear.weight"),
    "invariant-slot-attention": ("general_dense_q_0/kernel", "state_init"),
    "sot": ("cls_token", "classifier.cls_fc.weight", "blocks.0.attn.qkv.weight"),
    "swin": ("attn.relative_position_bias_table", "mlp.fc1.weight"),
    "deit": ("dist_token", "patch_embed.proj.weight"),
    "vit": ("cls_token", "patch_embed.proj.weight"),
}


def looks_like(names: Iterable[str]) -> str | None:
    """The source that names its tensors so, if any."""
    names = tuple(names)
    for source, marks in _MARKS.items():
        if all(any(name.endswith(mark) for name in names) for mark in marks):
            return source
    return None


def with_source(error: SaccadeError, source: str, names: Iterable[str]) -> SaccadeError:
    """The refusal of one source's converter; says so if the file looks like another's."""
    other = looks_like(names)
    if other in (None, source) or f"'{other}'" in str(error):
        return error
    return SaccadeError(
        f"{error}\nThe file looks like one of SOURCE '{other}', not of '{source}': "
        f"saccade convert {other} ..."
    )
