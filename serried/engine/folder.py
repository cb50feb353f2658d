"""Where the engine's sockets are: a folder of this user alone."""

from __future__ import annotations

import tempfile

import zmq

from serried.errors import InputError


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for sockets, with mode 0700: in the user's place for such things if its path is short enough."""
    room = zmq.IPC_PATH_MAX_LEN - len("/serried-12345678/12345678/requests")
    if len(tempfile.gettempdir()) <= room:
        return tempfile.TemporaryDirectory(prefix="serried-")
    try:
        return tempfile.TemporaryDirectory(prefix="serried-", dir="/tmp")
    except OSError as error:
        raise InputError(
            f"TMPDIR={tempfile.gettempdir()}: too long a path for sockets, of which the system takes "
            f"{zmq.IPC_PATH_MAX_LEN} bytes, and /tmp does not do instead ({error.strerror}); give a shorter one"
        ) from None
