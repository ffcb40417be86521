# SPDX-License-Identifier: Apache-2.0
"""The configuration of an image and text model with slots, and its named sizes."""

from dataclasses import dataclass
from typing import Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Natural, Positive
from saccade.models.budget import ComputeBudget, fraction_budget
from saccade.models.config_values import ConfigValues, shared_fields
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.resnet_sizes import EXPANSION
from saccade.models.resolution import TokenGrid, or_smaller, resolution_budget
from saccade.models.trunks import TrunkFields, TrunkShape

REPRESENTATIONS = ("cont", "sqrtsem", "sem")
WEIGHTS = ("const", "norm", "sqrtsoftmax", "softmax")
UNPROJECTED = ("map", "mean")  # poolings whose result is as wide as the tokens
GATES = ("sqrtsoftmax", "softmax")  # these weight a slot by its first channel
Pooling = Literal["sparo", "cls", "gap", "attention", "codebook", "map", "mean"]
TextPooling = Literal["same", "eos", "attention"]
Tokenizer = Literal["clip", "words", "custom"]
PROBE_FEATURES = "probe_features"  # the output with the features of DINO's linear probe
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ReadOutShape:
    """The sizes of one tower's read-out.

    `head_of` has, for each slot, the index of the one of `heads` that it reads. Slots of one head
    share its keys and values.
    """

    dim: int  # of the tokens
    head_of: tuple[int, ...]
    attn_dim: int
    value_dim: int
    slot_dim: int
    gated: bool  # the projection has one more channel
    share_kv: bool

    @property
    def heads(self) -> int:
        """Number of heads that some slot reads."""
        return max(self.head_of) + 1


@dataclass(frozen=True)
class PoolerShape:
    """The sizes of one tower's attentional pooler."""

    queries: int
    heads: int
    mean: bool  # average all queries' answers; otherwise take the first


@dataclass(frozen=True)
class SparoConfig(TrunkFields, ConfigValues):
    """Configuration of two towers (or only the image tower) and of the pooling of their tokens.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Vani et al. 2024, SPARO, section 3; baselines from table B.2 and from OpenCLIP v2.20.
    """

    called = "SPARO"
    layer_counts = ("image_layers", "text_layers", "stage_layers")
    long_lists = ("kept",)

    height_px: Count = 224
    width_px: Count = 224
    channels: Count = 3
    mean: tuple[float, ...] = CLIP_MEAN  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = CLIP_STD
    patch_px: Count = 32
    patch_bias: bool = False  # True in DINO, False in CLIP
    pre_norm: bool = True  # CLIP normalizes the tokens before the first block
    image_width: Count = 768  # of the tokens that are pooled
    image_layers: Natural = 12  # of a ViT; the others have `stage_layers`
    image_heads: Count = 12
    image_hidden: Count = 3072
    eps: Positive = 1e-5  # of every LayerNorm; DINO: 1e-6
    text: bool = True  # False: only the image tower, as in DINO
    context_length: Count = 77
    vocabulary: Count = 49408
    text_width: Count = 512
    text_layers: Natural = 12
    text_heads: Count = 8
    text_hidden: Count = 2048
    tokenizer: Tokenizer = "clip"  # words: uses `words`; custom: uses `merges`
    words: tuple[str, ...] = ()
    merges: tuple[str, ...] = ()  # pairs of letters separated by a space; empty: unknown
    end_token: Natural = 0  # the id that ends a text; 0: the largest id of the text
    reduce_depth: Natural = 0  # blocks left out of both towers; SPARO replaces the last one
    pooling: Pooling = "sparo"
    text_pooling: TextPooling = "same"  # same: the image's; for cls and gap, the end token's state
    embed_dim: Count = 512  # of baselines; with slots: slots x slot_dim
    bottleneck_dim: Natural = 0  # of baselines: width before a last affine layer
    codes: Count = 16384  # entries of the codebook
    temperature: Positive = 1000.0  # of the sparsemax over the codes
    queries: Count = 256  # of the attentional pooler
    pooler_heads: Count = 8
    mean_of_queries: bool = False  # average the image pooler's answers; else take the first
    text_queries: Natural = 0  # 0: as for the image
    text_pooler_heads: Natural = 0
    text_mean_of_queries: bool = False
    slots: Count = 64  # L
    slot_dim: Count = 64  # V
    attn_dim: Natural = 0  # D; 0: the width of a head of the tower's trunk
    value_dim: Natural = 0  # 0: D
    slot_heads: Natural = 0  # pairs of key and value; 0: one per slot, else a divisor of slots
    share_kv: bool = True
    share_queries: bool = False  # one set of queries for both towers
    sparo_type: str = "cont:const"  # how slots become a unit code; the default is eq. 2
    kept: tuple[Natural, ...] = ()  # remaining slots, ascending; empty: all
    masked: bool = False  # multiply the image code by `slot_mask` and normalize it
    seed: int = 0  # of the initial weights

    def __post_init__(self) -> None:
        self._check_types()
        self._check_image()
        self._check_text()
        self._check_pooling()
        if self.pooling == "sparo":
            self._check_slots()

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """Return all, half and a quarter of the slots, where they differ; a baseline has one."""
        budgets: dict[int, ComputeBudget] = {}
        for text in ("1", "0.5", "0.25") if self.pooling == "sparo" else ("1",):
            if text == "1" or float(text) * len(self.kept_slots) >= 1:
                budget = self.budget(text)
                budgets.setdefault(budget.kept, budget)
        return tuple(budgets.values())

    def budget(self, text: str) -> ComputeBudget:
        """Return the budget that keeps a fraction of the slots.

        Raises: SaccadeError if it is not a fraction in (0, 1], keeps no slot, or is below 1 for
            a baseline.
        """
        if found := resolution_budget(self, text):
            return found
        if self.pooling == "sparo":
            return fraction_budget(text, len(self.kept_slots), "slots")
        budget = fraction_budget(text, 1, "slots")
        if budget.share != 1:
            raise SaccadeError(
                f"budget {text}: a model with pooling '{self.pooling}' has no slots to "
                f"leave out. Pass --budget 1{or_smaller(self)}."
            )
        return budget

    def _check_image(self) -> None:
        for name in ("height_px", "width_px"):
            fits = self.shape.whole_patches or getattr(self, name) % self.patch_px == 0
            self._expect(name, fits, f"a multiple of patch_px ({self.patch_px})")
        self._check_pixels()
        divides = self.image_width % self.image_heads == 0
        self._expect("image_heads", divides, f"a divisor of image_width ({self.image_width})")
        least = min(self.image_layers, self.text_layers if self.text else self.image_layers)
        least = least if self.trunk == "vit" else 0
        self._expect("reduce_depth", self.reduce_depth <= least, f"at most {least}")
        if self.trunk != "vit":
            self._check_stages()

    def _check_stages(self) -> None:
        if misfit := self.shape.misfit():
            self._expect(misfit[0], False, misfit[1])
        fits = self.image_width == self.shape.width
        self._expect("image_width", fits, f"a width that {len(self.stage_layers)} stages divide")

    def _check_text(self) -> None:
        if not self.text:
            self._expect("share_queries", not self.share_queries, "false without a text tower")
            return
        divides = self.text_width % self.text_heads == 0
        self._expect("text_heads", divides, f"a divisor of text_width ({self.text_width})")
        self._expect("vocabulary", self.vocabulary >= 3, "at least 3: start, end and a word")
        self._expect("end_token", self.end_token < self.vocabulary, f"below {self.vocabulary}")
        if self.tokenizer == "words":
            count = len(self.words) + 4
            fits = bool(self.words) and self.vocabulary == count and self.end_token == 2
            self._expect("words", fits, "vocabulary - 4 words, with end_token 2")
        fits = not self.merges or len(self.merges) == self.vocabulary - 514
        self._expect("merges", fits, "vocabulary - 514 pairs, or none")

    def _check_pooling(self) -> None:
        first = self.pooling != "cls" or self.first_tokens > 0
        self._expect("pooling", first, "another one: this trunk has no class token")
        fits = not (self.patches_only and (self.registers or self.trunk != "vit"))
        self._expect("patches_only", fits, "false unless the trunk is a ViT without registers")
        if self.pooling in UNPROJECTED:
            fits = self.embed_dim == self.image_width
            expected = f"image_width ({self.image_width}) if pooling is {self.pooling}"
            self._expect("embed_dim", fits, expected)
        whole = self.pooling in ("sparo", "codebook")
        fits = not whole or self.text_pooling == "same"
        self._expect("text_pooling", fits, f"'same' if pooling is {self.pooling}")
        fits = not (self.pooling in ("sparo", *UNPROJECTED) and self.bottleneck_dim)
        self._expect("bottleneck_dim", fits, f"0 if pooling is {self.pooling}")
        for tower in ("image", "text"):
            attends = self.pools_by_attention(tower)
            prefix = "" if tower == "image" else "text_"
            fits = attends or not getattr(self, f"{prefix}mean_of_queries")
            self._expect(f"{prefix}mean_of_queries", fits, "false without an attentional pooler")
            if attends:
                heads = getattr(self, f"{prefix}pooler_heads")
                fits = self.feature_dim % self.pooler(tower).heads == 0
                expected = f"a divisor of the pooled width ({self.feature_dim})"
                self._expect(f"{prefix}pooler_heads" if heads else "pooler_heads", fits, expected)

    def _check_slots(self) -> None:
        rep, _, weight = self.sparo_type.partition(":")
        fits = rep in REPRESENTATIONS and weight in WEIGHTS and self.sparo_type != "sem:norm"
        kinds = f"{'|'.join(REPRESENTATIONS)}:{'|'.join(WEIGHTS)}, but not sem:norm"
        self._expect("sparo_type", fits, kinds)
        heads = self.slot_heads or self.slots
        fits = self.slots % heads == 0
        self._expect("slot_heads", fits, f"0 or a divisor of slots ({self.slots})")
        order = all(a < b for a, b in zip(self.kept, self.kept[1:], strict=False))
        fits = order and all(slot < self.slots for slot in self.kept)
        self._expect("kept", fits, f"ascending numbers from 0 to {self.slots - 1}")
        towers = [self.read_out("image"), *([self.read_out("text")] if self.text else [])]
        if self.share_kv:
            fits = all(tower.value_dim == tower.attn_dim for tower in towers)
            self._expect("value_dim", fits, "0 or attn_dim if keys and values are shared")
        if self.share_queries:
            fits = len({tower.attn_dim for tower in towers}) == 1
            self._expect("share_queries", fits, "false, or attn_dim set, where the towers differ")

    @property
    def first_tokens(self) -> int:
        """Number of tokens before the patches: the class token and the registers."""
        return 0 if self.patches_only or self.trunk != "vit" else 1 + self.registers

    @property
    def image_tokens(self) -> int:
        """Number of a ViT's patches and of the tokens before them."""
        patches = (self.height_px // self.patch_px) * (self.width_px // self.patch_px)
        return patches + self.first_tokens

    @property
    def shape(self) -> TrunkShape:
        """The sizes of the image tower."""
        vit = self.trunk == "vit"
        # The other trunks widen from stage to stage.
        wider = 1 if vit else 2 ** max(0, len(self.stage_layers) - 1)
        if self.trunk == "resnet" and self.bottleneck:
            wider *= EXPANSION
        return TrunkShape(
            **shared_fields(TrunkFields, self),
            dim=self.image_width // wider,
            layer_norm_epsilon=self.eps,
            layers=self.image_layers - self.reduce_depth if vit else 0,
            heads=self.image_heads,
            mlp_dim=self.image_hidden,
        )

    @property
    def token_grid(self) -> TokenGrid:
        """The tokens of an image."""
        return self.shape.image_grid

    @property
    def kept_slots(self) -> tuple[int, ...]:
        """The slots of this model, by their number in the full model."""
        return self.kept or tuple(range(self.slots))

    @property
    def feature_dim(self) -> int:
        """Width of a pooled feature before the bottleneck's affine layer, if there is one."""
        return self.bottleneck_dim or self.embed_dim

    def pools_by_attention(self, tower: str) -> bool:
        """Return True if the `image` or `text` tower has an attentional pooler."""
        if tower == "image" or (self.text and self.text_pooling == "same"):
            return self.pooling == "attention"
        return self.text and self.text_pooling == "attention"

    def pooler(self, tower: str) -> PoolerShape:
        """Return the sizes of the attentional pooler of `image` or `text`."""
        if tower == "image":
            return PoolerShape(self.queries, self.pooler_heads, self.mean_of_queries)
        queries, heads = self.text_queries, self.text_pooler_heads
        mean = self.text_mean_of_queries
        return PoolerShape(queries or self.queries, heads or self.pooler_heads, mean)

    @property
    def code_dim(self) -> int:
        """Width of an embedding."""
        return len(self.kept_slots) * self.slot_dim if self.pooling == "sparo" else self.embed_dim

    @property
    def trunk_norm(self) -> str:
        """Name of the module that normalizes all tokens of an image, the last one of a trunk."""
        names = {"attention": "norm_tokens", "codebook": "map.norm"}
        return f"image_pool.{names.get(self.pooling, 'norm')}"

    def read_out(self, tower: str) -> ReadOutShape:
        """Return the sizes of the read-out of `image` or `text`."""
        width, heads = (
            (self.image_width, self.image_heads)
            if tower == "image"
            else (self.text_width, self.text_heads)
        )
        group = self.slots // (self.slot_heads or self.slots)
        used = sorted({slot // group for slot in self.kept_slots})
        attn_dim = self.attn_dim or width // heads
        return ReadOutShape(
            dim=width,
            head_of=tuple(used.index(slot // group) for slot in self.kept_slots),
            attn_dim=attn_dim,
            value_dim=self.value_dim or attn_dim,
            slot_dim=self.slot_dim,
            gated=self.sparo_type.partition(":")[2] in GATES,
            share_kv=self.share_kv,
        )


# Images of 40 x 40 px: 256 calibration images leave room for the weights in 3 MiB.
SMALL: dict[str, Any] = {
    "height_px": 40,
    "width_px": 40,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
    "patch_px": 5,
    "image_width": 80,
    "image_layers": 4,
    "image_heads": 4,
    "image_hidden": 240,
    "text_width": 64,
    "text_layers": 3,
    "text_heads": 4,
    "text_hidden": 128,
    "tokenizer": "words",
    "end_token": 2,
    "embed_dim": 128,
    "slots": 16,
    "slot_dim": 16,
    "attn_dim": 24,
}
_TINY_WORDS = ("a", "red", "green", "blue", "circle", "square", "left", "of")

_PRESETS: dict[str, dict[str, Any]] = {
    "vit-b-32-sparo": {"reduce_depth": 1},
    "vit-b-16-sparo": {"reduce_depth": 1, "patch_px": 16},
    "vit-b-32-sparo-l128": {"reduce_depth": 1, "slots": 128},
    "vit-b-32": {"pooling": "cls"},
    "vit-b-16": {"pooling": "cls", "patch_px": 16},
    "vit-b-32-gap": {"pooling": "gap"},
    "vit-b-32-bottleneck": {"pooling": "cls", "bottleneck_dim": 64},
    "vit-b-32-fdt": {"pooling": "codebook"},
    "siglip-b-16": {
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "patch_px": 16,
        "patch_bias": True,
        "pre_norm": False,
        "patches_only": True,
        "activation": "gelu_tanh",
        "eps": 1e-6,
        "text": False,
        "pooling": "map",
        "embed_dim": 768,
    },
    "dino-vit-s-16-sparo": {
        "patch_px": 16,
        "patch_bias": True,
        "pre_norm": False,
        "image_width": 384,
        "image_heads": 6,
        "image_hidden": 1536,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "eps": 1e-6,
        "text": False,
        "reduce_depth": 1,
        "sparo_type": "cont:norm",
    },
    "sparo-tiny": SMALL
    | {
        "height_px": 16,
        "width_px": 16,
        "patch_px": 4,
        "image_width": 32,
        "image_layers": 1,
        "image_hidden": 64,
        "context_length": 8,
        "vocabulary": len(_TINY_WORDS) + 4,
        "words": _TINY_WORDS,
        "text_width": 24,
        "text_layers": 1,
        "text_heads": 2,
        "text_hidden": 48,
        "slots": 8,
        "slot_dim": 4,
        "attn_dim": 8,
    },
}
PRESETS = {name: SparoConfig(**values) for name, values in _PRESETS.items()}
SOURCE = (
    "Vani et al. 2024, SPARO: Selective Attention for Robust and Compositional Transformer "
    "Encodings for Vision"
)
