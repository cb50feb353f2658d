"""A headless Chromium, driven over a pair of pipes by the DevTools protocol: no driver, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing of the browser's own may ask the network: what a test sees asked for is the page's.
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-proxy-server",
)

# The middle of an element that neither moved for two frames nor is covered; the panel's figures move what is below.
STANDS = """(async (selector) => {
  const element = document.querySelector(selector);
  if (!element) return null;
  element.scrollIntoView({block: "nearest"});
  const middle = () => (b => [b.x + b.width / 2, b.y + b.height / 2])(element.getBoundingClientRect());
  const [x, y] = middle();
  const frame = () => new Promise(requestAnimationFrame);
  await frame().then(frame);
  const still = middle().join() === [x, y].join();
  return still && element.contains(document.elementFromPoint(x, y)) ? [x, y] : null;
})(%s)"""


class Browser:
    """Commands go in on its descriptor 3, answers and events come out on 4, each with a zero byte at its end."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._held = b""
        self._number = 0
        self.events: deque[dict[str, Any]] = deque()

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; the events that come before it are kept."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") != self._number:
                self.events.append(message)
                continue
            if "error" in message:
                raise RuntimeError(f"{method}: {message['error']}")
            result: dict[str, Any] = message["result"]
            return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self._held += more
        line, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def page(self, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, width, height, dark)


class Page:
    """One tab. `requests` are the addresses that it has asked for, `complaints` what its console says is wrong."""

    def __init__(self, browser: Browser, session: str, width: int, height: int, dark: bool) -> None:
        self._browser, self._session = browser, session
        self.requests: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        result = self._browser.ask(method, self._session, **params)
        while self._browser.events:
            self._take(self._browser.events.popleft())
        return result

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") != self._session:
            return
        params = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(params["entry"]))

    def js(self, expression: str) -> Any:
        """What an expression of the page's JavaScript gives; a promise is awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def open(self, url: str) -> None:
        self.js("window.left = true")  # the document that is left may be complete too, and be asked first
        self.ask("Page.navigate", url=url)
        self.until("!window.left && document.readyState === 'complete'")

    def until(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is seen, once it stands still: what is covered cannot be clicked."""
        x, y = self.until(STANDS % json.dumps(selector))
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Into a field, in place of what it holds."""
        self.js(f"(f => (f.focus(), f.select()))(document.querySelector({json.dumps(selector)}))")
        self.ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path, *flags: str) -> Iterator[Browser]:
    """A browser with a profile in the folder; the test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("chromium is not installed")
    commands, answers = os.pipe(), os.pipe()
    own = ["--no-sandbox"] if os.geteuid() == 0 else []
    # bash puts the pipes where the browser looks for them.
    script = f'exec "$@" 3<&{commands[0]} 4>&{answers[1]}'
    words = ["bash", "-c", script, "bash", program, *FLAGS, *own, *flags, f"--user-data-dir={folder}", "about:blank"]
    environment = {**os.environ, "HOME": str(folder)}
    with subprocess.Popen(
        words, pass_fds=(commands[0], answers[1]), stderr=subprocess.DEVNULL, env=environment
    ) as started:
        os.close(commands[0])
        os.close(answers[1])
        try:
            running = Browser(commands[1], answers[0])
            yield running
            running.ask("Browser.close")
        finally:
            os.close(commands[1])
            os.close(answers[0])
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
