# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the TVMAX paper's question-answering network."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, cast

from saccade.core.errors import SaccadeError
from saccade.core.spelling import did_you_mean
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.given_files import check_stated, whole_number
from saccade.models.vqa.config import Attention, Sparse, VQAConfig

LAM = 0.05  # the authors' alpha is 0.1; their 1/2 ||x - z||^2 halves it
_EPS, _PADDED_ROWS, _QUESTION_LENGTH = 1e-6, 100, 14
_IMAGES = ("grid", "boxes")
_HEADS = {512: 8, 1024: 8}
_WIDEN = "backbone.enc_list.0.ffn.mlp.fc.linear.weight"
_KNOWN = {"grid", "image", "question_length", "token_size", "answer_size"}
_READ = ("MULTI_HEAD", "IMG_FEAT_PAD_SIZE")  # of the authors' many keys
_RENAMED = (
    ("mhatt1.", "attention."),
    ("mhatt2.", "guided."),
    ("mhatt.", "attention."),
    ("linear_q.", "queries."),
    ("linear_k.", "keys."),
    ("linear_v.", "values."),
    ("ffn.mlp.fc.linear.", "feed.widen."),
    ("ffn.mlp.linear.", "feed.narrow."),
    ("mlp.fc.linear.", "score.widen."),
    ("mlp.linear.", "score.narrow."),
    ("backbone.enc_list.", "encoder."),
    ("attflat_lang.", "question_pool."),
    ("proj_norm.", "norm."),
    ("proj.", "head."),
    (".a_2", ".weight"),
    (".b_2", ".bias"),
)


def convert(official: Official) -> Converted:
    """Read the network with the authors' normalization and solver, and its exact form.

    Raises: SaccadeError if the file is of another network, or if something is unknown: the output
        attention, the answers, the number of heads, the size of the grid.
    """
    _check(official)
    given = dict(official.config or {})
    boxes = given.get("image", "grid") == "boxes"
    config = _config(official, given, boxes)
    reading = Reading(official.path, official.tensors)
    for key, value in official.tensors.items():
        reading.put(_our_name(key, boxes), value, key)
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


def _check(official: Official) -> None:
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
    glimpses = len(official.tensors["attflat_img.mlp.linear.weight"])
    if glimpses != 1:
        raise SaccadeError(
            f"{official.path}: FLAT_GLIMPSES is {glimpses}, but the authors' code runs only with "
            "1. Convert a checkpoint with one glimpse."
        )


def _config(official: Official, given: Mapping[str, Any], boxes: bool) -> VQAConfig:
    shapes = {key: tuple(value.shape) for key, value in official.tensors.items()}
    dim = shapes["img_feat_linear.weight"][0]
    tokens, word_dim = shapes["embedding.weight"]
    answers, pool_dim = shapes["proj.weight"]
    layers = _depth(shapes)
    _check_given(official.path, given, shapes)
    words = tuple(official.vocabulary or ())
    _check_length(official.path, "--labels", len(official.labels or ()), answers)
    if words:
        _check_length(official.path, "--vocabulary", len(words), tokens)
    return VQAConfig(
        **_place(given, shapes["img_feat_linear.weight"][1], boxes),
        features="given",
        layout="flat",
        tokens=tokens,
        words=words,
        vocabulary="listed",
        question_length=_count(given, "question_length", _QUESTION_LENGTH),
        word_dim=word_dim,
        dim=dim,
        heads=_heads(official.path, given, dim),
        layers=layers,
        hidden=shapes[_WIDEN][0],
        pool_hidden=shapes["attflat_img.mlp.fc.linear.weight"][0],
        pool_dim=pool_dim,
        answers=answers,
        attention=cast("Attention", official.attention),
        box_attention=_box_attention(official, boxes),
        lam=LAM if official.lam is None else official.lam,
        solver="authors" if official.attention == "tvmax" else "exact",
        norm="spread",
        eps=_EPS,
        answer="sigmoid",
    )


def _count(given: Mapping[str, Any], name: str, default: int) -> int:
    return whole_number(given.get(name, default), name)


def _depth(names: Iterable[str]) -> int:
    return len({key.split(".")[2] for key in names if key.startswith("backbone.enc_list.")})


def _check_given(
    path: str, given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the fields in --config are known and agree with the tensors."""
    if unknown := sorted(key for key in given if key.islower() and key not in _KNOWN):
        raise SaccadeError(
            f"--config: unknown keys {unknown}. Expected the authors' (MULTI_HEAD, "
            "IMG_FEAT_PAD_SIZE, ...), grid, image, question_length."
            f"{did_you_mean(unknown[0], sorted(_KNOWN))} Correct the JSON."
        )
    if given.get("image", "grid") not in _IMAGES:
        raise SaccadeError(f"--config: image is {given['image']!r}, expected one of {_IMAGES}.")
    for key in given.keys() - set(_READ):
        if close := get_close_matches(key, _READ, n=1, cutoff=0.9):
            raise SaccadeError(f"--config: key {key} is unknown. Did you mean {close[0]}?")
    dim, features = shapes["img_feat_linear.weight"]
    tokens, word_dim = shapes["embedding.weight"]
    answers, pool_dim = shapes["proj.weight"]
    measured = {
        "HIDDEN_SIZE": dim,
        "LAYER": _depth(shapes),
        "FF_SIZE": shapes[_WIDEN][0],
        "WORD_EMBED_SIZE": word_dim,
        "FLAT_OUT_SIZE": pool_dim,
        "IMG_FEAT_SIZE": features,
        "token_size": tokens,
        "answer_size": answers,
    }
    check_stated(path, {name: (given.get(name), measured[name]) for name in measured})


def _place(given: Mapping[str, Any], features: int, boxes: bool) -> dict[str, Any]:
    rows = _count(given, "IMG_FEAT_PAD_SIZE", _PADDED_ROWS)
    if boxes:
        return {"image": "boxes", "boxes": rows, "box_dim": features}
    return {"image": "grid", "rows": rows, "feature_dim": features, "grid": _grid(given, rows)}


def _box_attention(official: Official, boxes: bool) -> Sparse:
    if not boxes or official.attention in ("softmax", "sparsemax"):
        return "softmax" if official.attention == "softmax" else "sparsemax"
    raise SaccadeError(
        f"{official.path}: boxes have no neighbors, so --attention tvmax does not work with "
        "image 'boxes' in --config. Pass softmax or sparsemax."
    )


def _heads(path: str, given: Mapping[str, Any], dim: int) -> int:
    heads = given.get("MULTI_HEAD", _HEADS.get(dim))
    if heads is None:
        raise SaccadeError(
            f"{path}: the number of heads is not in the file, and no published model has width "
            f'{dim}. Pass it in --config, as in {{"MULTI_HEAD": 8}}.'
        )
    return whole_number(heads, "MULTI_HEAD")


def _grid(given: Mapping[str, Any], rows: int) -> tuple[int, int]:
    if "grid" in given:
        grid = given["grid"]
        if not (isinstance(grid, list) and len(grid) == 2):
            raise SaccadeError(
                f"--config: grid is {grid!r:.60}, expected the largest height and width of a "
                "feature map, such as [14, 14]. Correct the JSON."
            )
        height, width = (whole_number(side, "grid") for side in grid)
        return height, width
    side = math.isqrt(rows)
    if side * side != rows:
        raise SaccadeError(
            f"--config: IMG_FEAT_PAD_SIZE {rows} is not a square, so it does not tell the largest "
            'height and width of a feature map. Pass them, as in {"grid": [14, 14]}.'
        )
    return side, side


def _check_length(path: str, flag: str, length: int, wanted: int) -> None:
    if length != wanted:
        raise SaccadeError(
            f"{path}: {flag} has {length} lines, expected {wanted} as in the weights. "
            "Pass the list that the checkpoint was trained with."
        )


def _our_name(key: str, boxes: bool) -> str:
    place = "box" if boxes else "grid"
    name = key.replace("backbone.dec_list.", f"{place}_decoder.")
    name = name.replace("img_feat_linear.", f"{place}_linear.")
    name = name.replace("attflat_img.", f"{place}_pool.")
    decodes = "_decoder." in name
    for theirs, ours in _RENAMED:
        name = name.replace(theirs, ours)
    if ".norm" in name:
        norms = ["norm_attention", "norm_guided", "norm_feed"]
        if not decodes:
            norms.remove("norm_guided")
        for number, norm in enumerate(norms, start=1):
            name = name.replace(f".norm{number}.", f".{norm}.")
    pools = "_pool." in name
    return name.replace("linear_merge.", "merge." if pools else "out.")
