# SPDX-License-Identifier: Apache-2.0
"""List known advisories of the packages and which could not be checked: python advisories.py

pip-audit queries PyPI and OSV separately. A service does not check packages that it does not know.
Packages that neither checked are listed, because an exit code of 0 alone proves nothing.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from packages import ROOT, brought_along, normal, pinned

SERVICES = ("pypi", "osv")
TIMEOUT_S = 180
# One line each, `ID reason`: advisories that do not apply to how saccade uses a package.
ACCEPTED = Path(__file__).with_name("accepted.txt")


@dataclass(frozen=True)
class Audit:
    """The result of an audit by the services; packages are name==version."""

    checked: frozenset[str]
    unchecked: dict[str, str]  # package -> reason
    known: dict[str, frozenset[str]]  # package -> advisories
    silent: tuple[str, ...] = ()  # services that did not answer

    @property
    def exit_code(self) -> int:
        """1 for a known advisory. Packages that could not be checked are not a failure."""
        return 1 if self.known else 0


def audit(answers: dict[str, Any], pins: list[str], accepted: frozenset[str]) -> Audit:
    """Combine the answers of the services; a failed service has an error message as its answer."""
    checked: set[str] = set()
    reasons: dict[str, list[str]] = {pin: [] for pin in pins}
    known: dict[str, set[str]] = {}
    for service, answer in answers.items():
        if isinstance(answer, str):
            for pin in pins:
                reasons[pin].append(f"{service}: {answer}")
            continue
        said = {normal(dependency["name"]): dependency for dependency in answer["dependencies"]}
        for pin in pins:
            said_of_it = said.get(normal(pin.partition("==")[0]), {"skip_reason": "no answer"})
            if "skip_reason" in said_of_it:
                reasons[pin].append(f"{service}: {said_of_it['skip_reason']}")
                continue
            checked.add(pin)
            names = {v["id"]: {v["id"], *v.get("aliases", ())} for v in said_of_it["vulns"]}
            if left := {name for name, also in names.items() if not also & accepted}:
                known.setdefault(pin, set()).update(left)
    return Audit(
        checked=frozenset(checked),
        unchecked={pin: "; ".join(why) for pin, why in reasons.items() if pin not in checked},
        known={pin: frozenset(vulnerabilities) for pin, vulnerabilities in known.items()},
        silent=tuple(service for service, answer in answers.items() if isinstance(answer, str)),
    )


def render(audit: Audit) -> str:
    """Return a text report: known advisories first, then packages that were not checked."""
    lines = [f"{pin}: {', '.join(sorted(known))}" for pin, known in sorted(audit.known.items())]
    total = len(audit.checked) + len(audit.unchecked)
    if audit.checked:
        lines.append(
            f"advisories: {len(audit.checked)} of {total} packages checked, "
            f"{len(audit.known)} with known advisories"
            + (f" ({', '.join(audit.silent)} did not answer)." if audit.silent else ".")
        )
    if audit.unchecked:
        pin, why = min(audit.unchecked.items())
        lines.append(
            f"advisories: NOT CHECKED: {len(audit.unchecked)} of {total} packages. "
            f"{pin}: {why:.400}"
        )
    return "\n".join(lines)


def ask(service: str, packages: Path, program: str) -> Any:
    """Run pip-audit with one service; return its JSON, or an error message."""
    command = [program, "--requirement", str(packages), "--no-deps", "--disable-pip"]
    command += ["--vulnerability-service", service, "--format", "json", "--progress-spinner=off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        return json.loads(done.stdout)
    except OSError as error:
        return f"{program} could not be started ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no error message"]
        return f"pip-audit exited with {done.returncode} ({last[0]:.200})"


def main(
    program: str = "pip-audit",
    constraints: Path = ROOT / "constraints.txt",
    strict: Annotated[bool, tyro.conf.arg(help="also fail for unchecked packages")] = False,
) -> None:
    """Check the pinned packages and their dependencies; exit with 1 for a known advisory."""
    lines = ACCEPTED.read_text().splitlines()
    accepted = frozenset(line.split()[0] for line in lines if line and line[0] != "#")
    own = pinned(constraints)
    pins = [f"{name}=={version}" for name, version in (own | brought_along(set(own))).items()]
    with tempfile.TemporaryDirectory(prefix="saccade-advisories-") as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("".join(f"{pin}\n" for pin in pins))
        result = audit(
            {service: ask(service, listed, program) for service in SERVICES}, pins, accepted
        )
    print(render(result))
    sys.exit(result.exit_code or int(strict and bool(result.unchecked)))


if __name__ == "__main__":
    tyro.cli(main)
