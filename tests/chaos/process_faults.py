# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed or stopped, or that get no more memory."""

import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from chaos.processes import Process
from chaos.scene import Scene, picture, picture_request


def kill_variant(scene: Scene) -> None:
    """Kill a variant as the kernel does when memory is short."""
    scene.service.watch.stub(scene.models.cheap).kill(signal.SIGKILL)


def stop_variant(scene: Scene) -> None:
    """Stop a variant, so that it lives but does nothing."""
    _stop(scene, scene.service.watch.stub(scene.models.cheap))


def kill_router(scene: Scene) -> None:
    """Kill the process that all requests go through."""
    scene.service.watch.stub(scene.models.router).kill(signal.SIGKILL)


def stop_router(scene: Scene) -> None:
    """Stop the router, so that it lives but does nothing."""
    _stop(scene, scene.service.watch.stub(scene.models.router))


def kill_server(scene: Scene) -> None:
    """Kill the server itself."""
    scene.service.watch.server().kill(signal.SIGKILL)


def stop_server(scene: Scene) -> None:
    """Stop the server, so that it accepts connections but does not answer."""
    _stop(scene, scene.service.watch.server())


def kill_proxy(scene: Scene) -> None:
    """Kill the proxy in front of the server."""
    (proxy,) = [each for each in scene.service.watch.living() if each.program == "envoy"]
    proxy.kill(signal.SIGKILL)


def kill_serve(scene: Scene) -> None:
    """Kill `saccade serve`: nothing may be left, although it cannot clean up."""
    scene.service.process.kill()
    scene.service.process.wait()
    left = scene.service.leftovers_after(2.0 * max(1.0, scene.service.start_s / 5))
    scene.checks.append((f"gone within 2 s: {', '.join(left) or 'all'}", not left))


def terminate_serve(scene: Scene) -> None:
    """Stop `saccade serve` as a service manager does."""
    code = scene.service.stop()
    scene.checks.append((f"exit code {code}, wanted 0", code == 0))


def terminate_during_a_call(scene: Scene) -> None:
    """Stop `saccade serve` while a caller waits for its answer."""
    photograph = picture(4000, 3000, seed=scene.rng.randrange(2**31), kind="JPEG")
    message = picture_request(scene.models, scene.models.full, [photograph] * 16)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(scene.send, [message.SerializeToString()], timeout_s=120)
        time.sleep(0.3)
        scene.checks.append(("the call was still running", not sent.done()))
        terminate_serve(scene)


def memory_limit(scene: Scene) -> None:
    """Make all allocations of the router's process fail while large images arrive."""
    router = scene.service.watch.stub(scene.models.router)
    free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(router.pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
    photograph = picture(4000, 3000, seed=scene.rng.randrange(2**31), kind="JPEG")
    message = picture_request(scene.models, scene.models.cheap, [photograph] * 4)
    try:
        scene.send([message.SerializeToString()] * 3, timeout_s=10)
        time.sleep(1)
    finally:
        if router.lives():
            resource.prlimit(router.pid, resource.RLIMIT_AS, free)


def _stop(scene: Scene, process: Process) -> None:
    process.kill(signal.SIGSTOP)
    # Whatever the service did, nothing stays stopped after the row.
    scene.until_over.append(lambda: process.kill(signal.SIGCONT))
