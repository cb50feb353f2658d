"""A user's script, without a main guard: starts ranks, says who they are, and then does what it is told."""

import sys
import threading

from ranks import World, start

how = sys.argv[1]
if how == "collective":
    world = World(3)
    world.begin("endless", victim=-1, how="")
    print(*world.processes.pids, flush=True)
    world.finish("endless", victim=-1, how="")
ranks = start("link_worker", 3, do="deaf" if how == "stuck" else "echo")
if how != "early":
    ranks.wait_ready()
print(*ranks.pids, flush=True)
if how != "forget":
    threading.Event().wait()
