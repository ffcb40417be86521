# SPDX-License-Identifier: Apache-2.0
"""The table of faults: what happens, to whom, when, under which load, and who may notice.

A row describes the wanted result, which may or may not be met today; the driver checks it.
"""

from dataclasses import dataclass

NEVER = frozenset[str]()
RETRY = frozenset({"UNAVAILABLE"})
LATE = RETRY | {"DEADLINE_EXCEEDED"}
# It takes the server up to 2 s to see that a process died during a call, and by then the caller's
# timeout may have expired.
DYING = LATE
# Answers to the sender of a bad request: the request is wrong, or there is no capacity.
REFUSED = frozenset({"INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"})


@dataclass(frozen=True)
class Notice:
    """Limits on what callers may notice: statuses instead of answers, for how long, and slowdown.

    Units: for_s is seconds after the fault's end on a quiet machine (one start takes QUIET_START_S
    there); p99_times is the 99th percentile of their waits over that before the fault.
    """

    statuses: frozenset[str] = NEVER
    for_s: float = 0.0
    p99_times: float | None = None


@dataclass(frozen=True)
class Row:
    """One fault and who may notice what of it.

    `victim` tells which callers count as affected: those of the cheapest variant, of the full one,
    or all. `servers` is how many more server processes may start. `hears` are the statuses that the
    fault's own requests may get. Units: memory_mib is MiB more than before, after it is over.
    """

    name: str
    fault: str
    what: str
    victim: str
    callers: Notice
    others: Notice = Notice()
    moment: str = "while callers are served"
    load: str = "4 callers"
    servers: int = 0
    hears: frozenset[str] = NEVER
    survives: bool = True
    memory_mib: float | None = None
    serve: tuple[str, ...] = ()
    short: bool = False


UNSEEN = Notice()
UNTROUBLED = Notice(p99_times=2.0)
IDLE = "while idle"
START = "at the start"
NO_CALLERS = "none"

ROWS = (
    # Processes that die or stop.
    Row("variant-killed", "kill_variant", "SIGKILL of a variant's process", "cheap",
        Notice(DYING, 8), UNTROUBLED, servers=1, short=True),
    Row("variant-killed-idle", "kill_variant", "SIGKILL of a variant's process", "cheap",
        Notice(DYING, 8), moment=IDLE, load=NO_CALLERS, servers=1),
    Row("variant-stopped", "stop_variant", "SIGSTOP of a variant's process", "cheap",
        Notice(LATE, 60), UNTROUBLED, servers=1),
    Row("router-killed", "kill_router", "SIGKILL of the router's process", "all",
        Notice(DYING, 8), servers=1),
    Row("router-stopped", "stop_router", "SIGSTOP of the router's process", "all",
        Notice(LATE, 60), servers=1),
    Row("server-killed", "kill_server", "SIGKILL of the server", "all",
        Notice(RETRY, 8), servers=1),
    Row("server-stopped", "stop_server", "SIGSTOP of the server", "all",
        Notice(LATE, 30), servers=1),
    Row("proxy-killed", "kill_proxy", "SIGKILL of the Envoy of `saccade serve --proxy`", "all",
        Notice(RETRY, 8), serve=("--no-http", "--proxy")),
    Row("serve-killed", "kill_serve", "SIGKILL of `saccade serve`", "all",
        Notice(RETRY), survives=False),
    Row("serve-ended", "terminate_serve", "SIGTERM of `saccade serve`", "all",
        Notice(RETRY), survives=False),
    Row("serve-ended-call", "terminate_during_a_call",
        "SIGTERM of `saccade serve` while it answers a request of 16 photographs", "all", UNSEEN,
        moment=IDLE, load=NO_CALLERS, hears=frozenset({"OK"}), survives=False),
    Row("memory-short", "memory_limit", "the router's process cannot allocate more memory", "all",
        Notice(LATE | {"INTERNAL"}, 8), servers=1,
        hears=LATE | REFUSED | {"OK", "INTERNAL"}),
    # Files and ports.
    Row("log-full", "kill_variant", "the disk of `--server-log` is full, then a variant dies",
        "cheap", Notice(DYING, 8), servers=1, serve=("--server-log", "/dev/full")),
    Row("disk-full-start", "disk_full_at_start", "the disk of the run folder is full", "all",
        UNSEEN, moment=START, load=NO_CALLERS, survives=False),
    Row("disk-full", "disk_full", "the disk of the run folder is full for 3 s, and a variant dies",
        "cheap", Notice(DYING, 8), servers=1),
    Row("port-taken-start", "port_taken_at_start", "another program uses the port", "all",
        UNSEEN, moment=START, load=NO_CALLERS, survives=False),
    Row("port-taken", "port_taken", "the server dies and another program uses its port for 3 s",
        "all", Notice(LATE | {"UNIMPLEMENTED"}, 20), servers=4),
    Row("http-port-taken", "http_port_taken",
        "HTTP is off, another program uses port 8000, and the server dies", "all",
        Notice(RETRY, 8), servers=1, serve=("--no-http", "--http-port", "8000")),
    Row("repository-changed", "change_repository",
        "the router's code is changed in the repository, then the router dies", "all",
        Notice(DYING, 8), servers=1),
    Row("repository-removed", "remove_repository",
        "the repository is moved away, then a variant dies", "cheap", Notice(DYING, 8), servers=1),
    Row("update", "reload_same", "SIGHUP: the repository is read again", "all", UNSEEN, servers=1),
    Row("update-broken", "reload_broken", "SIGHUP with a broken repository", "all", UNSEEN,
        servers=1),
    # Callers that send what they should not.
    Row("timeouts", "hostile_timeouts", "`timeout` of -1, 2^64-1, 0 and a string, in 400 requests",
        "all", UNSEEN, hears=LATE | REFUSED | {"OK"}, short=True),
    Row("classification", "classify_names", "`classification` requested for outputs that are names",
        "all", UNSEEN, hears=REFUSED | {"OK"}, short=True),
    Row("malformed", "malformed_grpc", "300 malformed gRPC messages", "all", UNSEEN,
        hears=REFUSED | LATE | {"OK", "INTERNAL", "NOT_FOUND"}, memory_mib=64),
    Row("broken-texts", "broken_texts", "400 images that claim to be longer than they are",
        "all", UNSEEN, hears=REFUSED, short=True),
    Row("garbage", "garbage_bytes", "random bytes on the gRPC and the HTTP port", "all", UNSEEN,
        memory_mib=64),
    Row("half-requests", "half_requests", "200 callers that stop in the middle of a request",
        "all", UNSEEN, memory_mib=128),
    Row("idle-connections", "idle_connections", "1,500 connections that send nothing", "all",
        UNSEEN),
    Row("chunks", "one_byte_chunks", "1,000,000 chunks of one byte in one HTTP request", "all",
        UNSEEN),
    Row("nested-json", "nested_json", "150,000 brackets as JSON in one HTTP request",
        "all", UNSEEN),
    Row("packed-body", "packed_bodies",
        "four compressed HTTP requests of 0.1 MB, each with 100 MiB of zeros", "all", UNSEEN,
        memory_mib=128),
    Row("empty-batch", "empty_batches", "40 empty batches straight to a variant", "all", UNSEEN,
        hears=frozenset({"INVALID_ARGUMENT"}), short=True),
    Row("big-message", "big_messages", "three messages of 256 MiB", "all", UNSEEN,
        hears=REFUSED | LATE, memory_mib=1200),
    Row("photographs", "photographs", "a request of 64 photographs of 12 megapixels", "full",
        UNSEEN, moment=IDLE, load=NO_CALLERS, hears=REFUSED | LATE | {"OK"}),
    Row("bombs", "picture_bombs", "64 PNG files of 49 megapixels in 3 MB, `timeout` of one second",
        "full", Notice(LATE, 3), hears=REFUSED | LATE, load="4 callers"),
    Row("overload", "overload", "3 times the capacity of one budget, for 45 s", "full",
        Notice(LATE, 2), hears=LATE | {"OK"}, load="open loop", memory_mib=128),
    Row("overload-all", "overload_all", "3 times the capacity of all budgets, for 45 s", "all",
        Notice(LATE, 2), hears=LATE | {"OK"}, load="open loop", memory_mib=128),
    Row("cancelled", "cancelled_calls", "calls canceled after 1 to 50 ms, for 20 s", "full",
        Notice(LATE, 2), hears=LATE | {"OK", "CANCELLED"}, load="open loop", memory_mib=128),
)  # fmt: skip


def rows(names: tuple[str, ...] = (), *, short: bool = False) -> tuple[Row, ...]:
    """Return the rows with these names, by default all; with `short`, those of the short form.

    Raises: KeyError naming an unknown row.
    """
    known = {row.name: row for row in ROWS}
    chosen = [known[name] for name in names] if names else list(ROWS)
    return tuple(row for row in chosen if row.short or not short)
