"""Communicators end in bounded time."""

import threading
from typing import Any

PAUSE_SECONDS = 5e-5
DESTROY_SECONDS = 10.0


def destroy(communicators: Any) -> None:
    """End communicators that are idle; NCCL may wait for peers there, so that is bounded."""
    listed = list(communicators)

    def end() -> None:
        for communicator in listed:
            communicator.destroy()

    if listed:
        thread = threading.Thread(target=end, name="irpar-nccl-destroy", daemon=True)
        thread.start()
        thread.join(DESTROY_SECONDS)
