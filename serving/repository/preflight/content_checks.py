# SPDX-License-Identifier: Apache-2.0
"""The folders hold the files that `saccade repository` writes, and no other.

A server reads more than its configuration names: a library `libtriton_*.so`, a `model.py`, a stub
of the Python backend, a second version or `configs/` beside a model are found by their names.
"""

from collections.abc import Iterator

from saccade.export.artefact.frontier import FILE_NAME as FRONTIER
from saccade.export.artefact.manifest import SUFFIX
from saccade.serving.repository.description import DESCRIPTION
from saccade.serving.repository.files import entries
from saccade.serving.repository.model_config import LABELS_FILE
from saccade.serving.repository.preflight.opened import Opened, OpenedModel
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.router_folder import router_code
from saccade.serving.repository.stored_sample import FILE, FOLDER

_EVERY = {"config.pbtxt", LABELS_FILE}


def check_top(repository: Opened, target: Target) -> Iterator[str]:
    """Beside the models lie the description and the measurements alone."""
    for path in sorted(repository.folder.iterdir()):
        if not path.is_dir() and path.name not in (DESCRIPTION, FRONTIER):
            yield f"{path.name} is not a file that saccade writes there. Remove it."


def check_model_content(model: OpenedModel, target: Target) -> Iterator[str]:
    """A variant's folder holds what is written for its runtime."""
    own = _EVERY | {model.name + SUFFIX, f"{FOLDER}/{FILE}"}
    own |= {f"{FOLDER}/{spec.name}" for spec in model.manifest.inputs}
    for each in entries(model.folder):
        if each.name not in own and not model.served.owns(model, each.name):
            yield _foreign(each.name)


def check_router_content(repository: Opened, target: Target) -> Iterator[str]:
    """The router's folder holds its code, its routes and the vectors that they name."""
    said = repository.routes
    own = _EVERY | {"1/routes.json"} | {f"1/{name}" for name in router_code(str(said["family"]))}
    own |= {f"1/{each['classes']}" for each in said["variants"] if each["classes"] is not None}
    for each in entries(repository.router.folder):
        if each.name in own:
            continue
        if each.name.endswith(".py"):
            # Another release's router has files of other names, and needs them.
            yield (
                f"{each.name} is not a file of this release's router, and the server may run it. "
                "Run `saccade repository` again."
            )
        else:
            yield _foreign(each.name)


def _foreign(name: str) -> str:
    return f"{name} is not a file that saccade writes there; a server may run it. Remove it."
