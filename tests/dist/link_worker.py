"""A rank without PyTorch, which does what its payload says."""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from serried.parallel.link import ChildLink


def main() -> None:
    with ChildLink.from_argv() as link:
        plan = msgspec.msgpack.decode(link.payload)
        mine = plan["do"] if link.rank == plan.get("rank", link.rank) else "echo"
        if mine == "raise":
            raise ArithmeticError("no such tensor")
        if mine == "exit":
            sys.exit(7)
        if mine == "stuck":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGINT)  # must be ignored
        if mine == "talk":
            print("one line\ntwo", flush=True)
            sys.stderr.write("and no end")
        link.ready()
        if mine == "deaf":
            time.sleep(1000)
        facts = [link.rank, link.size, os.environ["OMP_NUM_THREADS"], os.getsid(0) == os.getpid()]
        link.send(msgspec.msgpack.encode(facts))
        while True:
            link.send(link.recv())


if __name__ == "__main__":
    main()
