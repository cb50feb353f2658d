"""A rank of the tests: joins the world, then runs the checks that rank 0 names, one after the other."""

from __future__ import annotations

import time
import traceback

import msgspec
from shm_ranks import run_check

from serried.parallel.link import ChildLink
from serried.parallel.shm import ShmComm


def main() -> None:
    with ChildLink.from_argv() as link:
        plan = msgspec.msgpack.decode(link.payload)
        if link.rank == plan.get("absent"):
            if plan.get("how") == "sleep":
                time.sleep(1000)
            raise MemoryError("no room for the weights")
        comm = ShmComm(link.store_fd, link.rank, link.size, plan["timeout"], slot_bytes=plan["slot_bytes"])
        link.ready()
        while True:
            check, arguments = msgspec.msgpack.decode(link.recv())
            try:
                run_check(check, comm, arguments)
                link.send(b"")
            except Exception:
                link.send(traceback.format_exc().encode())


if __name__ == "__main__":
    main()
