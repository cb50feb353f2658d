"""A rank of the tests: joins the world, then runs the checks that rank 0 names, one after the other."""

from __future__ import annotations

import traceback

import msgspec

from serried.parallel.link import ChildLink


def main() -> None:
    with ChildLink.from_argv() as link:
        plan = msgspec.msgpack.decode(link.payload)
        if link.rank == plan["absent"]:
            raise MemoryError("no room for PyTorch")
        import comm_checks

        from serried.parallel.torch_comm import TorchComm, anonymous_store

        store = anonymous_store(link.store_fd, link.size)
        comm = TorchComm(store, link.rank, link.size, timeout=plan["timeout"], loopback=True)
        link.ready()
        while True:
            check, arguments = msgspec.msgpack.decode(link.recv())
            try:
                getattr(comm_checks, check)(comm, **arguments)
                link.send(b"")
            except AssertionError:
                link.send(traceback.format_exc().encode())


if __name__ == "__main__":
    main()
