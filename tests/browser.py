"""A headless Chromium, driven through chromedriver with the standard library alone."""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--hide-scrollbars"
)
PROGRAMS = ("chromium", "chromedriver")


def installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


@dataclass(frozen=True)
class Browser:
    """A session of the WebDriver protocol."""

    address: str

    def open(self, address: str) -> None:
        _ask(f"{self.address}/url", {"url": address})

    def evaluate(self, script: str) -> Any:
        """What a function body in JavaScript returns."""
        return _ask(f"{self.address}/execute/sync", {"script": script, "args": []})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(_ask(f"{self.address}/screenshot")))


@contextmanager
def browser(*, width: int, height: int) -> Iterator[Browser]:
    """Chromium with a screen of so many CSS pixels."""
    port = _free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL
    )
    try:
        _wait_for(driver, port)
        with tempfile.TemporaryDirectory() as profile:
            session = _ask(
                f"http://127.0.0.1:{port}/session",
                {"capabilities": {"alwaysMatch": _options(profile, width, height)}},
            )
            address = f"http://127.0.0.1:{port}/session/{session['sessionId']}"
            try:
                yield Browser(address)
            finally:
                _ask(address, method="DELETE")
    finally:
        driver.terminate()
        driver.wait(10)


def _options(profile: str, width: int, height: int) -> dict[str, Any]:
    metrics = {"width": width, "height": height, "pixelRatio": 1, "touch": False}
    return {
        "goog:chromeOptions": {
            "args": [*_FLAGS.split(), f"--user-data-dir={profile}"],
            "binary": shutil.which("chromium"),
            "mobileEmulation": {"deviceMetrics": metrics},
        }
    }


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def _wait_for(driver: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(100):
        if driver.poll() is not None:
            break
        try:
            if _ask(f"http://127.0.0.1:{port}/status")["ready"]:
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("chromedriver did not start")


def _ask(address: str, body: Any = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, method=method)
    # No proxy: the driver is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)["value"]
