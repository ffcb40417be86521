# SPDX-License-Identifier: Apache-2.0
"""Callers' contexts are handed on where spans are asked for, to routers that know of them."""

import os

import pytest

from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.process import backend_code, trace_arguments, trace_notices

GIVEN = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
GRPC = "--grpc-header-forward-pattern=(?i)^(traceparent|tracestate)$"


@pytest.fixture
def models(tmp_path):
    (tmp_path / "nac" / "1").mkdir(parents=True)
    (tmp_path / "nac" / "1" / "tracing.py").touch()
    return tmp_path


def test_contexts_are_handed_on_only_where_spans_are_asked_for(models):
    over_http = ServeOptions(http=True)
    assert trace_arguments(models, ServeOptions(), {}) == []
    assert trace_arguments(models, ServeOptions(), GIVEN) == [GRPC]
    assert trace_arguments(models, over_http, GIVEN) == [GRPC, GRPC.replace("grpc", "http")]


def test_a_router_of_an_older_release_is_sent_nothing_that_it_would_refuse(models):
    (models / "nac" / "1" / "tracing.py").unlink()
    assert trace_arguments(models, ServeOptions(), GIVEN) == []
    (text,) = trace_notices(models, GIVEN)
    assert "older release" in text and "saccade repository" in text


def test_what_stands_between_is_said(models):
    assert list(trace_notices(models, {})) == []
    (text,) = trace_notices(models, GIVEN | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert "'grpc', expected http/protobuf" in text and "unset OTEL_EXPORTER_OTLP_ENDPOINT" in text


def test_the_backend_has_what_it_imports():
    names = {name.partition("/")[2] for name in backend_code()}
    assert names == {"model.py", "variant.py", "runtime.py", "tracing.py"}
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ  # else every server here would send
