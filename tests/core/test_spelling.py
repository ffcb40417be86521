# SPDX-License-Identifier: Apache-2.0
"""The name that was probably meant, wherever a name is refused."""

from pathlib import Path

import pytest

from saccade.core.checks import did_you_mean, nearest
from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.variant import PRECISIONS, check_chosen
from saccade.exporter.gate.metrics import thresholds_of
from saccade.models.catalogue import preset_of
from saccade.models.data.datasets import load_data
from saccade.models.nac.config import NACConfig
from saccade.models.shipped import shipped_checkpoint
from saccade.models.training.options import TrainOptions, chosen_config

OUT = Path("x.safetensors")
REFUSED = {
    "field of a model": (
        lambda: chosen_config(NACConfig, TrainOptions(out=OUT, set={"moduls": 4})),
        "modules",
    ),
    "data": (lambda: load_data("digit-sum", "test"), "digits-sum"),
    "size": (lambda: preset_of("nac", "smal"), "small"),
    "shipped": (lambda: shipped_checkpoint("digit-sum"), "digits-sum"),
    "precision": (lambda: check_chosen("precision", ("fp61",), PRECISIONS), "fp16"),
    "threshold": (lambda: thresholds_of("fp32", {"relativ_error": 1}), "relative_error"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_name_comes_with_the_nearest(what):
    call, meant = REFUSED[what]
    with pytest.raises(SaccadeError) as refused:
        call()
    assert f"Did you mean {meant}?" in str(refused.value)


def test_nothing_like_it_is_not_guessed():
    assert nearest("qqq", ("digits", "shapes")) is None
    assert did_you_mean("qqq", ("digits",)) == ""
    assert nearest("DIGITS", ("digits", "shapes")) == "digits"
    assert nearest("x" * 10**6, ("digits",)) is None
