# SPDX-License-Identifier: Apache-2.0
"""The fields that are written, against the messages that the bundled server carries itself."""

from importlib import util
from pathlib import Path

import pytest
from places import TESTS

from saccade.serving.repository.model_config import parse_config

EXAMPLES = TESTS / "serving" / "repository" / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.pbtxt")), ids=lambda path: path.stem)
def test_the_bundled_server_knows_every_field_that_is_written(example):
    # Preflight refuses any other field, also those that a newer server knows.
    package = util.find_spec("pytriton")
    if package is None or package.origin is None:
        pytest.skip("nvidia-pytriton is not installed: pip install '.[serve]'")
    data = (Path(package.origin).parent / "tritonserver/bin/tritonserver").read_bytes()
    known = fields_of(server_messages(data).message_type)
    written = set(set_fields(parse_config(example.read_text())))
    assert "ModelConfig.max_batch_size" in written and "ModelConfig.model_metrics" not in known
    assert written <= known


def set_fields(message):
    """The fields of a message and of the messages in it."""
    for field, value in message.ListFields():
        yield field.full_name.removeprefix("inference.")
        if field.message_type and not field.message_type.GetOptions().map_entry:
            for each in value if hasattr(value, "add") else [value]:
                yield from set_fields(each)


def server_messages(data):
    """The messages of the configuration that a server carries in its program."""
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    start = data.index(b"\n\x12model_config.proto")
    for size in range(4000, 40000):
        descriptor = descriptor_pb2.FileDescriptorProto()
        try:
            descriptor.ParseFromString(data[start : start + size])
        except DecodeError:
            continue
        if descriptor.syntax == "proto3":
            return descriptor
    raise AssertionError("the server carries no messages of a configuration")


def fields_of(types, prefix=""):
    """All fields of messages by name, those inside other messages too."""
    names = set()
    for kind in types:
        names |= {f"{prefix}{kind.name}.{field.name}" for field in kind.field}
        names |= fields_of(kind.nested_type, f"{prefix}{kind.name}.")
    return names
