"""A headless Chromium for tests, driven over its DevTools pipe with the standard library alone.

with Browser(width=1280, height=900) as page: page.open(url); page.wait_for("document.title"); page.screenshot(path)
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
FLAGS += " --disable-component-update --disable-dev-shm-usage --remote-debugging-pipe"
WAIT_S = 30.0  # how long something may take that must happen; a busy machine starts Chromium slowly


class Browser:
    """One page. Messages are JSON and end with a zero byte; Chromium reads them from fd 3 and writes to fd 4."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False):
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        reading, self._out = os.pipe()
        self._in, writing = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (reading, writing)]  # out of the way of 3 and 4
        command = 'exec "$@" 3<&{} 4>&{}'.format(*theirs)
        arguments = [
            CHROMIUM,
            *FLAGS.split(),
            f"--user-data-dir={self._folder.name}",
            f"--window-size={width},{height}",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (reading, writing, *theirs):
            os.close(fd)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.console: list[str] = []  # errors and exceptions of the page: a blocked script is one
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            self.call("Emulation.setDeviceMetricsOverride", **metrics)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            self.call("Emulation.setEmulatedMedia", features=[scheme])
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self._session = None
            self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def call(self, method: str, **params) -> dict:
        """One command of the DevTools protocol and its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            reply = self._receive(deadline)
            if reply.get("id") == self._last_id:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']['message']}")
                return reply["result"]
            self._note(reply)

    def _receive(self, deadline: float) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("Chromium ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str):
        """The JSON value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description"))
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = WAIT_S):
        """The expression's value, once it is true (True for an element)."""
        deadline = time.monotonic() + timeout_s
        as_json = f"(found => found instanceof Node || found)({expression})"
        while not (value := self.evaluate(as_json)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.text()}\n{self.console}"
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        """What a reader sees of the first element that matches."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def type(self, selector: str, text: str, enter: bool = True) -> None:
        """Types into a field as a keyboard would."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        if enter:
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self.call("Input.dispatchKeyEvent", type="keyDown", **key)
            self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path | str) -> None:
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
