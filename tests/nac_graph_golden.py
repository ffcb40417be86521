# SPDX-License-Identifier: Apache-2.0
"""The authors' NAC tensors against ours, of the graph: kernel, attention, priors, starts."""

from collections.abc import Callable
from typing import Any

import torch
from nac_layer_golden import (
    Arrays,
    Tensors,
    leaves,
    mod_fc,
    recorded_draws,
    run_ffn,
    run_mod_fc,
    with_gradients,
)
from torch import Tensor
from torch.nn import functional as F

from saccade.models.nac import graph_priors as graph
from saccade.models.nac.config import NACConfig
from saccade.models.nac.kernel import (
    CUT,
    Kernel,
    evaluation_bias,
    signature_distance,
    skmdpa,
)

# Cases that no layer of ours computes, and why.
NOT_OURS = {
    "signature_distribution": "in one configuration, where it has no effect",
}


def kernel_of(config: dict[str, Any], given: Tensors, name: str = "bandwidth") -> Kernel:
    """Our kernel of their settings, with one propagator whose bandwidth is theirs."""
    ours = NACConfig(
        epsilon=float(given[name].detach()),
        truncate=config.get("truncation") or 0.0,
        tau=config.get("stochastic_sampling_temperature", 1.0),
        kernel_draw="sample" if config.get("stochastic_kernel") else "none",
        kernel_clamp="dtype",
        epsilon_learned=config.get("learnable_bandwidth", True),
        propagator_layers=1,
    )
    kernel = Kernel(ours)
    if kernel.learned:  # the leaf itself, so that its gradient is found
        del kernel.bandwidth
        kernel.bandwidth = given[name].expand(2)
    return kernel


def batch_of(given: dict[str, Any]) -> int:
    """Samples of a case, by its draws or its states; 1 if it has neither, as for signatures."""
    draws = [name for name in given if name.startswith("draw/")]
    return len(given[draws[0]]) if draws else len(given.get("receiver_states", [0]))


def as_infinite(log_k: Tensor) -> Tensor:
    """Theirs is -inf where ours is lower by `CUT`."""
    return log_k.masked_fill(log_k < CUT, -torch.inf)


def run_kernel(case: dict[str, Any], arrays: Arrays, weights: Tensors) -> Arrays:
    """Distances, their logarithms, the draw and its normalisation."""
    given = leaves(case, arrays, weights)
    kernel = kernel_of(case["config"], given).train(case["mode"] == "train")
    senders = given.get("senders", given["receivers"])
    distance = signature_distance(given["receivers"], senders)
    log_p = evaluation_bias(distance, *kernel.epsilons(), kernel.config.truncate)
    with recorded_draws(arrays):
        log_k = kernel.read_out(distance, batch_of(arrays))
    log_k_hat = log_k.log_softmax(-1)
    values = {"distance": distance, "log_p": as_infinite(log_p), "log_k": as_infinite(log_k)}
    values |= {"log_k_hat": as_infinite(log_k_hat), "k_hat": log_k_hat.exp()}
    return with_gradients(case, arrays, given, values)


def run_skmdpa(case: dict[str, Any], arrays: Arrays, weights: Tensors) -> Arrays:
    """Attention of receivers to senders under the kernel, in heads of their own width."""
    given, config = leaves(case, arrays, weights), case["config"]
    kernel = kernel_of(config["kernel_kwargs"], given, "kernel.bandwidth")
    kernel.train(case["mode"] == "train")
    side = {
        name: given.get(f"sender_{name}", given[f"receiver_{name}"]) for name in ("states", "codes")
    }
    theirs = given.get("sender_signatures", given["receiver_signatures"])
    with recorded_draws(arrays):
        dense = not config.get("mask_attn_scores_with_affinities", True)
        distance = signature_distance(given["receiver_signatures"], theirs)
        bias = None if dense else kernel.read_out(distance, batch_of(arrays))

    def normed(x: Tensor, name: str) -> Tensor:
        name = name if f"{name}.weight" in given else "receiver_layernorm"
        return F.layer_norm(x, x.shape[-1:], given[f"{name}.weight"], given[f"{name}.bias"])

    receiving = normed(given["receiver_states"], "receiver_layernorm")
    sending, code = normed(side["states"], "sender_layernorm"), given["receiver_codes"]
    q = mod_fc(given, "query_compiler.", config, receiving, code)
    k = mod_fc(given, "key_compiler.", config, sending, side["codes"])
    v = mod_fc(given, "value_compiler.", config, sending, side["codes"])
    heard = skmdpa(q, k, v, bias, heads=config["num_heads"])
    rows = given.get("layer_scale.gamma", 1.0)
    output = mod_fc(given, "exit_layer.", config, heard, code, rows=rows)
    output = output + given["receiver_states"] if config.get("include_residual", True) else output
    values = {"output": output, **_scores(q, k, bias, config["num_heads"])}
    return with_gradients(case, arrays, given, values)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, heads: int) -> Tensors:
    """Theirs are tracked inside; the weights are what our attention makes of the identity."""
    senders, width = k.shape[1], k.shape[2] // heads
    q, k = (x.unflatten(-1, (heads, width)).transpose(1, 2) for x in (q, k))
    scores = q @ k.mT / width**0.5
    log_k_hat = None if bias is None else as_infinite(bias.log_softmax(-1))
    if log_k_hat is not None and log_k_hat.dim() == 3:
        log_k_hat = log_k_hat.unsqueeze(1)
    size = max(senders, width)  # of queries and keys with zeros, because values are as wide
    q, k = (F.pad(x, (0, size - width)) for x in (q * (size / width) ** 0.5, k))
    values = torch.eye(senders, size, dtype=q.dtype).expand(len(q), -1, -1)
    seen = [skmdpa(q[:, head], k[:, head], values, bias) for head in range(heads)]
    return {
        "scores": scores,
        "biased_scores": scores if log_k_hat is None else scores + log_k_hat,
        "attention": torch.stack(seen, 1)[..., :senders],
    }


PRIORS = {
    "StochasticBlockModelRegularization": "planted-partition",
    "BarabassiAlbertRegularization": "scale-free",
    "RingOfCliquesRegularization": "ring-of-cliques",
}


def run_structure(case: dict[str, Any], arrays: Arrays, weights: Tensors) -> Arrays:
    """The loss of a graph prior, or the repulsion of close signatures."""
    given, config = leaves(case, arrays, weights), case["config"]
    signatures = torch.cat([given[name] for name in case["inputs"]])
    if config["class_name"] == "SignatureHingeRepulsion":
        loss = graph.repulsion(signatures, config["hinge"])
        return with_gradients(case, arrays, given, {"loss": loss})
    u = len(signatures)
    ours = NACConfig(
        modules=u,
        graph_prior=PRIORS[config["class_name"]],
        prior_form="official",
        graph_group=u // config.get("num_clusters", 1),
        graph_inside=config.get("p_in", 0.9),
        graph_outside=config.get("p_out", 0.05),
        matching="hungarian",
        structure_loss=config.get("loss_type", "mse"),
        structure_clip=config.get("clip", 0.0),
    )
    epsilons = [given[name] for name in weights]
    values = {"loss": graph.GraphStructure(ours).loss(signatures, epsilons)}
    values["target"] = target = graph.target_links(ours).double()
    distance = signature_distance(signatures, signatures)
    for index, epsilon in enumerate(epsilons):
        place = str(index) if len(epsilons) > 1 else ""
        links = evaluation_bias(distance, epsilon).exp()
        values[f"link_probability{place}"] = links
        if "permutation" not in case.get("not_unique", ()):
            values[f"permutation{place}"] = graph.hungarian_order(links, target)
    return with_gradients(case, arrays, given, values)


def run_preset(case: dict[str, Any], arrays: Arrays, weights: Tensors) -> Arrays:
    """Signatures that a descent on the hinge makes of a start and a graph."""
    config = case["config"]
    signatures = graph.hinge_descent(
        torch.from_numpy(arrays["start"]),
        torch.from_numpy(arrays["adjacency"]) == 1,
        margin=config["truncation"],
        steps=config["num_iters"],
        rate=config["learning_rate"],
    )
    return {"signatures": signatures.numpy()}


Run = Callable[[dict[str, Any], Arrays, Tensors], Arrays]
RUNS: dict[str, Run] = {
    "modfc": run_mod_fc,
    "modffn": run_ffn,
    "kernel": run_kernel,
    "skmdpa": run_skmdpa,
    "structure": run_structure,
    "preset": run_preset,
}
