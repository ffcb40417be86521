# SPDX-License-Identifier: Apache-2.0
"""The configuration of a Neural Attentive Circuit, and its named sizes."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Natural, NonNegative, Positive, Probability, Range, Share
from saccade.models.budget import Budget, ComputeBudget, fraction_budget
from saccade.models.config_values import ConfigValues, ImageFields, shared_fields
from saccade.models.data.listops import VOCABULARY
from saccade.models.nac.links import check_links, links_budget
from saccade.models.resolution import TokenGrid, resolution_budget
from saccade.models.trunks import (
    KNOWN,
    Activation,
    Kind,
    TrunkPort,
    TrunkShape,
    check_patches,
)

_COLOUR: dict[str, Any] = {"channels": 3, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
_WIDE: dict[str, Any] = {"dim": 128, "code_dim": 64, "ffn_dim": 256}

# For the last five, the paper states the input, the classes, and for ImageNet 1,024 modules and 8
# propagator layers; the widths were chosen for this package.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "modules": 16,
        "readout_modules": 2,
        "dim": 32,
        "code_dim": 16,
        "signature_dim": 8,
        "propagator_layers": 1,
        "heads": 2,
        "ffn_dim": 48,
    },
    "small": {},
    "bench": dict(
        height_px=32,
        width_px=32,
        patch_px=4,
        modules=256,
        propagator_layers=4,
        signature_init="random",
        **_COLOUR,
        **_WIDE,
    ),
    "tiny-imagenet": dict(
        height_px=64,
        width_px=64,
        patch_px=8,
        tokenizer="conv",
        modules=256,
        propagator_layers=8,
        classes=200,
        **_COLOUR,
        **_WIDE,
    ),
    "imagenet": dict(
        height_px=224,
        width_px=224,
        patch_px=28,
        tokenizer="conv",
        modules=1024,
        propagator_layers=8,
        classes=1000,
        **_COLOUR,
        **_WIDE,
    ),
    "points": dict(
        input="points", max_tokens=2048, modules=256, propagator_layers=4, classes=40, **_WIDE
    ),
    "listops": dict(
        input="characters",
        vocabulary=VOCABULARY,
        max_tokens=2000,
        modules=256,
        propagator_layers=4,
        **_WIDE,
    ),
    "text-bytes": dict(
        input="bytes", max_tokens=4000, modules=256, propagator_layers=4, classes=2, **_WIDE
    ),
}


Input = Literal["image", "tokens", "points", "characters", "bytes"]
Tokenizer = Literal["patch", "conv", "convnext", Kind]
Positions = Literal["learned", "sinusoidal", "concat", "none"]
ModuleActivation = Literal["gelu", "relu"]
FfnGate = Literal["none", "geglu"]
GraphPrior = Literal["scale-free", "planted-partition", "ring-of-cliques", "erdos-renyi"]
PriorForm = Literal["standard", "official"]
StructureLoss = Literal["cross-entropy", "mse", "kl", "none"]
Matching = Literal["sorted", "hungarian"]
Connectivity = Literal["learned", "frozen", "dense"]
SignatureInit = Literal["prior", "random", "barabasi-albert", "planted-partition", "watts-strogatz"]
KernelDraw = Literal["batch", "sample", "none"]
KernelClamp = Literal["fixed", "dtype"]
Confidence = Literal["state", "module", "first"]
ReadInCodes = Literal["shared", "own"]
InitialState = Literal["mlp", "code", "linear"]
Head = Literal["linear", "modulated"]
DropoutDraw = Literal["uniform", "log-uniform"]
Distance = Annotated[float, Range(0, 2, below=True)]  # of cosines; 0: none
MAX_MODULES = 4096
BUDGETS = ("1", "0.5", "0.25", "0.125")
SOURCE = "Weiss et al. 2022, Neural Attentive Circuits"
# Fields by their names in `TrunkShape`.
_TRUNK_FIELDS = {
    "dim": "trunk_dim",
    "mlp_dim": "trunk_mlp_dim",
    "pre_norm": "trunk_pre_norm",
    "activation": "trunk_activation",
    "qkv_bias": "trunk_qkv_bias",
    "layer_norm_epsilon": "trunk_epsilon",
    "window": "trunk_window",
    "trained_windows": "trunk_windows_before",
    "bottleneck": "trunk_bottleneck",
    "remainder": "trunk_remainder",
}
# The same of a trunk with stages.
_STAGE_FIELDS = {"stage_layers": "trunk_layers", "stage_heads": "trunk_heads"}


@dataclass(frozen=True)
class NACConfig(ImageFields, ConfigValues):
    """Configuration of a NAC; comments on fields mention what the paper leaves open.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Weiss et al. 2022, Neural Attentive Circuits, section 2 and 4.4.
    """

    called = "NAC"
    layer_counts = ("local_layers", "propagator_layers", "convnext_blocks", "trunk_layers")

    # image: uint8 values [b, h, w, c]; tokens: [b, n, token_dim]; points: [b, n, 3]; characters:
    # indices into the vocabulary [b, n]; bytes: uint8 [b, n]. All but images come with a length.
    input: Input = "image"
    input_sets: Literal[1, 2] = 1  # 2: a pair (image and image_b), each marked by a vector
    # for images: one linear layer per patch, three small convolutions, the stages of a ConvNeXt, or
    # a trunk (vit, swin, swinv2, resnet), whose patches or cells are the tokens
    tokenizer: Tokenizer = "patch"
    height_px: Count = 8
    width_px: Count = 8
    channels: Count = 1
    mean: tuple[float, ...] = (0.5,)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (0.5,)
    patch_px: Count = 2
    token_dim: Natural = 0  # width of an input token
    max_tokens: Natural = 0  # most input tokens, and their positions; 0: any number, a set
    # For max_tokens tokens, characters or bytes, and convnext's grid; concat: after its features
    positions: Positions = "learned"
    vocabulary: tuple[str, ...] = ()  # the meanings of character indices
    local_layers: Natural = 0  # for characters and bytes: residual convolutions
    local_width: Count = 5  # width of such a convolution, odd
    point_bands: Natural = 4  # octaves of the Fourier features of a point's coordinates
    modules: Annotated[int, Range(1, MAX_MODULES)] = 64  # processor modules
    readout_modules: Count = 4
    dim: Count = 64  # width of a module's state
    code_dim: Count = 32
    signature_dim: Count = 16
    propagator_layers: Natural = 2
    heads: Count = 4  # of the propagators; read-in and read-out have `read_heads`
    ffn_dim: Count = 128
    classes: Count = 10
    activation: ModuleActivation = "gelu"  # between the two layers of a ModFFN
    # geglu: a first layer of width 2 ffn_dim, one half times the GELU of the other
    ffn_gate: FfnGate = "none"
    alpha: float = 0.1  # initial strength of a ModFC's modulation; learned
    modfc_one: bool = True  # False: a ModFC's gain is LayerNorm(W_c c), without the 1 and alpha
    modfc_norm_affine: bool = True  # False: that LayerNorm has no weight and bias
    read_norm: bool = True  # LayerNorm before the ModFFN of read-in and read-out, and on the
    # processor states that the read-out polls
    # first: no confidences; the first read-out module's state gives the answer
    # state, module: a read-out module's scalar is linear in its state, or a constant
    confidence: Confidence = "state"
    confidence_noise: bool = False  # training adds Gumbel noise to these scalars
    epsilon: Positive = 0.25  # bandwidth of the kernel, in units of cosine distance
    tau: Positive = 0.5  # temperature of the Concrete sample, training only
    delta: NonNegative = 1e-6  # in eq. 3's denominator; cancels, so the bias ignores it
    p_min: Probability = 1e-6  # link probabilities are clamped before sampling
    p_max: Probability = 1 - 1e-4
    # dtype: clamp to what the type distinguishes from 0 and 1; also clamp the sample
    kernel_clamp: KernelClamp = "fixed"
    # training draws one kernel per layer for the batch, or one per sample, or none: K = P, as in
    # evaluation
    kernel_draw: KernelDraw = "batch"
    truncate: Distance = 0.0  # links of a larger cosine distance are cut (K = 0); 0: none
    truncate_read_out: bool = True  # False: the read-out is not truncated
    # senders of a processor module in evaluation, those of its strongest links; 0: all
    links: Natural = 0
    # learn a bandwidth for each propagator and one for the read-out
    epsilon_learned: bool = False
    # frozen: signatures without gradient; dense: no kernel
    connectivity: Connectivity = "learned"
    modulation: bool = True  # False: a ModFC is a plain layer; with dense, a Perceiver IO
    # Start from the graph prior, at random, or from one drawn graph; frozen links: not at random.
    signature_init: SignatureInit = "prior"
    graph_prior: GraphPrior = "scale-free"
    graph_degree: Positive = 8.0  # mean expected degree (scale-free, erdos-renyi)
    graph_group: Count = 16  # modules per group or clique (planted-partition, ring-of-cliques)
    # link probability in a group or clique, and of a ring's bridges
    graph_inside: Probability = 0.8
    graph_outside: Probability = 0.02  # link probability between groups
    # official: the targets of the authors' code, including the diagonal
    prior_form: PriorForm = "standard"
    structure_loss: StructureLoss = "cross-entropy"  # off the diagonal; mse, kl: all pairs
    structure_clip: NonNegative = 0.0  # least value of a pair's term in that loss
    repulsion: Distance = 0.0  # push signatures closer than this apart; 0: none
    matching: Matching = "sorted"  # to the prior: by degree or spectrum; hungarian: by row
    graph_refresh_steps: Count = 20  # steps between searches of the permutation
    conditional: bool = False  # one circuit per sample, from `condition` or the tokens
    condition_dim: Natural = 0  # width of a condition token; 0: the input tokens are the condition
    condition_tokens: Natural = 0  # most condition tokens: the fixed axis of an export
    generator_modules: int = 0  # queries of the conditional generator; 0: as many as modules
    # smallest fraction of modules to keep in a training step; 1: off
    module_dropout: Annotated[float, Range(0, 1, above=True)] = 1.0
    # in training: share of samples for which a propagator's residual is left out
    drop_path: Annotated[float, Range(0, 1, below=True)] = 0.0
    code_noise: Share = 0.0  # training moves code components by up to this share
    dropout_draw: DropoutDraw = "uniform"  # of the fraction, between module_dropout and 1
    dropout_ordered: Share = 0.8  # share of steps that keep the best connected modules, which are
    # the ones that a budget keeps, instead of a random subset
    # Features of the authors' code that the paper does not mention; docs/nac.md compares the three.
    convnext_blocks: tuple[Natural, ...] = ()  # for tokenizer convnext: blocks per stage
    convnext_widths: tuple[Count, ...] = ()  # channels per stage
    token_width: Natural = 0  # width of a token in the read-in; 0: dim
    # own: the read-in has a separate table of codes
    read_in_codes: ReadInCodes = "shared"
    # this many modules read the tokens, and the processor modules, which start from their own
    # codes, attend to them in every layer; 0: the processor modules read
    read_in_modules: Natural = 0
    # from a code: by a two-layer MLP, the code itself, or LayerNorm and a layer
    initial_state: InitialState = "mlp"
    state_noise: bool = False  # for linear: training draws around that state
    head_dim: Natural = 0  # width of a propagator's head; 0: dim / heads
    read_heads: Count = 1  # of read-in and read-out
    read_head_dim: Natural = 0  # width of each; 0: dim / read_heads
    read_in_residual: bool = False  # around the attention
    read_in_query_norm: bool = False  # LayerNorm on the states of the queries
    read_out_residual: bool = False
    read_out_query_norm: bool = False
    sender_norm: bool = False  # a separate LayerNorm for a propagator's senders
    head: Head = "linear"  # modulated: a ModFC with the first read-out code
    head_norm: bool = False  # LayerNorm before the head
    # The trunk, if it is the tokenizer: one value of a ViT's layers and heads, one per stage of a
    # Swin's or ResNet's, which has no heads. Tokens before the patches (class token, registers) are
    # not read; 0: the trunk has none.
    trunk_dim: Natural = 0
    trunk_layers: tuple[Natural, ...] = ()
    trunk_heads: tuple[Count, ...] = ()
    trunk_mlp_dim: Natural = 0
    trunk_first: Natural = 1
    trunk_pre_norm: bool = False
    trunk_activation: Activation = "gelu"
    trunk_qkv_bias: bool = True
    trunk_epsilon: Positive = 1e-6
    trunk_window: Count = 7
    trunk_windows_before: tuple[Natural, ...] = ()
    trunk_bottleneck: bool = True
    trunk_remainder: bool = False
    seed: int = 0  # of the initial weights

    def __post_init__(self) -> None:
        self._check_types()
        self._check_sizes()
        self._check_executor()
        self._check_links()

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """Return all modules, a half, a quarter and an eighth of them, without duplicates."""
        budgets: dict[int, ComputeBudget] = {}
        for text in BUDGETS:
            if Budget(text).of(self.modules):
                budget = self.budget(text)
                budgets.setdefault(budget.kept, budget)
        return tuple(budgets.values())

    def budget(self, text: str) -> ComputeBudget:
        """Return the budget that keeps this fraction of the modules, or this many links of each.

        Raises: SaccadeError if it is not a fraction in (0, 1] or keeps no module or link.
        """
        if found := resolution_budget(self, text) or links_budget(self, text):
            return found
        return fraction_budget(text, self.modules, "modules")

    def _check_sizes(self) -> None:
        for heads, width in (("heads", "head_dim"), ("read_heads", "read_head_dim")):
            fits = getattr(self, width) > 0 or self.dim % getattr(self, heads) == 0
            self._expect(heads, fits, f"a divisor of dim ({self.dim}) if {width} is 0")
        self._expect(
            "generator_modules",
            self.generator_modules == 0
            or (self.conditional and self.modules <= self.generator_modules <= MAX_MODULES),
            "0, or in a conditional NAC between modules and 4096",
        )
        gated = self.activation == "gelu" or self.ffn_gate == "none"
        self._expect("activation", gated, "'gelu' if ffn_gate is 'geglu'")
        fits = self.condition_dim > 0 or self.condition_tokens == 0
        self._expect("condition_tokens", fits, "0 if condition_dim is 0")
        self._expect("local_width", self.local_width % 2 == 1, "an odd number")
        local = self.local_layers == 0 or self.input in ("characters", "bytes")
        self._expect("local_layers", local, "0 unless input is characters or bytes")
        if self.input == "image":
            self._check_image()
        else:
            self._check_sequence()

    def _check_sequence(self) -> None:
        kind = f"if input is {self.input!r}"
        if self.input == "tokens":
            self._expect("token_dim", self.token_dim >= 1, f"at least 1 {kind}")
        else:
            self._expect("max_tokens", self.max_tokens >= 1, f"at least 1 {kind}")
        if self.input == "characters":
            words = self.vocabulary
            fits = len(words) == len(set(words)) >= 1
            self._expect("vocabulary", fits, f"at least one string, without duplicates, {kind}")

    def _check_executor(self) -> None:
        same = self.initial_state != "code" or self.code_dim == self.dim
        self._expect("code_dim", same, f"dim ({self.dim}) if initial_state is 'code'")
        noise = not self.state_noise or self.initial_state == "linear"
        self._expect("state_noise", noise, "False unless initial_state is 'linear'")
        fits = self.read_in_codes == "own" or self.read_in_modules == 0
        self._expect("read_in_codes", fits, "'own' if read_in_modules is above 0")
        generated = self.conditional and (self.read_in_codes == "own" or self.state_noise)
        self._expect("conditional", not generated, "False with read_in_codes 'own' or state_noise")
        first = self.head == "linear" or self.confidence == "first"
        self._expect("head", first, "'linear' unless confidence is 'first'")
        drawn = not self.confidence_noise or self.confidence != "first"
        self._expect("confidence_noise", drawn, "False if confidence is 'first'")
        grid = self.input == "image" and self.tokenizer == "convnext"
        placed = self.positions != "concat" or grid
        self._expect("positions", placed, "'concat' only for images with tokenizer 'convnext'")

    def _check_convnext(self) -> None:
        blocks, widths = self.convnext_blocks, self.convnext_widths
        self._expect("convnext_blocks", len(blocks) >= 1, "one whole number per stage")
        self._expect("convnext_widths", len(widths) == len(blocks), "one width per stage")
        position_width = self.tokens_width - widths[-1]
        fits = position_width >= 1 if self.positions == "concat" else position_width == 0
        self._expect("token_width", fits, "the last of convnext_widths, or more with concat")
        self._expect("positions", self.positions != "sinusoidal", "learned, concat or none")

    def _check_image(self) -> None:
        if self.tokenizer == "convnext":
            self._check_convnext()
        if self.trunk is not None:
            self._check_trunk(self.trunk)
        side = self.token_px
        fits = self.height_px % side == 0 and self.width_px % side == 0
        if self.trunk is not None and self.trunk.is_vit:
            fits = self.trunk.whole_patches
        size = f"a divisor of height_px ({self.height_px}) and width_px ({self.width_px})"
        name = "patch_px" if self.tokenizer != "convnext" else "convnext_widths"
        self._expect(name, fits, size if name == "patch_px" else f"stages that give {side}, {size}")
        self._check_pixels()

    def _check_trunk(self, trunk: TrunkShape) -> None:
        counts = len(self.trunk_layers)
        self._expect("trunk_dim", self.trunk_dim >= 1, f"at least 1 with tokenizer {trunk.trunk}")
        expected = "one value" if trunk.is_vit else "one value per stage"
        self._expect("trunk_layers", counts == 1 if trunk.is_vit else counts >= 1, expected)
        if not trunk.is_resnet:
            self._expect("trunk_heads", len(self.trunk_heads) == counts, f"{counts} values")
            self._expect("trunk_heads", trunk.heads_fit(), "divisors of the widths")
            self._expect("trunk_mlp_dim", self.trunk_mlp_dim >= 1, "at least 1")
        if misfit := None if trunk.is_vit else trunk.misfit():
            name = (_TRUNK_FIELDS | _STAGE_FIELDS).get(misfit[0], misfit[0])
            self._expect(name, False, misfit[1])
        self._expect("token_width", self.tokens_width == trunk.width, f"{trunk.width}, the trunk's")

    def _check_links(self) -> None:
        if self.links:
            check_links(
                replace(self, links=0), self.links, self.modules, "NAC configuration, links"
            )
        self._expect("p_min", self.p_min < self.p_max, f"below p_max ({self.p_max})")
        random_and_frozen = self.signature_init == "random" and self.connectivity == "frozen"
        self._expect("signature_init", not random_and_frozen, "a graph if links are frozen")
        official = self.prior_form == "standard" or self.graph_prior != "erdos-renyi"
        self._expect("prior_form", official, "'standard' if graph_prior is 'erdos-renyi'")

    @property
    def tokens(self) -> int | None:
        """Number of tokens of an image; None if the input decides."""
        return None if (grid := self.token_grid) is None else grid.rows * grid.columns

    @property
    def token_grid(self) -> TokenGrid | None:
        """The tokens of an image; None if the input is another."""
        if self.input != "image":
            return None
        grid = TokenGrid(self.height_px // self.token_px, self.width_px // self.token_px)
        if (trunk := self.trunk) is None:
            return grid
        return replace(trunk.image_grid, rows=grid.rows, columns=grid.columns)

    @property
    def token_px(self) -> int:
        """Side in pixels of the square that a token of an image represents."""
        if self.tokenizer == "convnext":
            return 4 * 2 ** (len(self.convnext_widths) - 1)
        return self.patch_px if self.trunk is None else self.trunk.token_px

    @property
    def trunk(self) -> TrunkShape | None:
        """The trunk that makes the tokens, if there is one."""
        if self.input != "image" or self.tokenizer not in get_args(Kind):
            return None
        vit = self.tokenizer == "vit"
        return TrunkShape(
            **shared_fields(ImageFields, self),
            **{name: getattr(self, field) for name, field in _TRUNK_FIELDS.items()},
            patch_px=self.patch_px,
            trunk=self.tokenizer,  # type: ignore[arg-type]
            patches_only=vit and not self.trunk_first,
            registers=max(0, self.trunk_first - 1),
            layers=sum(self.trunk_layers) if vit else 0,
            heads=self.trunk_heads[0] if vit and self.trunk_heads else 1,
            stage_layers=() if vit else self.trunk_layers,
            stage_heads=() if vit else self.trunk_heads,
        )

    @property
    def tokens_width(self) -> int:
        """Channels of a token in the read-in."""
        return self.token_width or self.dim

    @property
    def read_width(self) -> int:
        """Channels of a query in read-in and read-out."""
        return self.read_heads * self.read_head_dim or self.dim

    @property
    def attention_width(self) -> int:
        """Channels of a query in a propagator."""
        return self.heads * self.head_dim or self.dim


PRESETS = {name: NACConfig(**fields) for name, fields in SIZES.items()}


class NACTrunk(TrunkPort):
    """The trunk whose patches a NAC reads, given to other models and taken from them.

    Source: Weiss et al. 2022, section 4.4: a frozen pretrained backbone preprocesses the images.
    """

    config_class = NACConfig

    def shape(self, name: str, config: NACConfig) -> TrunkShape:
        """Return the shape of the tokenizer, if it is a trunk."""
        if config.trunk is None:
            raise SaccadeError(
                f"--trunk {name}: this NAC reads its input through the tokenizer "
                f"'{config.tokenizer}', not a trunk. Pass {KNOWN}."
            )
        return config.trunk

    def place(self, config: NACConfig) -> str:
        """Return the beginning of the names of the trunk's tensors."""
        return "tokenizer.trunk." if config.input_sets == 1 else "tokenizer.each.trunk."

    def fields(self, shape: TrunkShape) -> dict[str, Any]:
        """Return the fields of images, tokenizer and trunk."""
        check_patches(shape)
        return {
            **shared_fields(ImageFields, shape),
            **{field: getattr(shape, name) for name, field in _TRUNK_FIELDS.items()},
            "patch_px": shape.patch_px,
            "input": "image",
            "tokenizer": shape.trunk,
            "token_width": shape.width,
            "trunk_layers": (shape.layers,) if shape.is_vit else shape.stage_layers,
            "trunk_heads": (shape.heads,) if shape.is_vit else shape.stage_heads,
            "trunk_first": shape.specials + shape.registers if shape.is_vit else 1,
        }


TRUNK = NACTrunk()
