"""Just enough of the Chrome DevTools protocol to load a file, read what went wrong, and take a picture.

Standard library only: a websocket client over a socket (RFC 6455, text frames).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path


def find() -> str | None:
    """Path of a Chromium or Chrome, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if shutil.which(name):
            return shutil.which(name)
    return None


class Browser:
    """A headless browser with one page; use as a context manager."""

    def __init__(self, width: int, height: int, dark: bool = False) -> None:
        self.profile = tempfile.mkdtemp(prefix="browser-")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += [f"--user-data-dir={self.profile}", "--remote-debugging-port=0", "about:blank"]
        self.process = subprocess.Popen(
            [find(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port_file = Path(self.profile) / "DevToolsActivePort"
        deadline = time.monotonic() + 30
        while not port_file.is_file() or not port_file.read_text().strip():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("the browser did not start")
            time.sleep(0.05)
        port = int(port_file.read_text().split()[0])
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        pages = json.load(opener.open(f"http://127.0.0.1:{port}/json/list"))
        url = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        key = base64.b64encode(os.urandom(16)).decode()
        path = url.split(str(port), 1)[1]
        request = (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        )
        self.socket.sendall(
            f"{request}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.socket.recv(4096)
        self.buffer = self.buffer.split(b"\r\n\r\n", 1)[1]
        self.count, self.events = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.call("Emulation.setEmulatedMedia", features=features)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def _read(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self.buffer += self.socket.recv(1 << 16)
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def _message(self) -> dict:
        text = b""
        while True:
            first, second = self._read(2)
            size = second & 127
            if size == 126:
                size = struct.unpack(">H", self._read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self._read(8))[0]
            text += self._read(size)
            if first & 128:
                return json.loads(text)

    def call(self, method: str, **params) -> dict:
        """Send a command and wait for its answer; events that arrive meanwhile are kept."""
        self.count += 1
        data = json.dumps({"id": self.count, "method": method, "params": params}).encode()
        mask = os.urandom(4)
        size = struct.pack(">BH", 254, len(data)) if 126 <= len(data) < 65536 else bytes([128 | len(data)])
        body = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(b"\x81" + size + mask + body)
        while True:
            message = self._message()
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(message["error"]["message"])
                return message["result"]
            self.events.append(message)

    def open(self, path: Path) -> None:
        """Load a local file and wait until it has loaded."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def value(self, expression: str):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def picture(self, path: Path, selector: str | None = None) -> None:
        """PNG of the viewport, scrolled to ``selector``."""
        if selector:
            self.value(f"document.querySelector({selector!r}).scrollIntoView(); 0")
            time.sleep(0.3)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Console errors, exceptions, log entries and requests that are not for the file or data URIs."""
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(f"request for {url}")
        return found
