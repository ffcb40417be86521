# SPDX-License-Identifier: Apache-2.0
"""Findings of the doctor, on this machine and on ones made up."""

import importlib.metadata
import json

import pytest
from report_figures import shown
from tritonclient.utils import InferenceServerException

from saccade.core.errors import install
from saccade.plugins.availability import implementations
from saccade.serving.client.connection import explained
from saccade.serving.commands import doctor as module
from saccade.serving.commands.doctor import doctor


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that these distributions have these versions; None is not installed."""

    def set_versions(**versions: str | None) -> None:
        real = importlib.metadata.version

        def version(name: str) -> str:
            own = versions.get(name.replace("-", "_"), ...)
            if own is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name) if own is ... else own

        monkeypatch.setattr(module.metadata, "version", version)

    return set_versions


def row(report, what):
    return next(row for row in report.rows if row.what == what)


def test_this_machine_is_described():
    report = doctor()
    assert report.exit_code == 0
    assert report.uses()["core"]
    assert row(report, "numpy").found == importlib.metadata.version("numpy")
    json.dumps(report.to_dict())
    text = shown(report.to_text(), 200)
    assert all(row.what in text for row in report.rows)


def test_missing_package_names_its_use_and_the_pip_command(pretend):
    pretend(torch=None, scikit_learn=None)
    report = doctor()
    assert row(report, "torch").advice == install("export")
    assert not row(report, "scikit-learn").good
    assert not report.uses()["export"] and not report.uses()["bench"]
    assert report.exit_code == 0  # one can still call a server
    assert install("export") in shown(report.to_text(), 200)


def test_missing_core_package_is_a_failure(pretend):
    pretend(pillow=None)
    assert doctor().exit_code == 1


def test_both_runtimes_are_one_too_many(pretend):
    pretend(onnxruntime="1.31.1", onnxruntime_gpu="1.31.1")
    runtime_row = row(doctor(), "onnxruntime")
    assert not runtime_row.good and "uninstall both" in runtime_row.advice
    pretend(onnxruntime=None, onnxruntime_gpu="1.31.1")
    assert row(doctor(), "onnxruntime").good


def test_what_is_absent_is_not_ready_and_its_command_is_told_once(pretend):
    pretend(tensorrt_rtx_cu13=None, torch=None, onnx=None)
    report = doctor()
    assert report.uses()["rtx"] is False and report.exit_code == 0
    text = shown(report.to_text(), 200)
    assert "rtx (build engines with TensorRT-RTX): not ready (tensorrt-rtx-cu13)" in text
    assert f"  {install('rtx')}" in text
    assert "not ready (torch, onnx)" in text and text.count(install("export")) == 1
    assert "core (call a server): ready" in text


def test_a_missing_runtime_is_got_by_the_extra_that_brings_it(pretend, monkeypatch):
    pretend(onnxruntime=None, onnxruntime_gpu=None)
    assert install("cpu") in row(doctor(), "onnxruntime").advice

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("saccade.plugins.availability.version", version)
    (kernel,) = (each for each in implementations() if each.name == "ONNX Runtime kernel")
    assert kernel.detail == f"onnxruntime is not installed: {install('cpu')}"


def test_a_server_that_hangs_sends_nobody_back_to_the_doctor(monkeypatch):
    def hangs(url):
        with explained(url, "the server", 10.0):
            raise InferenceServerException("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED")

    monkeypatch.setattr("saccade.serving.client.client.routers_at", hangs)
    report = doctor("127.0.0.1:9")
    assert report.exit_code == 3 and "restart it" in report.trouble
    assert "saccade doctor" not in report.trouble


def test_old_system_exports_but_does_not_serve(monkeypatch):
    monkeypatch.setattr("saccade.serving.repository.installation.glibc_version", lambda: (2, 31))
    monkeypatch.setattr(module, "glibc_version", lambda: (2, 31))
    report = doctor()
    assert not report.uses()["serve"] and report.uses()["core"]
    assert "2.35" in row(report, "tritonserver").advice
    assert report.exit_code == 0


def test_a_running_server_is_asked(server):
    report = doctor(server.url)
    assert report.exit_code == 0
    (readiness,) = report.readiness
    assert readiness.variants == dict.fromkeys(server.variants, True)
    assert f"{server.url} nac-b0125-fp32: answers" in shown(report.to_text(), 200)


def test_no_server_is_a_failure():
    report = doctor("127.0.0.1:9")
    assert report.exit_code == 3
    assert "saccade serve" in report.trouble and report.trouble in shown(
        report.to_text(), 200
    ).replace("\n", " ")


def test_a_wrong_address_is_wrong_input():
    report = doctor("127.0.0.1:9/")
    assert report.exit_code == report.to_dict()["exit_code"] == 2 and "HOST:PORT" in report.trouble
