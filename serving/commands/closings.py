# SPDX-License-Identifier: Apache-2.0
"""The last lines of a command: what it wrote, its size, the time it took, and the next command.

Functions have the names of their commands. They take the command's arguments and its result, and
return None if nothing was written.
"""

import glob
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.sizes import counted, files_below, size_text, time_text
from saccade.models.checkpoint_format import AUTHORS_DATA, header_of


@dataclass(frozen=True)
class Closing:
    """What a command wrote, and the command that usually follows."""

    what: str = ""  # 4 variants
    place: Path | str | None = None  # a file or a folder
    next: str = ""
    later: str = ""  # the command after that one

    def lines(self, seconds: float) -> tuple[str, ...]:
        """Return one or two lines to print after the command's output."""
        parts = [self.what] if self.what else []
        if self.place is not None and Path(self.place).exists():
            count, size = files_below(Path(self.place))
            parts += [f"{count} files", size_text(size)] if count != 1 else [size_text(size)]
        where = f"{self.place}: " if self.place is not None else ""
        made = f"{where}{', '.join([*parts, f'in {time_text(seconds)}'])}."
        then = f"Next: {self.next}", f"Then: {self.later}"
        return (made, *then[: bool(self.next) + bool(self.later)])


def train(given: Mapping[str, Any], result: Any) -> Closing | None:
    if given.get("print_recipe"):
        return None
    out = given["options"].out
    folder = out.with_suffix("")
    if folder.exists():  # the checkpoint itself, or the folder from which it was converted
        folder = out.with_name(f"{folder.name}-export")
    return Closing("checkpoint", out, f"saccade export {_q(out)} --out {_q(folder)}")


def select(given: Mapping[str, Any], result: Any) -> Closing:
    checkpoint, out = given["checkpoint"], given["options"].out
    following = f"saccade export {_q(checkpoint)} --slots {_q(out)} --out {_q(out.with_suffix(''))}"
    return Closing("selection of slots", out, following)


def export(given: Mapping[str, Any], result: Any) -> Closing:
    out = given["options"].out
    return Closing(
        f"{counted(len(result.manifests), 'variant file')} verified",
        out,
        bench_command(out),
        _repository_command(out),
    )


def group(given: Mapping[str, Any], result: Any) -> Closing:
    files = counted(len(result.manifests), "variant file")
    return Closing(files, result.path, bench_command(result.path))


def download(given: Mapping[str, Any], result: Any) -> Closing:
    out = given["options"].out
    return Closing("downloaded", out, f"saccade inspect {_q(out)}")


def verify(given: Mapping[str, Any], result: Any) -> Closing:
    folder = given["folder"]
    variants = result.to_dict()["variants"]
    count = f"{counted(len(variants), 'variant file')} checked"
    if result.exit_code and all(row["passed"] for row in variants):
        # Only a policy failed, and its line names the command that repairs it.
        return Closing(count, folder)
    if result.exit_code:
        if any(not (row["passed"] or row["figures"]) for row in variants):
            grouped = result.artefacts and result.artefacts.variants[0].in_group
            verb = "group FOLDER FOLDER" if grouped else "export CHECKPOINT"
            return Closing(count, folder, f"saccade {verb} --out {_q(folder)} --force")
        bisect = "" if given["bisect"] else " --bisect"
        return Closing(count, folder, f"saccade verify {_q(folder)}{bisect}" if bisect else "")
    return Closing(count, folder, bench_command(folder))


def build(given: Mapping[str, Any], result: Any) -> Closing:
    return Closing("engines", result.folder, f"saccade verify {_q(given['artefact'])}")


def bench(given: Mapping[str, Any], result: Any) -> Closing:
    folder, out = given["folder"], given["options"].out
    if folder is None:  # with --url: what the server serves is a repository already
        return Closing("measurements", out)
    return Closing(f"open {out / 'report.html'}", out, _repository_command(folder))


def sweep(given: Mapping[str, Any], result: Any) -> Closing:
    out = given["options"].out
    if result.exit_code:
        return Closing("some points failed", out, "run the same command with --retry")
    return Closing(
        f"open {out / 'report' / 'report.html'}", out, f"saccade choose {_q(out)} --budget 0.5"
    )


def calibrate(given: Mapping[str, Any], result: Any) -> Closing:
    count = len(result.policies)
    what = f"{count} {'policy' if count == 1 else 'policies'} certified"
    folder = given["folder"]
    return Closing(what, result.path, _repository_command(folder) if count else "")


def repository(given: Mapping[str, Any], result: Any) -> Closing:
    out = given["options"].out
    return Closing("model repository", out, f"saccade preflight {_q(out)}")


def preflight(given: Mapping[str, Any], result: Any) -> Closing:
    repository = given["repository"]
    # The bundled server has another version.
    how = " --print-command --container" if given["options"].server_version else ""
    following = "" if result.exit_code else f"saccade serve {_q(repository)}{how}"
    return Closing("checked", repository, following)


def evaluate(given: Mapping[str, Any], result: Any) -> Closing:
    from saccade.models.checkpoint_folder import checkpoint_file

    path = given["path"]
    following = (
        bench_command(path, given["options"].data, given["options"].task)
        if checkpoint_file(path).is_dir()
        else f"saccade export {_q(path)} --out {_q(Path('build') / _stem(path))}"
    )
    return Closing(counted(len(result.results), "result"), None, following)


def demo(given: Mapping[str, Any], result: Any) -> Closing:
    out = given["options"].out
    return Closing("demonstration", out, f"saccade serve {_q(out / 'repository')}")


def predict(given: Mapping[str, Any], result: Any) -> Closing | None:
    """Closing of an answer that is files; None if it was printed."""
    data = result.to_dict()
    if isinstance(data, dict):
        return Closing("", data["out"])
    masks = next((one["masks"] for one in data if "masks" in one), None)
    return Closing("", Path(masks).parent) if masks else None


def output(given: Mapping[str, Any], result: Any) -> Closing:
    """Closing of a command whose output lacks only the size and the time."""
    return Closing("", given["options"].out)


def bench_command(folder: Path | str, data: str | None = None, task: str | None = None) -> str:
    """Return the command that measures a folder, with its data if only the user has that."""
    known, own_task = _own_data(Path(folder)) if data is None else (f" --data {_q(data)}", None)
    task = task or own_task
    option = known + (f" --task {task}" if task else "")
    return f"saccade bench {_q(folder)}{option} --out {_q(_beside(folder, 'report'))}"


def _repository_command(folder: Path) -> str:
    return f"saccade repository {_q(folder)} --out {_q(_beside(folder, 'repository'))}"


def _own_data(folder: Path) -> tuple[str, str | None]:
    """Return the option for a model that was trained on data that only the user has, and its task.

    The task is that which can be scored on such data, if it is not the family's first one.

    A checkpoint that cannot be read does not matter here; `bench` explains it.
    """
    for path in folder.glob("*.safetensors"):
        with suppress(SaccadeError, OSError, ValueError):
            header = header_of(path)
            name = str(header.card.get("data"))
            if name == AUTHORS_DATA and header.preprocessing is not None:
                return " --data IMAGES", None
            if header.card.get("own_data"):
                return f" --data {_q(_place_of(name, folder))}", header.card.get("task")
            return "", None
    return "", None


def _place_of(name: str, folder: Path) -> Path:
    """Return where data of that name is: here, or in one folder here; a card has no paths."""
    here = Path(name)
    found = [here] if here.exists() else list(Path().glob(f"*/{glob.escape(name)}"))
    places = [place for place in found if place.resolve() != folder.resolve()]
    return places[0] if len(places) == 1 else Path("PATH", name)


def _beside(folder: Path | str, what: str) -> Path:
    path = Path(folder)
    return path.with_name(f"{path.name}-{what}") if path.name else path / what


def _stem(path: Path | str) -> str:
    return Path(str(path).rpartition(":")[2]).stem


def _q(path: Path | str) -> str:
    return shlex.quote(str(path))
