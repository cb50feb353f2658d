"""A peer like `fake_peer`, at a quarter of its speed."""

from __future__ import annotations

from fake_peer import SPEED, FakeEngine

from serried.bench.peer import serve


class SlowEngine(FakeEngine):
    speed = SPEED / 4


if __name__ == "__main__":
    serve(SlowEngine)
