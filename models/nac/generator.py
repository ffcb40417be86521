# SPDX-License-Identifier: Apache-2.0
"""The circuit generator: one signature and one code for each processor module."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.nac.config import NACConfig
from saccade.models.nac.graph_priors import start_signatures
from saccade.models.nac.kernel import signature_distance
from saccade.models.nac.layers import length_mask, masked_softmax, without_padding
from saccade.models.nac.links import without_other_links
from saccade.models.nac.modulation import linear


class Circuit(NamedTuple):
    """Descriptors of the processor modules, with a batch axis if they depend on the sample."""

    signatures: Tensor | None  # [u s] or [b u s]; None if links are dense
    codes: Tensor  # [u c] or [b u c]
    read_in_codes: Tensor | None = None  # [u c] or [m c], if the read-in has a separate table
    read_in_signatures: Tensor | None = None  # [m s] of separate read-in modules


class CircuitInputs(NamedTuple):
    """The inputs that a circuit may depend on."""

    tokens: Tensor  # [b n d], after the tokenizer, zero beyond the length
    length: Tensor | None  # [b], or [b 2] of a pair of inputs
    condition: Tensor | None  # [b m k]
    condition_length: Tensor | None  # [b]


class UnconditionalGenerator(nn.Module):
    """Signatures and codes are parameters (frozen signatures: a buffer, absent if dense).

    Source: section 2.2.
    """

    signatures: Tensor | None
    read_in_codes: Tensor | None
    read_in_signatures: Tensor | None

    def __init__(self, config: NACConfig, signatures: Tensor | None) -> None:
        super().__init__()
        learned = config.connectivity == "learned"
        self.codes = nn.Parameter(torch.randn(config.modules, config.code_dim))
        table(self, "signatures", signatures, learned=learned)
        beside = config.read_in_modules
        codes: Tensor | None = None
        if config.read_in_codes == "own":
            codes = torch.randn(beside or config.modules, config.code_dim)
        table(self, "read_in_codes", codes, learned=True)
        heard: Tensor | None = None
        if beside and signatures is not None:
            heard = torch.randn(beside, config.signature_dim)
        table(self, "read_in_signatures", heard, learned=learned)
        self.beside = beside > 0

    def forward(self, modules: Tensor | None = None) -> Circuit:
        signatures, read_in = self.signatures, self.read_in_codes
        codes: Tensor = self.codes
        if modules is not None:
            signatures = None if signatures is None else signatures[modules]
            codes = codes[modules]
            if read_in is not None and not self.beside:
                read_in = read_in[modules]
        return Circuit(signatures, codes, read_in, self.read_in_signatures)


def table(owner: nn.Module, name: str, rows: Tensor | None, *, learned: bool) -> None:
    """Register a parameter of that name, or a buffer if it is not learned; None without rows."""
    if learned and rows is not None:
        owner.register_parameter(name, nn.Parameter(rows))
    else:
        owner.register_buffer(name, rows)


class ConditionalGenerator(nn.Module):
    """Queries, one per module, attend to the condition (cross-attention, FFN) and to each other
    (self-attention). One FFN turns them into signatures, a parallel one into codes.

    All queries take part as keys and values even if only some modules are requested, so a pruned
    circuit is a selection of the full one.

    Shapes: condition [b n k], length [b], modules [m] -> signatures [b m s] (None if dense), codes
            [b m c].
    Source: section 4.4.
    """

    kept: Tensor

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        total, dim = config.generator_modules or config.modules, config.dim
        self.width = config.condition_dim or config.tokens_width
        self.queries = nn.Parameter(torch.randn(total, dim))
        self.condition = linear(self.width, dim)
        self.norm_condition = nn.LayerNorm(dim)
        self.norm_queries = nn.LayerNorm(dim)
        self.cross = PlainAttention(dim, config.heads)
        self.norm_ffn = nn.LayerNorm(dim)
        self.ffn = feed_forward(dim, config.ffn_dim, dim)
        self.norm_self = nn.LayerNorm(dim)
        self.mix = PlainAttention(dim, config.heads)
        self.norm_out = nn.LayerNorm(dim)
        self.to_signature: nn.Module | None = None
        if config.connectivity != "dense":
            self.to_signature = feed_forward(dim, config.ffn_dim, config.signature_dim)
        self.to_code = feed_forward(dim, config.ffn_dim, config.code_dim)
        self.register_buffer("kept", torch.arange(config.modules))

    def forward(
        self, condition: Tensor, length: Tensor | None = None, modules: Tensor | None = None
    ) -> Circuit:
        if condition.dim() != 3 or condition.shape[-1] != self.width:
            raise ShapeError(
                f"condition: found shape {list(condition.shape)}, expected [b, n, {self.width}]. "
                f"Give each condition token {self.width} values."
            )
        context = self.norm_condition(self.condition(condition.to(self.queries.dtype)))
        context = without_padding(context, length)
        queries = self.queries.expand(condition.shape[0], -1, -1)
        x = queries + self.cross(self.norm_queries(queries), context, length)
        x = x + self.ffn(self.norm_ffn(x))
        kept = self.kept if modules is None else self.kept[modules]
        every = self.norm_self(x)
        x = self.norm_out(x[:, kept] + self.mix(every[:, kept], every))
        signatures = None if self.to_signature is None else self.to_signature(x)
        return Circuit(signatures, self.to_code(x))


def first_signatures(config: NACConfig, fresh: bool) -> Tensor | None:
    """Return initial signatures of an unconditional NAC; any of that shape if not `fresh`.

    Shapes: -> [u s]; None if links are dense.
    """
    if config.connectivity == "dense":
        return None
    counted = torch.get_default_device().type == "meta"  # parameters without values
    if fresh and config.signature_init != "random" and not counted:
        return start_signatures(config)
    return torch.randn(config.modules, config.signature_dim)


def generate(
    generator: nn.Module, config: NACConfig, inputs: CircuitInputs, modules: Tensor | None = None
) -> Circuit:
    """Generate the circuit of these samples, or only these modules of it.

    Raises: SaccadeError if a condition is missing, or given to a NAC without one.
    """
    check_condition(config, inputs.condition)
    if not config.conditional:
        circuit: Circuit = generator(modules)
        return circuit
    if inputs.condition is None:
        circuit = generator(inputs.tokens, inputs.length, modules)
    else:
        circuit = generator(inputs.condition, inputs.condition_length, modules)
    return circuit


def check_condition(config: NACConfig, condition: Tensor | None) -> None:
    """Check that a condition is given if and only if the NAC uses one.

    Raises: SaccadeError if it is not.
    """
    expected = config.conditional and config.condition_dim > 0
    if (condition is not None) != expected:
        raise SaccadeError(
            f"condition: found {'one' if condition is not None else 'none'}, but this NAC "
            f"has conditional={config.conditional} and condition_dim={config.condition_dim}. "
            f"{'Pass condition=' if expected else 'Leave condition out'}."
        )


def link_distances(
    circuit: Circuit, read_out_signatures: Tensor | None, neighbors: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return signature distances of processor and read-out modules to the modules they attend to.

    Those are the u processor modules, followed by the m separate read-in modules. In a sparse
    circuit, all but a module's neighbors are infinitely far.

    Shapes: signatures [u s] or [b u s], read_out_signatures [r s], neighbors int64 [u links] ->
            [u u + m] and [r u + m], or with the batch axis; None and None if links are dense.
    """
    signatures = circuit.signatures
    if signatures is None or read_out_signatures is None:
        return None, None
    heard = signatures
    if circuit.read_in_signatures is not None:
        heard = torch.cat((signatures, circuit.read_in_signatures))
    between = without_other_links(signature_distance(signatures, heard), neighbors)
    return between, signature_distance(read_out_signatures, heard)


class PlainAttention(nn.Module):
    """Plain multi-head attention.

    Shapes: x [b i d], seen [b j d], length [b] or [b 2] (of seen) -> [b i d].
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, length: Tensor | None = None) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.query(x), self.key(context), self.value(context))
        )
        mask = length_mask(length, context)
        mask = None if mask is None else mask.unsqueeze(1)
        weights = masked_softmax(q @ k.mT / math.sqrt(q.shape[-1]), mask)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


def feed_forward(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two linear layers with a GELU between them."""
    return nn.Sequential(linear(inputs, hidden), nn.GELU(), linear(hidden, outputs))
