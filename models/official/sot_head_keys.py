# SPDX-License-Identifier: Apache-2.0
"""The authors' second-order head: its configuration, read from its tensors, and their names."""

from collections.abc import Mapping
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Reading
from saccade.models.official.given_files import whole_number
from saccade.models.official.vit_keys import hint
from saccade.models.sot.config import AUTHORS

FUSIONS = {"sum_fc": "sum", "sum_loss": "late", "concat": "concat", "aggre_all": "aggr-all"}
NORMS = {"svPN": "svpn-fast", "sqrt_d": "scale", "sqrt_t": "scale-learned", "ePN": "epn"}
NORMS |= {"LN": "layer-norm", "": "none", "none": "none"}
RULES = (
    (r"representation\.wr\.(weight|bias)", r"head.pool.project.\1"),
    (r"representation\.norm\.(bias|factor)", r"head.pool.norm.\1"),
    (r"dr\.(weight|bias)", r"head.pool.reduce.\1"),
    (r"visual_fc\.(weight|bias)", r"head.word_fc.\1"),
    (r"dim\.(weight|bias)", r"head.class_projection.\1"),
)


def has_head(reading: Reading, prefix: str) -> bool:
    """Return True if the file has a classifier of word tokens under that prefix."""
    return f"{prefix}visual_fc.weight" in reading.tensors


def read_head(
    reading: Reading, prefix: str, width: int, config: Mapping[str, Any] | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of the head under `prefix`, and notes; its tensors are taken.

    Raises: SaccadeError naming what --config has to add, if the tensors do not tell it.
    Source: the authors' Classifier and OnlyVisualTokensClassifier.
    """
    head = _Head(reading, prefix, width, hint(config, "representationConfig", default={}))
    fields = AUTHORS | head.fields()
    rules = [(prefix.replace(".", r"\.") + pattern, ours) for pattern, ours in RULES]
    # An exponent's LayerNorm has a weight too; a weight alone is the power iteration's start.
    start = "start" if fields["normalization"] == "svpn-fast" else "weight"
    norm = prefix.replace(".", r"\.") + r"representation\.norm\.weight"
    rules.append((norm, f"head.pool.norm.{start}"))
    own = prefix.replace(".", r"\.") + r"cls_fc\.(weight|bias)"
    if fields["fusion"] in ("sum", "late", "class"):
        rules.append((own, r"head.class_fc.\1"))
    else:
        reading.ignore(own, f"{fields['fusion']} fusion does not use it")
    reading.rename(rules)
    return fields, tuple(head.notes)


class _Head:
    def __init__(
        self, reading: Reading, prefix: str, width: int, given: Mapping[str, Any] | None
    ) -> None:
        self.reading, self.prefix, self.width, self.given = reading, prefix, width, given or {}
        self.notes: list[str] = []

    def has(self, name: str) -> bool:
        return self.prefix + name in self.reading.tensors

    def size(self, name: str, axis: int) -> int:
        return self.reading.shape(self.prefix + name)[axis]

    def fields(self) -> dict[str, Any]:
        if not self.has("visual_fc.weight"):
            projected = self.size("dim.weight", 0) if self.has("dim.weight") else 0
            classes = self.size("cls_fc.weight", 0)
            return {"fusion": "class", "class_projection": projected, "classes": classes}
        fields: dict[str, Any] = {"classes": self.size("visual_fc.weight", 0)}
        incoming = self.size("visual_fc.weight", 1)
        if self.has("representation.wr.weight"):
            fields |= {"pooling": "mgcrp"} | self._normalization()
            heads, side = self._heads(incoming)
            pooled = heads * side * side
            fields |= {"pool_heads": heads, "m": side, "n": side}
            fields["pool_bias"] = self.has("representation.wr.bias")
        elif self.has("dr.weight"):
            reduced = self.size("dr.weight", 0)
            pooled = reduced * (reduced + 1) // 2
            fields |= {"pooling": "gcp", "gcp_dim": reduced}
        else:
            pooled = self.width
            fields |= {"pooling": "gap"}
        fields["fusion"] = self._fusion(incoming, pooled)
        return fields

    def _normalization(self) -> dict[str, Any]:
        given = hint(self.given, "args", "normalization", default={}) or {}
        if self.has("representation.norm.factor"):
            return {"normalization": "scale-learned"}
        if self.has("representation.norm.bias"):
            return {"normalization": "layer-norm"}
        if not self.has("representation.norm.weight"):
            return {"normalization": self._silent(given), "learned_start": False} | _power(given)
        if not given:
            self.notes.append("svPN: alpha 0.5, one singular value, one iteration (as released)")
        return {"normalization": "svpn-fast", "learned_start": True} | _power(given)

    def _silent(self, given: Mapping[str, Any]) -> str:
        kind = given.get("type", "missing")
        kind = "" if kind is None else kind
        if kind not in NORMS:
            raise SaccadeError(
                f"{self.reading.path}: the normalization of the cross-covariances has no tensors, "
                "so the file does not tell which it is. Pass it with --config: "
                '{"representationConfig": {"args": {"normalization": {"type": "sqrt_d"}}}}, where '
                "the type is svPN, sqrt_d, ePN or none."
            )
        return NORMS[kind]

    def _heads(self, incoming: int) -> tuple[int, int]:
        rows = self.size("representation.wr.weight", 0)
        given = hint(self.given, "args", "num_heads")
        if given is not None and rows % (2 * whole_number(given, "num_heads of the head")):
            raise SaccadeError(
                f"{self.reading.path}: --config has num_heads {given} for the head, but "
                f"{self.prefix}representation.wr has {rows} rows, expected a multiple of "
                f"{2 * given}. Pass the JSON of this model."
            )
        sides = [rows // (2 * given)] if given else []
        if not sides and self.has("representation.norm.weight"):
            sides = [self.size("representation.norm.weight", 0)]
        if not sides:
            # rows = 2 h m; incoming is h m^2, or with concat h m^2 + the token's width.
            wanted = {2 * width / rows for width in (incoming, incoming - self.width)}
            sides = [int(side) for side in wanted if side >= 1 and side == int(side)]
        sides = [side for side in sides if rows % (2 * side) == 0]
        if len(sides) != 1:
            raise SaccadeError(
                f"{self.reading.path}: the file does not tell how the {rows} rows of "
                f"{self.prefix}representation.wr are divided into heads. Pass it with --config: "
                '{"representationConfig": {"args": {"num_heads": 6}}}.'
            )
        return rows // (2 * sides[0]), sides[0]

    def _fusion(self, incoming: int, pooled: int) -> str:
        if not self.has("cls_fc.weight"):
            return "visual"
        if incoming == pooled + self.width:
            return "concat"
        if incoming != pooled:
            raise SaccadeError(
                f"{self.reading.path}: {self.prefix}visual_fc takes {incoming} numbers, expected "
                f"{pooled} (pooled) or {pooled + self.width} (concat). The head and the trunk come "
                "from different models. Export the checkpoint again."
            )
        kind = hint(self.given, "fusion_type")
        if kind is None:
            self.notes.append(
                "fusion: sum_fc, as released; sum_loss and aggre_all have the same tensors "
                '(--config {"representationConfig": {"fusion_type": ...}})'
            )
            return "sum"
        if kind not in FUSIONS or kind == "concat":
            expected = "sum_fc, sum_loss or aggre_all"
            raise SaccadeError(f"--config: fusion_type is {kind!r}, expected {expected}.")
        return FUSIONS[kind]


def _power(given: Mapping[str, Any]) -> dict[str, Any]:
    values = given.get("svNum", 1)
    return {
        "alpha": float(given.get("alpha", 0.5)),
        "singular_values": 0 if values is None else int(values),
        "iterations": int(given.get("iterNum", 1)),
    }
