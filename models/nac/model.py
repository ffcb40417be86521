# SPDX-License-Identifier: Apache-2.0
"""Neural Attentive Circuits: attentive modules with learned functions and learned links."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from saccade.core.errors import SaccadeError
from saccade.models.budget import Budget, ComputeBudget
from saccade.models.interface import Family
from saccade.models.layers.trunk import block_layers
from saccade.models.nac.components import NACFunction, input_names, length_names
from saccade.models.nac.config import NACConfig as NACConfig
from saccade.models.nac.generator import (
    Circuit,
    CircuitInputs,
    ConditionalGenerator,
    UnconditionalGenerator,
    first_signatures,
    generate,
    link_distances,
)
from saccade.models.nac.graph_priors import GraphStructure, degree_order, repulsion
from saccade.models.nac.kernel import Kernel, signature_distance
from saccade.models.nac.layers import (
    Propagator,
    ReadIn,
    ReadOut,
    initial_state,
    last_layer,
    norm_where,
)
from saccade.models.nac.links import UNIT, check_links, strongest
from saccade.models.nac.tokenizers import tokenizer
from saccade.models.resolution import resized


class NAC(NACFunction, Family):
    """A circuit generator, and the executor that runs its circuit on tokens.

    Source: Weiss et al. 2022, Neural Attentive Circuits, section 2; the configuration documents
            decisions where the paper is silent.
    """

    config_class = NACConfig
    repeated_blocks = (Propagator,)
    module_order: Tensor
    read_out_signatures: Tensor | None
    neighbors: Tensor | None  # int64 [u links], the senders of each module in evaluation; None: all

    def __init__(self, config: NACConfig, *, fresh: bool = True) -> None:
        """Draw the weights from config.seed; if `fresh` is false, they will be loaded."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self._build(config, fresh)
        self.register_buffer("module_order", torch.arange(config.modules))
        shape = (config.modules, config.links)
        self.register_buffer(
            "neighbors", torch.zeros(shape, dtype=torch.int64) if config.links else None
        )
        self._structure = GraphStructure(config)
        if fresh and not config.conditional:
            self.rank_modules()

    def _build(self, config: NACConfig, fresh: bool) -> None:
        self.tokenizer = tokenizer(config)
        self.generator: nn.Module
        if config.conditional:
            self.generator = ConditionalGenerator(config)
        else:
            self.generator = UnconditionalGenerator(config, first_signatures(config, fresh))
        self.kernel = Kernel(config)
        self.initial_state = initial_state(config)
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
        self.head_norm = norm_where(config.head_norm, config.dim)
        self.head = last_layer(config)

    def parameter_layers(self) -> tuple[tuple[str, ...], ...]:
        """Return tokenizer, read-in, each propagator, and the read-out with the head.

        The blocks of a trunk lie between tokenizer and read-in. Codes and signatures take part in
        several layers and belong to the last.
        """
        place = "tokenizer.trunk"
        blocks: tuple[tuple[str, ...], ...] = ()
        if self.config.trunk is not None:
            place = place if self.config.input_sets == 1 else "tokenizer.each.trunk"
            blocks = block_layers(self.get_submodule(place), place)
        read_in = ("read_in", f"{place}.norm", "tokenizer.mark") if blocks else ("read_in",)
        propagators = ((f"propagators.{index}",) for index in range(len(self.propagators)))
        return (("tokenizer",), *blocks, read_in, *propagators, ("read_out", "head"))

    def forward(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
        modules: Tensor | None = None,
    ) -> Tensor:
        """Return the logits; `modules` (int64 [m]) runs only those processor modules.

        Shapes: -> [b classes].
        Raises: SaccadeError if a sparse NAC is to run some modules in evaluation.
        """
        if modules is not None and self.neighbors is not None and not self.training:
            raise SaccadeError("modules: a sparse NAC runs all in evaluation. Use prune instead.")
        inputs = self.inputs(x, length, condition, condition_length)
        circuit = generate(self.generator, self.config, inputs, modules)
        return self.logits(execute(self, inputs, circuit))

    def run(self, inputs: CircuitInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the state before the head, the read-in's weights, the logarithms of the links."""
        circuit = generate(self.generator, self.config, inputs)
        state, codes = execute(self, inputs, circuit), reading_codes(circuit)
        theta = self.initial_state(codes)
        attention = self.read_in.weights(theta, inputs.tokens, codes, inputs.length)
        between, _ = link_distances(circuit, self.read_out_signatures, self.neighbors)
        return state, attention, self.kernel.constant(between)

    def logits(self, state: Tensor) -> Tensor:
        """Return the head's logits of a state."""
        x = self.head_norm(state)
        modulated = self.config.head == "modulated"
        return self.head(x, self.read_out_codes[0]) if modulated else self.head(x)

    @torch.no_grad()
    def rank_modules(
        self,
        x: Tensor | None = None,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> Tensor:
        """Rank processor modules by descending degree (ties by index); stored in `module_order`.

        The strongest links of a sparse NAC are chosen again, too.

        Degree is the sum of link probabilities to the other processor modules. In a conditional
        NAC it is averaged over the calibration samples passed in.

        Raises: SaccadeError if a conditional NAC gets no samples.
        """
        if not self.config.conditional:
            if self.neighbors is not None:
                self.neighbors.copy_(self._strongest(self.config.links))
            return self.module_order.copy_(self.rank_now())
        if x is None:
            raise SaccadeError(
                "rank_modules: found no samples, but the circuit of a conditional NAC depends on "
                "them. Pass calibration samples (and their condition)."
            )
        inputs = self.inputs(x, length, condition, condition_length)
        circuit = generate(self.generator, self.config, inputs)
        return self.module_order.copy_(circuit_order(circuit, self.kernel))

    @torch.no_grad()
    def rank_now(self) -> Tensor:
        """Return the order of the current circuit; for a conditional NAC the last stored order.

        Shapes: -> int64 [u].
        """
        if self.config.conditional:
            return self.module_order
        return circuit_order(self.generator(), self.kernel)

    def graph_loss(self) -> Tensor:
        """Return the links' distance from the prior; 0 if links are generated or not learned.

        Shapes: -> scalar.
        """
        signatures = getattr(self.generator, "signatures", None)
        if signatures is None or self.config.connectivity != "learned":
            return self.read_out_codes.new_zeros(())
        loss = self._structure.loss(signatures, self.kernel.epsilons())
        if self.config.repulsion:
            tables = (signatures, self.generator().read_in_signatures, self.read_out_signatures)
            every = torch.cat([table for table in tables if table is not None])
            loss = loss + repulsion(every, self.config.repulsion)
        return loss

    @torch.no_grad()
    def prune(self, budget: float) -> "NAC":
        """Return a new NAC of the floor(budget U + 0.5) first modules of `module_order`.

        It equals this one with the other modules' attention scores at -inf. A conditional NAC
        keeps its whole generator, whose self-attention mixes all queries, and selects afterwards.

        Raises: SaccadeError if the budget is not in (0, 1] or keeps no module.
        """
        config = self.config
        total = config.modules
        keep = Budget(budget).of(total) if 0 < budget <= 1 else 0
        if keep < 1:
            raise SaccadeError(
                f"budget {budget}: keeps no module of {total}, or is not above 0 and at most 1. "
                f"Expected at least 1/{2 * total}. Choose a larger budget."
            )
        chosen = self.module_order[:keep]
        names = ["codes", "signatures"]
        if config.read_in_modules == 0:
            names.append("read_in_codes")  # a read-in with separate modules keeps them all
        if config.conditional:
            names = ["kept"]
            config = replace(config, generator_modules=config.generator_modules or total)
        state = {name: value.clone() for name, value in self.state_dict().items()}
        for name in (f"generator.{name}" for name in names):
            if name in state:
                state[name] = state[name][chosen]
        state["module_order"] = torch.arange(keep, device=chosen.device)
        state.pop("neighbors", None)
        small = NAC(replace(config, modules=keep, links=0), fresh=False).to(self.read_out_codes)
        small.load_state_dict(state)
        if 0 < config.links < keep + config.read_in_modules:
            small = small.sparse(config.links)
        return small.train(self.training)

    @torch.no_grad()
    def sparse(self, links: int) -> "NAC":
        """Return a new NAC whose modules attend to their `links` strongest senders in evaluation.

        A module's own link is the strongest. The softmax is over the senders that are left.

        Raises: SaccadeError if links are not fewer than now or not at least 1, or if this NAC has
            none.
        """
        check_links(self.config, links, self.config.modules, "sparse")
        config = replace(self.config, links=links)
        made = NAC(config, fresh=False).to(self.read_out_codes)
        made.load_state_dict(self.state_dict() | {"neighbors": self._strongest(links)})
        return made.train(self.training)

    def _strongest(self, links: int) -> Tensor:
        circuit = self.generator()
        tables = (circuit.signatures, circuit.read_in_signatures)
        heard = torch.cat([table.double() for table in tables if table is not None])
        return strongest(signature_distance(heard[: self.config.modules], heard), links)

    def at(self, budget: ComputeBudget) -> "NAC":
        """Return the pruned or sparse model of that budget."""
        if budget.part is not None:
            return resized(self, budget.kept).at(budget.part)
        if budget.unit == UNIT:
            modules = budget.total - self.config.read_in_modules
            return self.prune(modules / self.config.modules).sparse(budget.kept)
        return self.prune(budget.kept / budget.total)

    def runtime_metadata(self) -> dict[str, Any]:
        """Return the metadata needed to create inputs: kinds, longest lengths, the vocabulary."""
        config = self.config
        image, conditional = config.input == "image", config.conditional
        grid = [config.height_px // config.token_px, config.width_px // config.token_px]
        return {
            "inputs": list(input_names(config)),
            "lengths": [] if image else list(length_names(config)),
            "max_tokens": config.tokens if image else config.max_tokens,
            "vocabulary": list(config.vocabulary),
            "condition_tokens": config.condition_tokens if conditional else 0,
            "condition_dim": config.condition_dim if conditional else 0,
            "modules": config.modules,
            "grid": grid if image else None,
        }


def circuit_order(circuit: Circuit, kernel: Kernel) -> Tensor:
    """Return processor modules by descending degree, averaged over a conditional circuit's samples.

    Shapes: signatures [u s] or [b u s] -> int64 [u]; their original order if links are dense.
    """
    signatures = circuit.signatures
    if signatures is None:
        return torch.arange(circuit.codes.shape[-2], device=circuit.codes.device)
    biases = kernel.constant(signature_distance(signatures, signatures).double())
    assert biases is not None
    links = kernel.links(biases)
    return degree_order(links.mean(0) if links.dim() == 3 else links)


def reading_codes(circuit: Circuit) -> Tensor:
    """Return the codes that the read-in uses: its separate table, or the processor's.

    Shapes: -> [u c] or [m c], or [b u c].
    """
    return circuit.codes if circuit.read_in_codes is None else circuit.read_in_codes


def heard_codes(circuit: Circuit, beside: bool) -> Tensor:
    """Return the codes of all senders: the processor's, followed by a separate read-in's.

    Shapes: -> [u c] or [u + m c], or [b u c].
    """
    return torch.cat((circuit.codes, reading_codes(circuit))) if beside else circuit.codes


def execute(model: Any, inputs: CircuitInputs, circuit: Circuit) -> Tensor:
    """Return the confidence-weighted state of a NAC's read-out.

    Shapes: -> [b d].
    """
    state: Tensor = model.read_out.pool(execute_layers(model, inputs, circuit)[-1])
    return state


def execute_layers(
    model: Any, inputs: CircuitInputs, circuit: Circuit
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states after the read-in, after the propagators, and of the read-out modules.

    Shapes: -> [b u d] or [b m d], [b u d], [b r d].
    """
    batch, beside = inputs.tokens.shape[0], model.config.read_in_modules > 0
    reading = reading_codes(circuit)
    first = model.initial_state(reading, batch)
    read = model.read_in(first, inputs.tokens, reading, inputs.length)
    theta, codes = read, heard_codes(circuit, beside)
    if beside:
        theta = model.initial_state(circuit.codes, batch).expand(batch, -1, -1)
    kept = None if model.training else model.neighbors
    between, to_read_out = link_distances(circuit, model.read_out_signatures, kept)
    biases = model.kernel.layers(between, batch)
    for propagator, bias in zip(model.propagators, biases, strict=True):
        if beside:
            senders = torch.cat((theta, read), 1)
            theta = propagator(theta, circuit.codes, bias, senders=senders, sender_code=codes)
        else:
            theta = propagator(theta, circuit.codes, bias)
    heard = torch.cat((theta, read), 1) if beside else theta
    initial = model.initial_state(model.read_out_codes, batch)
    bias = model.kernel.read_out(to_read_out, batch)
    states = model.read_out(initial, model.read_out_codes, heard, codes, bias)
    return read, theta, states
