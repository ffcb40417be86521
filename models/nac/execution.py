# SPDX-License-Identifier: Apache-2.0
"""One pass through the circuit executor: read-in, propagators, read-out."""

from typing import Any

import torch
from torch import Tensor

from saccade.models.nac.generator import Circuit, CircuitInputs, link_distances


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
    between, to_read_out = link_distances(circuit, model.read_out_signatures)
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
