# SPDX-License-Identifier: Apache-2.0
"""Classes of advisories known for model servers: the tests that close each, or what is open."""

import ast
import re
from dataclasses import dataclass

import pytest
from places import TESTS

ROOT = TESTS
PAGE = ROOT.parent / "docs" / "security.md"


@dataclass(frozen=True)
class Closed:
    """One class: the tests (`file::test`) that close it, and whether the page says what is open."""

    tests: tuple[str, ...]
    is_open: bool = False


CLASSES = {
    "a caller that registers the server's shared memory": Closed((
        "serving/server/test_local_users.py::test_the_servers_own_memory_is_no_callers_memory",
        "serving/server/test_local_users.py::test_images_and_files_of_a_run_are_its_users_alone",
    )),
    "stack exhaustion by a request: small chunks, nested JSON": Closed((
        "serving/server/test_server.py::test_http_is_off_unless_asked_for",
        "serving/server/test_server.py::test_the_bundled_servers_http_stays_on_this_machine",
        "serving/server/test_proxy.py::test_a_body_in_chunks_does_not_reach_the_server",
        "serving/server/test_proxy.py::"
        "test_json_that_is_nested_too_deeply_does_not_reach_the_server",
    ), is_open=True),
    "stack exhaustion by a file": Closed((
        "export/graph/test_graph_limits.py::"
        "test_worker_ends_for_what_costs_too_much_and_the_next_file_is_tried",
        "system/test_hostile_files.py::test_json",
    )),
    "administration reached by another path": Closed((
        "serving/server/test_local_users.py::test_administration_is_closed_over_grpc",
        "serving/server/test_server.py::test_administration_is_closed_over_http",
    )),
    "path traversal and links": Closed((
        "export/artefact/test_manifest.py::test_refuses",
        "export/artefact/test_hostile_manifests.py::"
        "test_an_artefact_that_is_a_link_has_the_bytes_of_its_manifest",
        "serving/server/test_served_copy.py::test_a_link_is_refused_by_every_reader",
        "serving/bulk/test_hostile_inputs.py::test_a_table_names_files_below_its_folder_alone",
        "models/test_hub.py::test_no_header_becomes_a_path",
    )),
    "requests that a file or a caller makes this machine send": Closed((
        "serving/bulk/test_hostile_inputs.py::test_no_row_chooses_the_store_that_is_asked",
        "serving/server/test_openai.py::test_wrong_requests_are_refused",
    )),
    "files and answers without end": Closed((
        "system/test_hostile_files.py::test_what_is_no_file",
        "models/data/test_shards.py::test_a_hostile_header_is_refused",
        "models/test_hub.py::test_a_file_without_end_is_read_up_to_its_listed_size",
    ), is_open=True),
    "numeric overflow": Closed((
        "serving/router/test_router.py::test_classes_over_grpc",
        "serving/router/test_lanes.py::test_a_timeout_that_is_none_never_reaches_a_lane",
        "export/artefact/test_manifest.py::test_refuses",
        "export/artefact/test_hostile_manifests.py::test_frontier_names_the_value",
    )),
    "growth: messages, queues": Closed((
        "serving/router/test_lanes.py::test_a_full_lane_refuses_at_once_with_a_hint",
        "serving/server/test_proxy.py::test_a_message_over_the_cap_is_refused_and_the_server_lives",
    ), is_open=True),
    "growth: answers of a receiver of spans": Closed((
        "serving/router/test_instrumentation.py::test_an_answer_without_end_is_not_read",
    )),
    "pages of other sites": Closed((
        "serving/server/test_ready_endpoint.py::test_pages_of_other_sites_are_refused",
        "serving/commands/test_explore.py::test_page_in_chromium",
        "serving/server/test_openai.py::test_other_sites_are_refused_without_a_key",
    ), is_open=True),
    "growth: files that expand": Closed((
        "export/graph/test_graph_limits.py::"
        "test_worker_ends_for_what_costs_too_much_and_the_next_file_is_tried",
        "system/test_hostile_files.py::test_npz",
        "models/data/test_small_files.py::test_equal_values_that_are_stored_once_are_not_unpacked",
        "models/data/test_small_files.py::test_masks_of_many_objects_take_the_memory_of_one",
        "models/training/test_recipe_file.py::test_refuses",
    ), is_open=True),
    "model as code": Closed((
        "serving/server/test_served_copy.py::"
        "test_what_is_served_is_a_copy_that_the_repository_cannot_change",
        "serving/repository/test_preflight_process.py::test_a_library_is_compared_before_it_is_loaded",
    )),
    "plan as code": Closed((
        "export/runtimes/test_engines_loading.py::test_unknown_changed_and_linked_plans",
        "export/runtimes/test_engines_loading.py::test_a_throw_away_process_sees_it_first",
    ), is_open=True),
    "archive as code": Closed((
        "serving/repository/test_preflight.py::test_a_broken_repository_is_refused_with_its_reason",
        "system/test_hostile_files.py::test_npz",
    )),
    "weights in another file": Closed((
        "export/graph/test_graph_limits.py::test_graph_beyond_a_limit_is_refused_in_words",
        "export/graph/test_graph_limits.py::test_verb_refuses_and_writes_nothing",
    )),
    "pickle": Closed((
        "system/test_hostile_files.py::test_weights_of_other_codes",
        "models/test_hostile_checkpoints.py::test_checkpoint",
    )),
    "decompression bombs in images": Closed((
        "serving/router/test_decode.py::test_is_refused_with_found_and_allowed",
        "serving/router/test_decode.py::test_no_pixel_is_decoded_before_the_caps_have_been_checked",
    )),
    "escape sequences in text": Closed((
        "core/test_escapes.py::test_texts_and_tables",
        "core/test_escapes.py::test_labels_of_a_server_stay_on_their_line",
    )),
    "a library that hangs": Closed((
        "core/test_worker.py::test_parent_hears_how_it_ended_and_the_next_request_has_another",
        "export/graph/test_graph_limits.py::test_gate_reports_the_file_and_measures_the_others",
    ), is_open=True),
}  # fmt: skip
TESTS = sorted({test for class_ in CLASSES.values() for test in class_.tests})


@pytest.mark.parametrize("test", TESTS)
def test_the_test_that_closes_it_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert has(file, name), f"{test} is gone: name the one that closes it now"


def has(file: str, name: str) -> bool:
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_has_the_same_classes() -> None:
    section = PAGE.read_text().partition("## Classes of advisories")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "`test_" in line]
    assert [re.sub(r" \(CVE[^)]*\)", "", row[0]) for row in rows] == list(CLASSES)
    for (name, known), row in zip(CLASSES.items(), rows, strict=True):
        files = {test.partition("::")[0].rpartition("/")[2] for test in known.tests}
        assert set(re.findall(r"test_\w+\.py", row[1])) == files, name
        assert (row[2] != "-") == known.is_open, name
