"""A headless Chromium, driven over its DevTools protocol: what a user's browser makes of a page."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One page of the browser."""

    def __init__(self, socket: Any):
        self._socket = socket
        self._number = 0

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, address: str) -> None:
        self.command("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        reply = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> None:
        """Wait until what a script comes to is true."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({script})"):
            assert time.monotonic() < end, f"never became true: {script}"
            time.sleep(0.1)

    def picture(self, path: Path, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
        shot = self.command("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path, width: int = 1280) -> Iterator[Browser]:
    """Start a browser whose profile lies in `folder`; skips the test where there is none."""
    if PROGRAM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    command = [PROGRAM, *flags, f"--user-data-dir={folder}", f"--window-size={width},900", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = folder / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (port.exists() and port.read_text().strip()):
            assert time.monotonic() < end and process.poll() is None, "the browser did not start"
            time.sleep(0.1)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
        pages = json.loads(urllib.request.urlopen(address, timeout=30).read())
        page = next(each for each in pages if each["type"] == "page")
        with connect(page["webSocketDebuggerUrl"], max_size=2**27, proxy=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(timeout=30)
