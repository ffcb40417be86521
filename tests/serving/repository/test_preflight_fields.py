# SPDX-License-Identifier: Apache-2.0
"""The table of newer fields against the messages that the bundled server carries itself."""

from importlib import util
from pathlib import Path

import pytest

from saccade.serving.repository.config_text import messages
from saccade.serving.repository.preflight.target import NEWER_FIELDS


def test_the_newer_fields_are_those_that_the_bundled_server_does_not_have():
    package = util.find_spec("pytriton")
    if package is None or package.origin is None:
        pytest.skip("nvidia-pytriton is not installed: pip install 'saccade[serve]'")
    from google.protobuf import descriptor_pb2

    data = (Path(package.origin).parent / "tritonserver/bin/tritonserver").read_bytes()
    own, todays = server_messages(data), descriptor_pb2.FileDescriptorProto()
    messages().DESCRIPTOR.CopyToProto(todays)
    known = {each.name for each in own.message_type}
    newer = fields_of(todays.message_type) - fields_of(own.message_type)
    # Fields of a message that is new itself come with the field that holds it.
    assert {each for each in newer if each.split(".")[0] in known} == set(NEWER_FIELDS)


def server_messages(data):
    """The messages of the configuration that a server carries in its program."""
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    start = data.index(b"\n\x12model_config.proto")
    for size in range(4000, 40000):
        found = descriptor_pb2.FileDescriptorProto()
        try:
            found.ParseFromString(data[start : start + size])
        except DecodeError:
            continue
        if found.syntax == "proto3":
            return found
    raise AssertionError("the server carries no messages of a configuration")


def fields_of(types, prefix=""):
    """All fields of messages by name, those inside other messages too."""
    found = set()
    for each in types:
        found |= {f"{prefix}{each.name}.{field.name}" for field in each.field}
        found |= fields_of(each.nested_type, f"{prefix}{each.name}.")
    return found
