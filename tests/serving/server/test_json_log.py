# SPDX-License-Identifier: Apache-2.0
"""The log as JSON: one object a line, whatever is put into it; and where spans are handed on."""

import json
import logging
import os
import re
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.commands import cli
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.log import JsonFormatter, ServerLog, event, read_line, request_fields
from saccade.serving.server.process import backend_code, trace_arguments, trace_notices
from saccade.serving.server.serve import print_command, serve

HOSTILE = 'a\x1b]0;title\x07\r\n{"level": "error"}\x9b\u202e\ud800é'


def line_of(text, *values, level=logging.INFO, error=None, **arguments):
    record = logging.LogRecord("saccade.serve", level, "f", 1, text, values, error)
    record.__dict__ |= arguments.get("extra", {})
    return JsonFormatter().format(record)


def texts_in(value):
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return (
        [text for item in value for text in texts_in(item)]
        if isinstance(value, list)
        else [value if isinstance(value, str) else ""]
    )


def test_a_record_is_one_object_with_the_fields_of_its_event():
    fields = event("variant_died", variant="nac-b1000-fp32", pause_s=2.0)
    line = line_of("The process of %s has died.", "nac", level=logging.ERROR, **fields)
    content = json.loads(line)
    time = content.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)
    assert abs(datetime.fromisoformat(time).timestamp() - datetime.now().timestamp()) < 600
    assert content == {
        "level": "error", "logger": "saccade.serve", "message": "The process of nac has died.",
        "event": "variant_died", "variant": "nac-b1000-fp32", "pause_s": 2.0,
    }  # fmt: skip


def test_no_text_of_others_leaves_its_line_or_commands_a_terminal():
    line = line_of("%s", HOSTILE, **event(HOSTILE, variants=[HOSTILE], reason=HOSTILE))
    assert line.isascii() and line.isprintable()
    content = json.loads(line)
    assert all(text.isprintable() for text in texts_in(content))
    assert content["message"] == "a\\x1b]0;title\\x07\\r"
    assert content["detail"] == ['{"level": "error"}\\x9b\\u202e\\ud800é']
    assert content["variants"] == [
        'a\\x1b]0;title\\x07\\r\\n{"level": "error"}\\x9b\\u202e\\ud800é'
    ]
    assert content["level"] == "info"


def test_a_trace_is_detail():
    try:
        raise ValueError("why")
    except ValueError:
        content = json.loads(line_of("It failed.", error=sys.exc_info()))
    assert content["message"] == "It failed."
    assert content["detail"][0].startswith("Traceback") and content["detail"][-1].endswith("why")


LINE = "W1122 17:08:52.222921 17570 request_log.py:72] "
GOOD = {"model": "nac", "request_id": "me/1", "code": "INVALID_ARGUMENT", "reason": "too small",
        "variant": "v", "waited_s": 0.5, "run_s": 0.0}  # fmt: skip


def told(content):
    text = "saccade-request " + (content if isinstance(content, str) else json.dumps(content))
    return LINE + json.dumps(text)  # as the server quotes it


def test_the_servers_own_lines_are_read_as_it_quotes_them():
    assert read_line(LINE + r'"a \"b\" \\x1b \n \u001B c\\n"', logging.INFO) == (
        logging.WARNING,
        'a "b" \\x1b \n \x1b c\\n',
    )
    # Callers use the relay's metrics, so the server's own address would only mislead.
    own = "I1122 17:08:52.222921 17570 http_server.cc:350] "
    assert read_line(own + '"Started Metrics Service at 127.0.0.1:42923"', 0)[0] == logging.DEBUG
    assert read_line(own + '"Started HTTPService at 127.0.0.1:8000"', 0)[0] == logging.INFO
    assert read_line(LINE + r'"no \x JSON"', logging.INFO)[1] == r"no \x JSON"


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (told(GOOD), GOOD),
        (told(GOOD | {"left_out": 3, "other": "x" * 99}), GOOD | {"left_out": 3}),
        (told(GOOD | {"waited_s": "0.5", "run_s": True, "code": ["x"]}),
         {k: v for k, v in GOOD.items() if k not in ("waited_s", "run_s", "code")}),
        (told("[1]"), {}),
        (told("{"), {}),
        (LINE + json.dumps("a caller says: saccade-request {}"), {}),
        (LINE + json.dumps(json.dumps(GOOD)), {}),
    ],
)  # fmt: skip
def test_a_routers_line_about_a_request_is_read(line, fields):
    assert request_fields(read_line(line, logging.INFO)[1]) == fields


def test_a_request_that_failed_is_an_event_and_no_last_word_of_the_server(caplog, tmp_path):
    log = ServerLog()
    output = tmp_path / "output"
    output.write_text(told(GOOD) + "\n" + LINE + '"something else"\n')
    flag = SimpleNamespace(set=lambda: None)
    with caplog.at_level(logging.INFO, "saccade.server"):
        log.follow(output.open("rb"), flag, flag).join()
    first, second = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert first.items() >= {"event": "request_failed", "level": "warning", **GOOD}.items()
    assert first["message"] == "request me/1 INVALID_ARGUMENT: too small"
    assert (second["message"], "event" in second) == ("something else", False)
    assert log.last_lines() == "  | something else"


def test_the_lines_of_a_reason_are_detail(caplog):
    text = "saccade-request " + json.dumps(GOOD | {"reason": "no such budget\n  a  1\n  b  2"})
    with caplog.at_level(logging.INFO, "saccade.server"):
        ServerLog()._tell_request(logging.WARNING, text, request_fields(text))
    content = json.loads(JsonFormatter().format(caplog.records[0]))
    assert content["message"] == "request me/1 INVALID_ARGUMENT: no such budget"
    assert (content["detail"], content["reason"]) == (["  a  1", "  b  2"], "no such budget")


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [(ServerFailed("It ended (killed by SIGKILL).\n  | last"), 3, "failed"),
     (SaccadeError("Port 1 is taken."), 2, "failed"), (KeyboardInterrupt(), 130, "interrupted")],
)  # fmt: skip
def test_the_end_is_a_line_of_the_log_too(error, code, kind, monkeypatch, capfd):
    def fail(*_):
        raise error

    monkeypatch.setattr("saccade.serving.server.serve.Server", fail)
    monkeypatch.setattr(logging.getLogger("saccade"), "propagate", False)  # to pytest's handlers
    assert serve("nowhere", ServeOptions(log_format="json")) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line).items() >= {"event": kind, "exit_code": code}.items()
    with pytest.raises(type(error)):
        serve("nowhere", ServeOptions())


def test_formats_that_are_none_and_a_printed_command_are_refused(capsys):
    with pytest.raises(SaccadeError, match="'xml', expected one of text, json"):
        ServeOptions(log_format="xml")
    with pytest.raises(SaccadeError, match="runs without it"):
        print_command("nowhere", ServeOptions(log_format="json"))
    assert cli.run(["serve", "nowhere", "--log-format", "xml"]) == 2


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
