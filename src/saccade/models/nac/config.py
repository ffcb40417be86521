# SPDX-License-Identifier: Apache-2.0
"""Everything that is decided about a Neural Attentive Circuit before its weights exist."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from saccade.models.config_values import ConfigValues
from saccade.models.data.listops import VOCABULARY
from saccade.schema import Count, Natural, NonNegative, Positive, Probability, Range, Share

_COLOUR: dict[str, Any] = {"channels": 3, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
_WIDE: dict[str, Any] = {"dim": 128, "code_dim": 64, "ffn_dim": 256}

# Of the last five the paper states the input, the classes, and for ImageNet 1,024 modules and 8
# propagator layers; the widths are this package's.
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
Tokenizer = Literal["patch", "conv", "convnext"]
Positions = Literal["learned", "sinusoidal", "concat", "none"]
Activation = Literal["gelu", "relu"]
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
SOURCE = "Weiss et al. 2022, Neural Attentive Circuits"


@dataclass(frozen=True)
class NACConfig(ConfigValues):
    """Configuration of a NAC; the comment of a field says what the paper leaves open.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Weiss et al. 2022, Neural Attentive Circuits, section 2 and 4.4.
    """

    called = "NAC"
    layer_counts = ("local_layers", "propagator_layers", "convnext_blocks")

    # image: uint8 values [b, h, w, c]; tokens: [b, n, token_dim]; points: [b, n, 3]; characters:
    # indices into the vocabulary [b, n]; bytes: uint8 [b, n]. All but images come with a length.
    input: Input = "image"
    input_sets: int = 1  # 2: a pair of inputs (image and image_b), each marked with its own vector
    # of images: one linear layer per patch, three small convolutions, or the stages of a ConvNeXt
    tokenizer: Tokenizer = "patch"
    height_px: Count = 8
    width_px: Count = 8
    channels: Count = 1
    mean: tuple[float, ...] = (0.5,)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (0.5,)
    patch_px: Count = 2
    token_dim: Natural = 0  # width of a token that comes in
    max_tokens: Natural = 0  # most tokens that come in, and positions for them; 0: any, a set
    # Of max_tokens tokens, characters or bytes, and of convnext's grid; concat: behind its features
    positions: Positions = "learned"
    vocabulary: tuple[str, ...] = ()  # what the indices of characters stand for
    local_layers: Natural = 0  # of characters and bytes: convolutions over neighbours, residual
    local_width: Count = 5  # places that such a convolution sees, odd
    point_bands: Natural = 4  # octaves of the Fourier features of a point's coordinates
    modules: Count = 64  # processor modules, 1 to 4,096
    readout_modules: Count = 4
    dim: Count = 64  # width of a module's state
    code_dim: Count = 32
    signature_dim: Count = 16
    propagator_layers: Natural = 2
    heads: Count = 4  # of the propagators; read-in and read-out have one
    ffn_dim: Count = 128
    classes: Count = 10
    activation: Activation = "gelu"  # between the two layers of a ModFFN
    # geglu: a first layer of 2 ffn_dim, half of it times the GELU of half
    ffn_gate: FfnGate = "none"
    alpha: float = 0.1  # initial strength of a ModFC's modulation, then learned
    modfc_one: bool = True  # False: a ModFC's gain is LayerNorm(W_c c), without the 1 and alpha
    modfc_norm_affine: bool = True  # False: that LayerNorm has no weight and bias
    read_norm: bool = True  # LayerNorm in front of the read-in's and read-out's ModFFN, and on
    # the processor states that the read-out polls
    # first: no confidences, the answer is made of the first read-out module's state
    # a read-out module's scalar: linear in its state, or a constant
    confidence: Confidence = "state"
    epsilon: Positive = 0.25  # bandwidth of the kernel, in units of cosine distance
    tau: Positive = 0.5  # temperature of the Concrete sample, training only
    delta: NonNegative = 1e-6  # in eq. 3's denominator, where it cancels: the bias does not need it
    p_min: Probability = 1e-6  # link probabilities are clamped before sampling
    p_max: Probability = 1 - 1e-4
    # dtype: instead to what the type tells from 0 and 1, the sample too
    kernel_clamp: KernelClamp = "fixed"
    # training draws one kernel a layer for the batch, or one a sample, or none: K = P, as in
    # evaluation
    kernel_draw: KernelDraw = "batch"
    truncate: Distance = 0.0  # links of a larger cosine distance are cut (K = 0); 0: none
    truncate_read_out: bool = True  # False: the read-out hears at any distance
    # a bandwidth for each propagator and one for the read-out, learned
    epsilon_learned: bool = False
    # frozen: signatures without gradient; dense: no kernel at all
    connectivity: Connectivity = "learned"
    modulation: bool = True  # False: a ModFC is a plain layer; with dense, a Perceiver IO
    # Start at the graph prior, at random, or as one drawn graph; frozen links not at random.
    signature_init: SignatureInit = "prior"
    graph_prior: GraphPrior = "scale-free"
    graph_degree: Positive = 8.0  # mean expected degree (scale-free, erdos-renyi)
    graph_group: Count = 16  # modules of a group or clique (planted-partition, ring-of-cliques)
    # link probability in a group, a clique, and of a ring's bridges
    graph_inside: Probability = 0.8
    graph_outside: Probability = 0.02  # link probability between groups
    # official: the targets of the authors' code, diagonal included
    prior_form: PriorForm = "standard"
    structure_loss: StructureLoss = "cross-entropy"  # off the diagonal; mse and kl: over all pairs
    structure_clip: NonNegative = 0.0  # least value of a pair's term in that loss
    repulsion: Distance = 0.0  # signatures closer than this distance are pushed apart; 0: none
    matching: Matching = "sorted"  # onto the prior: by degree or spectrum; hungarian: row by row
    graph_refresh_steps: Count = 20  # the permutation onto the prior is found anew every so often
    conditional: bool = False  # a circuit a sample: generated from `condition`, or the tokens
    condition_dim: Natural = 0  # width of a condition token; 0: the input tokens are the condition
    condition_tokens: Natural = 0  # most condition tokens: the fixed axis of an exported model
    generator_modules: int = 0  # queries of the conditional generator; 0: as many as modules
    # smallest fraction of modules kept in a training step; 1: off
    module_dropout: Annotated[float, Range(0, 1, above=True)] = 1.0
    # share of samples that a propagator's residual is left out for, training
    drop_path: Annotated[float, Range(0, 1, below=True)] = 0.0
    code_noise: Share = 0.0  # training moves each component of a code by up to this share of itself
    dropout_draw: DropoutDraw = "uniform"  # of the fraction, between module_dropout and 1
    dropout_ordered: Share = 0.8  # share of steps that keep the best connected modules instead of
    # a random subset: those are the ones that a budget keeps
    # What the authors' code has and the paper's text has not; docs/nac.md compares the three.
    convnext_blocks: tuple[Natural, ...] = ()  # of tokenizer convnext: blocks of each stage
    convnext_widths: tuple[Count, ...] = ()  # and its channels
    token_width: Natural = 0  # of a token that the read-in sees; 0: dim
    # own: the read-in has a table of codes beside the processor's
    read_in_codes: ReadInCodes = "shared"
    # that many modules read the tokens, and are heard in every layer by the processor modules,
    # which start from their own codes; 0: the processor modules read
    read_in_modules: Natural = 0
    # of a code: a two-layer MLP, the code itself, or LayerNorm and a layer
    initial_state: InitialState = "mlp"
    state_noise: bool = False  # linear: each training step draws around that state
    head_dim: Natural = 0  # of a propagator's head; 0: dim / heads
    read_heads: Count = 1  # of read-in and read-out
    read_head_dim: Natural = 0  # width of each; 0: dim / read_heads
    read_in_residual: bool = False  # around the attention
    read_in_query_norm: bool = False  # LayerNorm on the states that ask
    read_out_residual: bool = False
    read_out_query_norm: bool = False
    sender_norm: bool = False  # a propagator's senders have a LayerNorm of their own
    head: Head = "linear"  # modulated: a ModFC with the first read-out module's code
    head_norm: bool = False  # LayerNorm in front of the head
    seed: int = 0  # of the initial weights

    def __post_init__(self) -> None:
        self._check_types()
        self._check_sizes()
        self._check_executor()
        self._check_links()

    def _check_sizes(self) -> None:
        self._expect("modules", self.modules <= MAX_MODULES, f"at most {MAX_MODULES}")
        for heads, width in (("heads", "head_dim"), ("read_heads", "read_head_dim")):
            fits = getattr(self, width) > 0 or self.dim % getattr(self, heads) == 0
            self._expect(heads, fits, f"a divisor of dim ({self.dim}) where {width} is 0")
        self._expect(
            "generator_modules",
            self.generator_modules == 0
            or (self.conditional and self.modules <= self.generator_modules <= MAX_MODULES),
            "0, or in a conditional NAC between modules and 4096",
        )
        self._expect("input_sets", self.input_sets in (1, 2), "1, or 2 for a pair of inputs")
        gated = self.activation == "gelu" or self.ffn_gate == "none"
        self._expect("activation", gated, "'gelu' where ffn_gate is 'geglu'")
        given = self.condition_dim > 0 or self.condition_tokens == 0
        self._expect("condition_tokens", given, "0 where condition_dim is 0")
        self._expect("local_width", self.local_width % 2 == 1, "odd, so that a place has a middle")
        local = self.local_layers == 0 or self.input in ("characters", "bytes")
        self._expect("local_layers", local, "0 where input is neither characters nor bytes")
        if self.input == "image":
            self._check_image()
        else:
            self._check_sequence()

    def _check_sequence(self) -> None:
        kind = f"where input is {self.input!r}"
        if self.input == "tokens":
            self._expect("token_dim", self.token_dim >= 1, f"at least 1 {kind}")
        else:
            self._expect("max_tokens", self.max_tokens >= 1, f"at least 1 {kind}")
        if self.input == "characters":
            words = self.vocabulary
            fits = len(words) == len(set(words)) >= 1
            self._expect("vocabulary", fits, f"different texts, at least one, {kind}")

    def _check_executor(self) -> None:
        same = self.initial_state != "code" or self.code_dim == self.dim
        self._expect("code_dim", same, f"dim ({self.dim}) where initial_state is 'code'")
        noise = not self.state_noise or self.initial_state == "linear"
        self._expect("state_noise", noise, "False where initial_state is not 'linear'")
        own = self.read_in_codes == "own" or self.read_in_modules == 0
        self._expect("read_in_codes", own, "'own' where read_in_modules is above 0")
        generated = self.conditional and (self.read_in_codes == "own" or self.state_noise)
        self._expect("conditional", not generated, "False with read_in_codes 'own' or state_noise")
        first = self.head == "linear" or self.confidence == "first"
        self._expect("head", first, "'linear' where confidence is not 'first'")
        grid = self.input == "image" and self.tokenizer == "convnext"
        placed = self.positions != "concat" or grid
        self._expect("positions", placed, "'concat' only of images with tokenizer 'convnext'")

    def _check_convnext(self) -> None:
        blocks, widths = self.convnext_blocks, self.convnext_widths
        self._expect("convnext_blocks", len(blocks) >= 1, "a whole number a stage")
        self._expect("convnext_widths", len(widths) == len(blocks), "a width a stage")
        behind = self.tokens_width - widths[-1]
        fits = behind >= 1 if self.positions == "concat" else behind == 0
        self._expect("token_width", fits, "the last of convnext_widths, or with concat more")
        self._expect("positions", self.positions != "sinusoidal", "learned, concat or none")

    def _check_image(self) -> None:
        if self.tokenizer == "convnext":
            self._check_convnext()
        side = self.token_px
        fits = self.height_px % side == 0 and self.width_px % side == 0
        size = f"a divisor of height_px ({self.height_px}) and width_px ({self.width_px})"
        name = "patch_px" if self.tokenizer != "convnext" else "convnext_widths"
        self._expect(name, fits, size if name == "patch_px" else f"stages that give {side}, {size}")
        self._check_pixels()

    def _check_links(self) -> None:
        self._expect("p_min", self.p_min < self.p_max, f"below p_max ({self.p_max})")
        random_and_frozen = self.signature_init == "random" and self.connectivity == "frozen"
        self._expect("signature_init", not random_and_frozen, "a graph where links are frozen")
        official = self.prior_form == "standard" or self.graph_prior != "erdos-renyi"
        self._expect("prior_form", official, "'standard' where graph_prior is 'erdos-renyi'")

    @property
    def tokens(self) -> int | None:
        """Number of tokens of an image; None where the input decides."""
        if self.input != "image":
            return None
        return (self.height_px // self.token_px) * (self.width_px // self.token_px)

    @property
    def token_px(self) -> int:
        """The side of the square of pixels that an image's token stands for."""
        if self.tokenizer == "convnext":
            return 4 * 2 ** (len(self.convnext_widths) - 1)
        return self.patch_px

    @property
    def tokens_width(self) -> int:
        """Channels of a token that the read-in sees."""
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
