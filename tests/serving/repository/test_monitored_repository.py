# SPDX-License-Identifier: Apache-2.0
"""The monitor of a repository: which limits are written, what is refused, what preflight sees."""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is not installed: pip install '.[bench]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny
from family_folders import family_folder
from policy_files import calibrated_slots, write_policy
from router_code import family_module
from support.serving.repositories import change_routes, reasons, routes_of
from support.serving.routers import src
from tiny_artefacts import MODEL

from saccade.core.errors import SaccadeError
from saccade.exporter.policy.bounds import binomial_bound
from saccade.exporter.policy.certify import certify
from saccade.exporter.policy.policy import read_answers
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions


def test_the_certified_risk_is_the_limit(folder, out, pb):
    write_policy(folder, risks=(0.1, 0.2))
    deploy(folder, RepositoryOptions(out, keep_samples="kept"))
    limit = {"alpha": 0.05, "min_ari": None}
    assert routes_of(out)["monitor"] == {
        "share": 0.005,
        "keep": str(Path("kept").absolute()),
        "limits": {"auto-0.1": {"rate": 0.1, **limit}, "auto-0.2": {"rate": 0.2, **limit}},
    }
    assert reasons(out, "routes", "fields") == []
    read = src.routes.read_routes(out / MODEL / "1" / "routes.json").monitor
    assert read.share == 0.005 and read.limits["auto-0.2"].rate == 0.2


def test_against_labels_it_is_a_bound_on_answers_that_differ(folder, out):
    """Both the bound and the monitor may be wrong in half of the cases."""
    content = write_policy(folder, against="labels")
    answers = read_answers(content, folder / "auto.policy.json")
    (found,) = certify(answers, (0.1,), confidence=0.95, against="labels", steps=3)
    lost = found.chain.losses(answers.testing, answers.differs[:, answers.learn :])
    bound = binomial_bound(int(lost.sum()), len(lost), 0.975)
    assert 0.01 < bound < 0.5
    deploy(folder, RepositoryOptions(out))
    limit = routes_of(out)["monitor"]["limits"]["auto"]
    assert limit == {"alpha": 0.025, "min_ari": None, "rate": pytest.approx(bound, abs=1e-6)}


def test_a_share_of_zero_leaves_it_out(folder, out):
    write_policy(folder)
    deploy(folder, RepositoryOptions(out, monitor=0))
    assert "monitor" not in routes_of(out)


def test_without_policies_there_is_nothing_to_monitor(folder, out):
    deploy(folder, RepositoryOptions(out))
    assert "monitor" not in routes_of(out)


@pytest.mark.parametrize("options", [{"monitor": 0}, {"policies": False}, {}])
def test_images_are_kept_only_where_some_are_sampled(folder, out, options):
    if options:
        write_policy(folder)
    with pytest.raises(SaccadeError, match="--keep-samples: found no answers of policies"):
        deploy(folder, RepositoryOptions(out, keep_samples="kept", **options))
    assert not out.exists()


def test_images_are_not_kept_in_the_repository(folder, out):
    write_policy(folder)
    with pytest.raises(SaccadeError, match="a folder outside of the repository"):
        deploy(folder, RepositoryOptions(out, keep_samples=out / "kept"))


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "some"])
def test_a_share_is_a_share(out, share):
    with pytest.raises(SaccadeError, match="--monitor: found"):
        RepositoryOptions(out, monitor=share)


def of_another_name(monitor):
    monitor["limits"]["other"] = monitor["limits"].pop("auto")


CHANGES = {
    "share": (lambda monitor: monitor.update(share=2.0), "share is 2, expected above 0 and at"),
    "alpha": (lambda monitor: monitor["limits"]["auto"].update(alpha=1.0), "alpha is 1, expected"),
    "rate": (lambda monitor: monitor["limits"]["auto"].update(rate="low"), "found 'low'"),
    "key": (lambda monitor: monitor.update(speed=1), "speed"),
    "policy": (of_another_name, "monitor: expected the limits of auto."),
}


@pytest.mark.parametrize("case", CHANGES)
def test_preflight_sees_what_was_changed(folder, out, case):
    write_policy(folder)
    deploy(folder, RepositoryOptions(out))
    change, words = CHANGES[case]
    change_routes(out, lambda routes: change(routes["monitor"]))
    assert any(words in reason for reason in reasons(out, "routes")), reasons(out, "routes")


def test_who_answers_in_bulk_or_measures_has_no_monitor_thread(folder):
    assert not BulkOptions(input="a", out="b").repository(Path("c")).policies


def test_segmentations_are_compared_as_in_the_calibration(tmp_path, out, pb):
    made = Path(shutil.copytree(family_folder("slot-attention"), tmp_path / "slots"))
    calibrated_slots(made, min_ari=0.9)
    deploy(made, RepositoryOptions(out))
    (limit,) = routes_of(out, "slot-attention")["monitor"]["limits"].values()
    assert limit == {"rate": 0.3, "alpha": 0.05, "min_ari": 0.9}


def test_slots_may_be_numbered_differently(pb, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(src.routes.__file__).parent))
    source = Path(
        shutil.copy(Path(tiny.__file__).parents[1] / "models" / "rand_index.py", tmp_path)
    )
    monkeypatch.syspath_prepend(str(source.parent))
    family = family_module("slot_attention").Family.__new__(family_module("slot_attention").Family)
    masks = np.random.default_rng(0).random((3, 8, 8))
    other = np.random.default_rng(1).random((3, 8, 8))
    assert family.agrees(masks, masks[[2, 0, 1]], 0.95) and not family.agrees(masks, other, 0.95)
    assert family.of_row({"seed": 3, "first_image": 10}, 4) == {"seed": 3, "first_image": 14}
    assert family.of_row({}, 2) == {"first_image": 2}
