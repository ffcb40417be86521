# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the TVMAX paper's question-answering network."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, cast

from saccade.core.checks import nearest
from saccade.core.errors import SaccadeError
from saccade.core.schema import Count
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import at, check_stated, declared, unknown_key
from saccade.models.official.tables import Row, Rows, rows_of
from saccade.models.vqa.config import Attention, Sparse, VQAConfig

LAM = 0.05  # the authors' alpha is 0.1; their 1/2 ||x - z||^2 halves it
_HEADS = {512: 8, 1024: 8}  # by width
_WIDEN = "backbone.enc_list.0.ffn.mlp.fc.linear.weight"


@dataclass(frozen=True)
class VQAJson:
    """What is read of the authors' configuration, and of our keys beside it.

    `Any` is only compared with the tensors.
    """

    OWN: ClassVar = ("MULTI_HEAD", "IMG_FEAT_PAD_SIZE")  # of the authors' many keys
    image: Literal["grid", "boxes"] = "grid"
    grid: tuple[Count, Count] | None = None  # the largest height and width of a feature map
    question_length: Count = 14
    MULTI_HEAD: Count | None = None
    IMG_FEAT_PAD_SIZE: Count = 100
    HIDDEN_SIZE: Any = at("HIDDEN_SIZE", ours="dim")
    LAYER: Any = at("LAYER", ours="layers")
    FF_SIZE: Any = at("FF_SIZE", ours="hidden")
    WORD_EMBED_SIZE: Any = at("WORD_EMBED_SIZE", ours="word_dim")
    FLAT_OUT_SIZE: Any = at("FLAT_OUT_SIZE", ours="pool_dim")
    IMG_FEAT_SIZE: Any = at("IMG_FEAT_SIZE", ours="features")
    token_size: Any = at("token_size", ours="tokens")
    answer_size: Any = at("answer_size", ours="answers")


_ATTENTION = {
    "queries.*": "linear_q.*",
    "keys.*": "linear_k.*",
    "values.*": "linear_v.*",
    "out.*": "linear_merge.*",
}
_FEED = {"feed.widen.*": "ffn.mlp.fc.linear.*", "feed.narrow.*": "ffn.mlp.linear.*"}
_POOL = {
    "score.widen.*": "mlp.fc.linear.*",
    "score.narrow.*": "mlp.linear.*",
    "merge.*": "linear_merge.*",
}


def _norms(ours: str, theirs: str, *names: str) -> Rows:
    """Return the rows of the norms of a layer, which are numbered in their order."""
    leaves = {"weight": "a_2", "bias": "b_2"}
    return tuple(
        Row(f"{ours}{name}.{mine}", f"{theirs}{number}.{leaf}")
        for name, number in zip(names, ("1", "2", "3") if len(names) > 1 else ("",), strict=False)
        for mine, leaf in leaves.items()
    )


def _rows(place: str) -> Rows:
    """Return all rows; `place` is grid or box."""
    ours, theirs = f"{place}_decoder.#.", "backbone.dec_list.#."
    decoder = ("norm_attention", "norm_guided", "norm_feed")
    return (
        Row("embedding.*", "embedding.*"),
        Row("lstm.*", "lstm.*"),
        Row(f"{place}_linear.*", "img_feat_linear.*"),
        *rows_of("encoder.#.attention.", "backbone.enc_list.#.mhatt.", _ATTENTION),
        *rows_of("encoder.#.", "backbone.enc_list.#.", _FEED),
        *_norms("encoder.#.", "backbone.enc_list.#.norm", "norm_attention", "norm_feed"),
        *rows_of(f"{ours}attention.", f"{theirs}mhatt1.", _ATTENTION),
        *rows_of(f"{ours}guided.", f"{theirs}mhatt2.", _ATTENTION),
        *rows_of(ours, theirs, _FEED),
        *_norms(ours, f"{theirs}norm", *decoder),
        *rows_of("question_pool.", "attflat_lang.", _POOL),
        *rows_of(f"{place}_pool.", "attflat_img.", _POOL),
        *_norms("", "proj_norm", "norm"),
        Row("head.*", "proj.*"),
    )


def convert(official: Original) -> Conversion:
    """Read the network with the authors' normalization and solver, and its exact form.

    Raises: SaccadeError if the file is of another network, or if something is unknown: the output
        attention, the answers, the number of heads, the size of the grid.
    """
    _check(official)
    json = declared(VQAJson, official.config)
    reading = Reading(official.path, official.tensors)
    config = _config(official, reading, json)
    reading.take(_rows("box" if json.image == "boxes" else "grid"))
    notes = [f"output attention {official.attention}, as --attention says"]
    exact = None
    if official.attention == "tvmax":
        exact = replace(config, solver="exact")
        notes.append(
            f"TVMAX by the authors' rounds, lam {config.lam:g}; where a round ends just at the "
            "stop, rounding decides on one more, and --numerics exact has no such jump"
        )
    if official.vocabulary is None:
        notes.append("no --vocabulary: questions come as token ids")
    return reading.converted(official, "vqa", config, notes=tuple(notes), exact=exact)


def _check(official: Original) -> None:
    wanted = ("embedding.weight", "img_feat_linear.weight", "proj.weight", "lstm.weight_ih_l0")
    missing = [key for key in wanted if key not in official.tensors]
    if missing:
        raise SaccadeError(
            f"{official.path}: has no {', '.join(missing)}, so it is not a checkpoint of the "
            "TVMAX question-answering network. Choose the SOURCE that it comes from."
        )
    if official.attention not in ("softmax", "sparsemax", "tvmax"):
        raise SaccadeError(
            f"{official.path}: the three output attentions have the same weights, so the file "
            "does not tell which one it was trained with. Pass --attention softmax|sparsemax|tvmax."
        )
    if official.labels is None:
        answers = len(official.tensors["proj.weight"])
        raise SaccadeError(
            f"{official.path}: the file has no names for its {answers} answers. Pass them with "
            "--labels FILE, one per line in the order of training."
        )


def _config(official: Original, reading: Reading, json: VQAJson) -> VQAConfig:
    dim, features = reading.shape("img_feat_linear.weight", 2)
    tokens, word_dim = reading.shape("embedding.weight", 2)
    answers, pool_dim = reading.shape("proj.weight", 2)
    glimpses, _ = reading.shape("attflat_img.mlp.linear.weight", 2)
    if glimpses != 1:
        raise SaccadeError(
            f"{official.path}: FLAT_GLIMPSES is {glimpses}, but the authors' code runs only with "
            "1. Convert a checkpoint with one glimpse."
        )
    measured: dict[str, Any] = {
        "dim": dim,
        "layers": reading.depth("backbone.enc_list.#."),
        "hidden": reading.shape(_WIDEN)[0],
        "word_dim": word_dim,
        "pool_dim": pool_dim,
        "tokens": tokens,
        "answers": answers,
    }
    _check_keys(official.config or {})
    check_stated(official.path, json, measured | {"features": features})
    words = tuple(official.vocabulary or ())
    lengths = {"--labels": (len(official.labels or ()), answers)}
    lengths["--vocabulary"] = (len(words) or tokens, tokens)
    for flag, (length, wanted) in lengths.items():
        if length != wanted:
            raise SaccadeError(
                f"{official.path}: {flag} has {length} lines, expected {wanted} as in the weights. "
                "Pass the list that the checkpoint was trained with."
            )
    return VQAConfig(
        **_place(json, features),
        **measured,
        features="given",
        layout="flat",
        words=words,
        vocabulary="listed",
        question_length=json.question_length,
        heads=_heads(official.path, json, dim),
        pool_hidden=reading.shape("attflat_img.mlp.fc.linear.weight")[0],
        attention=cast("Attention", official.attention),
        box_attention=_box_attention(official, json),
        lam=LAM if official.lam is None else official.lam,
        solver="authors" if official.attention == "tvmax" else "exact",
        norm="spread",
        eps=1e-6,
        answer="sigmoid",
    )


def _check_keys(given: Mapping[str, Any]) -> None:
    """Check that our keys in --config are known, and that no other resembles one that is read."""
    known = [field.name for field in fields(VQAJson)]
    for key in given.keys() - set(known):
        close = nearest(key, known) if key.islower() else nearest(key, VQAJson.OWN, 0.9)
        if key.islower() or close:
            raise unknown_key(key, close, known)


def _place(json: VQAJson, features: int) -> dict[str, Any]:
    rows = json.IMG_FEAT_PAD_SIZE
    if json.image == "boxes":
        return {"image": "boxes", "boxes": rows, "box_dim": features}
    side = math.isqrt(rows)
    if json.grid is None and side * side != rows:
        raise SaccadeError(
            f"--config: IMG_FEAT_PAD_SIZE {rows} is not a square, so it does not tell the largest "
            'height and width of a feature map. Pass them, as in {"grid": [14, 14]}.'
        )
    grid = json.grid or (side, side)
    return {"image": "grid", "rows": rows, "feature_dim": features, "grid": grid}


def _box_attention(official: Original, json: VQAJson) -> Sparse:
    if official.attention == "tvmax" and json.image == "boxes":
        raise SaccadeError(
            f"{official.path}: boxes have no neighbors, so --attention tvmax does not work with "
            "image 'boxes' in --config. Pass softmax or sparsemax."
        )
    return "softmax" if official.attention == "softmax" else "sparsemax"


def _heads(path: str, json: VQAJson, dim: int) -> int:
    heads = json.MULTI_HEAD or _HEADS.get(dim)
    if heads is None:
        raise SaccadeError(
            f"{path}: the number of heads is not in the file, and no published model has width "
            f'{dim}. Pass it in --config, as in {{"MULTI_HEAD": 8}}.'
        )
    return heads
