# SPDX-License-Identifier: Apache-2.0
"""The NAC authors' checkpoints: what is read, what has to be said, what is refused."""

import json
from dataclasses import replace

import official_files
import pytest
import torch
from safetensors.torch import load_file

from saccade.core.errors import SaccadeError
from saccade.models.nac.model import NAC
from saccade.models.official.conversion import Original
from saccade.models.official.convert import ConvertOptions, looks_like, official_from
from saccade.models.official.sources import nac, nac_forms

GRAPH = nac_forms.GRAPH


def official(name="model_eval", **changes):
    """A recorded model as a file of the authors, with its own configuration."""
    case = official_files.golden_case("nac", name)
    tensors = load_file(official_files.GOLDEN / "nac" / case["weights"]["file"])
    prefix = case["weights"]["prefix"]
    weights = {key: tensors[prefix + key] for key in case["weights"]["keys"]}
    given = Original(name, weights, config=case["config"], labels=tuple(map(str, range(7))))
    return replace(given, **changes)


def with_argument(value, *path):
    """The recorded configuration with one argument changed."""
    config = json.loads(json.dumps(official().config))
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return config


def full_size(template):
    """The tensors of a shipped template without values."""
    listed = json.loads((official_files.GOLDEN / "nac" / f"{template}.keys.json").read_text())
    return {key: torch.empty(shape, device="meta") for key, shape in listed["keys"].items()}


def test_a_run_is_read_with_its_average_where_asked(tmp_path):
    file = official_files.nac(tmp_path)
    config = tmp_path / "config.json"
    options = ConvertOptions(out=tmp_path / "ours.safetensors", config=config)
    read = nac.convert(official_from("nac", file.path, options))
    average = replace(options, checkpoint_key="model_ema")
    other = nac.convert(official_from("nac", file.path, average))
    assert looks_like(official().tensors) == "nac"
    assert read.names == other.names and "read_in.key.linear.bias" in read.names
    weight = "propagators.1.query.linear.weight"
    assert torch.allclose(other.weights[weight] - read.weights[weight], torch.ones(()))
    assert read.preprocessing.mean == read.config.mean == (0.485, 0.456, 0.406)
    images = read.preprocessing
    assert (images.resize_mode, images.resize_px) == ("shortest", (27, 27))  # int(256 / 224 * 24)
    assert images.interpolation == "bicubic" and read.notes == ()


def test_a_template_is_known_by_its_names_and_says_what_it_assumed():
    converted = nac.convert(Original("x", full_size("INET-110E-NC-CHONKER-BARAL-X")))
    config = converted.config
    assert (config.heads, config.head_dim, config.read_heads, config.ffn_dim) == (8, 64, 1, 1536)
    assert (config.modules, config.height_px, config.tokens) == (640, 224, 784)
    assert config.epsilon == 1 and not config.truncate and not config.epsilon_learned
    assert "INET-110E" in converted.notes[0] and "--config" in converted.notes[0]
    assert converted.ignored[f"{GRAPH}input_latents.signatures_"] == nac.UNUSED
    dense = nac.convert(Original("x", full_size("TINET-PIOLIKE-X"))).config
    assert dense.connectivity == "dense" and not dense.modulation and dense.readout_modules == 1


def test_what_draws_in_evaluation_needs_a_word():
    tensors = full_size("TINY-INET-NC-X")
    with pytest.raises(SaccadeError, match=r"latent_seeder\.code_to_state_logvar.*--deterministic"):
        nac.convert(Original("x", tensors))
    converted = nac.convert(Original("x", tensors, deterministic=True))
    assert converted.config.state_noise and "without drawing initial" in converted.notes[1]
    assert converted.config.read_in_modules == 64 and not converted.config.truncate_read_out
    gumbel = with_argument({"softmax_type": "gumbel"}, "output_tokenizer_kwargs")
    with pytest.raises(SaccadeError, match=r"softmax_type gumbel.*--deterministic"):
        nac.convert(official(config=gumbel))
    plain = nac.convert(official(config=gumbel, deterministic=True))
    assert "pooling's weights" in plain.notes[0] and plain.config.confidence_noise
    assert not nac.convert(official()).config.confidence_noise


def test_the_served_form_of_a_drawing_model_has_one_answer():
    torch.manual_seed(0)
    listed = full_size("TINY-INET-NC-X")
    small = nac.convert(Original("x", listed, deterministic=True)).config
    fields = {"dim": 12, "code_dim": 12, "modules": 8, "read_in_modules": 4, "propagator_layers": 1}
    fields |= {"convnext_widths": (2, 2, 2), "convnext_blocks": (1, 0, 0), "token_width": 5}
    model = NAC(replace(small, ffn_dim=8, heads=1, read_heads=1, head_dim=4, **fields))
    image = torch.randint(0, 256, (2, 64, 64, 3))
    assert torch.equal(model.eval()(image), model(image))
    model.initial_state.train()
    assert not torch.equal(model(image), model(image))


REFUSED = {
    "unknown form": (None, "none of the templates that the authors ship.*--config"),
    "no arguments": ({"dim": 3}, "no latent_graph_kwargs"),
    "heads": (("latent_graph_kwargs", "head_dim", 4), "not a multiple of the head width 4"),
    "shared propagators": (("latent_graph_kwargs", "num_iterations", 4), "iterations 4.*have 2"),
    "half a union": (
        ("latent_graph_kwargs", "enable_input_output_communication", True),
        "Expected True, True, False",
    ),
    "no diagonal": (
        (
            *("latent_graph_kwargs", "propagator_kwargs", "latent_attention_kwargs"),
            *("kernel_kwargs", "eliminate_diagonal", True),
        ),
        "eliminate_diagonal",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_counterpart_is_refused(case):
    change, words = REFUSED[case]
    config = with_argument(change[-1], *change[:-1]) if isinstance(change, tuple) else change
    given = official(config=config)
    if case == "unknown form":
        renamed = {key.replace("scale_gain", "gain"): x for key, x in given.tensors.items()}
        given = replace(given, tensors=renamed)
    with pytest.raises(SaccadeError, match=words):
        nac.convert(given)


def test_another_file_is_told_apart():
    with pytest.raises(SaccadeError, match=r"has no tensor .latent_graphs"):
        nac.convert(Original("x", {"cls_token": torch.zeros(1)}))
