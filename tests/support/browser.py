"""A headless Chromium, spoken to over pipes in its DevTools protocol: no driver, no port, no network."""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from typing import Any

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)


class Browser:
    """One page of one browser, until ``close``.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        theirs, self._to = os.pipe()
        self._from, back = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [BROWSER or "", *flags, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        here = f'exec "$@" 3<&{theirs} 4>&{back}'  # the two descriptors that the browser speaks over
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", here, "browser", *command],
                pass_fds=(theirs, back),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(folder)},
                start_new_session=True,
            )
        os.close(theirs)
        os.close(back)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScrollbarsHidden", hidden=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Have something done, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self, timeout_s: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._from, 1 << 16) if ready else b""
            assert data, "the browser says nothing" if not ready else "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: pathlib.Path) -> None:
        """Load a file, to the end."""
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str, media: str = "") -> None:
        """Light or dark; ``media`` may be ``print``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what ``selector`` finds."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        place = self.ask(f"{element}.getBoundingClientRect().toJSON()")
        at = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def picture(self) -> bytes:
        """All of the page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def complaints(self) -> list[str]:
        """What the console has shown since the page was opened."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """The addresses that it has asked for since the page was opened."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(30)
        finally:
            self._process.kill()
            os.close(self._to)
            os.close(self._from)
