# SPDX-License-Identifier: Apache-2.0
"""The table of broken lines fits the sources that it breaks; `make check-mutations` runs it."""

import json

from mutations import ROOT, merged, table

ROWS = table()
CORE = ("fold", "prune", "gate", "router", "ops", "kernels", "guards")


def test_every_row_breaks_a_line_that_is_there():
    assert [fault for row in ROWS if (fault := row.fault())] == []
    assert len({row.what for row in ROWS}) == len(ROWS)
    assert sum(row.group in CORE for row in ROWS) >= 60


def test_results_are_of_this_table():
    content = json.loads((ROOT / "benchmarks" / "results" / "mutations.json").read_text())
    assert [result["what"] for result in content["results"]] == [row.what for row in ROWS]
    assert content["mutations"] == len(ROWS)


def test_a_later_run_keeps_what_the_first_one_found(tmp_path):
    path, rows = tmp_path / "m.json", ROWS[:2]
    missed = [{"what": row.what, "group": row.group, "noticed": False} for row in rows]
    first = merged(path, missed, rows)
    assert (first["noticed"], first["first_run"]["noticed"]) == (0, 0)
    path.write_text(json.dumps(first))
    for _ in range(2):
        later = merged(path, [{**missed[1], "noticed": True}], rows)
        path.write_text(json.dumps(later))
    assert (later["noticed"], later["not_noticed"]) == (1, [rows[0].what])
    assert later["first_run"]["not_noticed"] == [row.what for row in rows]
