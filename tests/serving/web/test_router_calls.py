# SPDX-License-Identifier: Apache-2.0
"""Operations of web callers: a server that was replaced between two requests is asked again."""

import asyncio

import pytest

from saccade.core.errors import ServerFailed
from saccade.serving.web.router_calls import RouterCalls, WebCaller


@pytest.mark.parametrize(("failures", "answer"), [(0, "a 1"), (1, "a 2"), (2, None)])
def test_an_operation_is_run_again_once(failures, answer):
    begun = []

    def operation():
        begun.append("a")
        if len(begun) <= failures:
            raise ServerFailed("the server was replaced between two requests")
        return f"a {len(begun)}"
        yield  # nothing, so that no server is needed

    run = RouterCalls("127.0.0.1:1", "m").run(operation, WebCaller("b", 1.0, 1.0))
    if answer is None:
        with pytest.raises(ServerFailed):
            asyncio.run(run)
    else:
        assert asyncio.run(run) == answer
    assert len(begun) == min(2, failures + 1)
