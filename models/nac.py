# SPDX-License-Identifier: Apache-2.0
"""Neural Attentive Circuits: attentive modules with learned functions and learned links."""

import math
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.generator import (
    Circuit,
    ConditionalGenerator,
    Given,
    InitialState,
    UnconditionalGenerator,
    generate,
    link_distances,
)
from saccade.models.graph_priors import GraphStructure, degree_order, prior_signatures
from saccade.models.modulation import linear
from saccade.models.nac_config import NACConfig as NACConfig
from saccade.models.nac_layers import Propagator, ReadIn, ReadOut
from saccade.models.skmdpa import (
    evaluation_bias,
    link_probability,
    sampled_bias,
)
from saccade.models.tokenizers import tokenizer
from saccade.plugins.errors import SaccadeError


class NAC(nn.Module):
    """A circuit generator and the executor that runs its circuit on tokens.

    Every method that runs the model takes `x` (image [b h w c] with values 0 to 255 of any type,
    or tokens [b n token_dim]), `length` [b] of at least 1 (tokens that count), `condition`
    [b m condition_dim] and `condition_length` [b] (conditional NAC).

    Source: Weiss et al. 2022, Neural Attentive Circuits, section 2; the configuration says what
            was decided where the paper is silent.
    """

    config_class = NACConfig
    module_order: Tensor
    read_out_signatures: Tensor | None

    def __init__(self, config: NACConfig, *, fresh: bool = True) -> None:
        """Weights are drawn from config.seed; with `fresh` false they are about to be loaded."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self._build(config, fresh)
        self.register_buffer("module_order", torch.arange(config.modules))
        self._structure = GraphStructure(config)
        self._dropout_order: Tensor | None = None
        self._dropout_calls = 0
        if fresh and not config.conditional:
            self.rank_modules()

    def _build(self, config: NACConfig, fresh: bool) -> None:
        self.tokenizer = tokenizer(config)
        self.generator: nn.Module
        if config.conditional:
            self.generator = ConditionalGenerator(config)
        else:
            self.generator = UnconditionalGenerator(config, _first_signatures(config, fresh))
        self.initial_state = InitialState(config)
        self.read_in = ReadIn(config)
        self.propagators = nn.ModuleList(
            Propagator(config) for _ in range(config.propagator_layers)
        )
        self.read_out_codes = nn.Parameter(torch.randn(config.readout_modules, config.code_dim))
        signatures = torch.randn(config.readout_modules, config.signature_dim)
        if config.connectivity == "learned":
            self.read_out_signatures = nn.Parameter(signatures)
        else:
            dense = config.connectivity == "dense"
            self.register_buffer("read_out_signatures", None if dense else signatures)
        self.read_out = ReadOut(config)
        self.head = linear(config.dim, config.classes)

    def forward(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
        modules: Tensor | None = None,
    ) -> Tensor:
        """Logits; `modules` (int64 [m]) runs those processor modules alone.

        In training, module dropout chooses them where the caller does not.

        Shapes: -> [b classes].
        """
        if modules is None and self.training:
            modules = self._draw_modules()
        return self.head(self._state(x, length, condition, condition_length, modules))

    def outputs(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Everything that is exported, of one pass.

        Shapes: -> logits and probabilities [b classes], embedding [b dim] of length 1.
        """
        return head_outputs(self.head, self._state(x, length, condition, condition_length))

    def embed(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> Tensor:
        """The state in front of the last linear layer, brought to length 1.

        Shapes: -> [b dim].
        """
        return F.normalize(self._state(x, length, condition, condition_length), dim=-1)

    def _state(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
        modules: Tensor | None = None,
    ) -> Tensor:
        tokens = self.tokenizer(x)
        given = Given(tokens, length, condition, condition_length)
        circuit = generate(self.generator, self.config, given, modules)
        theta = self.read_in(self.initial_state(circuit.codes), tokens, circuit.codes, length)
        between, to_read_out = link_distances(circuit.signatures, self.read_out_signatures)
        batch = tokens.shape[0]
        bias = None if self.training else self._bias(between, batch)
        for propagator in self.propagators:
            sampled = self._bias(between, batch) if self.training else bias
            theta = propagator(theta, circuit.codes, sampled)
        initial = self.initial_state(self.read_out_codes)
        bias = self._bias(to_read_out, batch)
        return self.read_out(initial, self.read_out_codes, theta, circuit.codes, bias)

    def _bias(self, distance: Tensor | None, batch: int) -> Tensor | None:
        if distance is None:
            return None
        config = self.config
        if not self.training:
            return evaluation_bias(distance, config.epsilon)
        shape = tuple(distance.shape)
        if config.kernel_draw == "sample" and distance.dim() == 2:
            shape = (batch, *shape)
        limits = {"tau": config.tau, "p_min": config.p_min, "p_max": config.p_max}
        return sampled_bias(distance, config.epsilon, shape=shape, **limits)

    def _draw_modules(self) -> Tensor | None:
        config = self.config
        if config.module_dropout >= 1:
            return None
        smallest = config.module_dropout
        if config.dropout_draw == "uniform":
            fraction = smallest + (1 - smallest) * torch.rand(()).item()
        else:
            fraction = smallest ** torch.rand(()).item()
        keep = max(1, math.floor(fraction * config.modules + 0.5))
        ordered = torch.rand(()).item() < config.dropout_ordered
        chosen = self._current_order() if ordered else torch.randperm(config.modules)
        return chosen[:keep]

    def _current_order(self) -> Tensor:
        if self.config.conditional:
            return self.module_order
        if self._dropout_calls % self.config.graph_refresh_steps == 0:
            with torch.no_grad():
                self._dropout_order = self._degree_order(self.generator())
        self._dropout_calls += 1
        assert self._dropout_order is not None
        return self._dropout_order

    def _degree_order(self, circuit: Circuit) -> Tensor:
        distance, _ = link_distances(circuit.signatures, self.read_out_signatures)
        if distance is None:
            return torch.arange(self.config.modules, device=self.module_order.device)
        links = link_probability(distance.double(), self.config.epsilon)
        return degree_order(links.mean(0) if links.dim() == 3 else links)

    @torch.no_grad()
    def rank_modules(
        self,
        x: Tensor | None = None,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> Tensor:
        """Processor modules by descending degree, ties by index; kept in `module_order`.

        Degree is the sum of link probabilities to the other processor modules; in a conditional
        NAC its mean over the calibration samples that are passed.

        Raises: SaccadeError if a conditional NAC gets no samples.
        """
        if not self.config.conditional:
            circuit = self.generator()
        elif x is None:
            raise SaccadeError(
                "rank_modules: found no samples, but the circuit of a conditional NAC depends on "
                "them. Pass calibration samples (and their condition)."
            )
        else:
            given = Given(self.tokenizer(x), length, condition, condition_length)
            circuit = generate(self.generator, self.config, given)
        self.module_order.copy_(self._degree_order(circuit))
        return self.module_order

    def graph_loss(self) -> Tensor:
        """Distance of the links from the graph prior; 0 where links are not learned or generated.

        Shapes: -> scalar.
        """
        signatures = getattr(self.generator, "signatures", None)
        if signatures is None or self.config.connectivity != "learned":
            return self.head.bias.new_zeros(())
        return self._structure.loss(signatures)

    @torch.no_grad()
    def prune(self, budget: float) -> "NAC":
        """A new NAC of the floor(budget U + 0.5) best connected modules, by `module_order`.

        It equals this one with the other modules' attention scores at -inf. A conditional NAC
        keeps its whole generator, whose self-attention mixes all queries, and selects afterwards.

        Raises: SaccadeError if the budget is not in (0, 1] or keeps no module.
        """
        total = self.config.modules
        keep = math.floor(budget * total + 0.5) if 0 < budget <= 1 else 0
        if keep < 1:
            raise SaccadeError(
                f"budget {budget}: keeps no module of {total}, or is not above 0 and at most 1. "
                f"Expected at least {0.5 / total:.4g}. Choose a larger budget."
            )
        chosen = self.module_order[:keep]
        config = replace(self.config, modules=keep)
        state = {name: value.clone() for name, value in self.state_dict().items()}
        if self.config.conditional:
            config = replace(config, generator_modules=self.config.generator_modules or total)
            selected = ["generator.kept"]
        else:
            selected = [f"generator.{name}" for name in ("codes", "signatures")]
        for name in selected:
            if name in state:
                state[name] = state[name][chosen]
        state["module_order"] = torch.arange(keep, device=chosen.device)
        pruned = NAC(config, fresh=False).to(self.head.weight)
        pruned.load_state_dict(state)
        return pruned.train(self.training)

    def fold(self) -> nn.Module:
        """The same function with everything folded that is constant in evaluation.

        It has `forward`, `outputs` and `embed` with the same arguments, and no training mode.
        """
        from saccade.models.nac_fold import FoldedNAC

        return FoldedNAC(deepcopy(self).eval())


def head_outputs(head: nn.Module, state: Tensor) -> dict[str, Tensor]:
    """Logits, probabilities and embedding of the confidence-weighted state.

    Shapes: state [b d] -> logits and probabilities [b classes], embedding [b d].
    """
    logits = head(state)
    return {
        "logits": logits,
        "probabilities": logits.softmax(-1),
        "embedding": F.normalize(state, dim=-1),
    }


def _first_signatures(config: NACConfig, fresh: bool) -> Tensor | None:
    if config.connectivity == "dense":
        return None
    if fresh and config.signature_init == "prior":
        return prior_signatures(config)
    return torch.randn(config.modules, config.signature_dim)
