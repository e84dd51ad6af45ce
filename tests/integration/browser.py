"""Control headless Chromium over a pipe with the DevTools protocol; needs no driver, port or package."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

# TensorBoard consists of web components, whose elements are in separate trees below shadow roots.
_LIBRARY = """
window.__all = (root = document) => {
    const found = [];
    for (const element of root.querySelectorAll('*')) {
        found.push(element);
        if (element.shadowRoot) found.push(...window.__all(element.shadowRoot));
        if (element.tagName === 'IFRAME' && element.contentDocument)
            found.push(...window.__all(element.contentDocument));
    }
    return found;
};
window.__text = () => window.__all().filter(e => !['STYLE', 'SCRIPT', 'NOSCRIPT'].includes(e.tagName)).map(e =>
    [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).join(' ')
).filter(t => t).join('\\n');
"""


class Browser:
    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        binary = shutil.which("chromium")
        assert binary, "Debian's chromium is not installed"
        to_browser, write_end = os.pipe()
        read_end, from_browser = os.pipe()
        # Chromium expects the pipes at descriptors 3 and 4; a shell redirects them.
        arguments = [binary, "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-dev-shm-usage"]
        arguments += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--hide-scrollbars"]
        # The projector draws with WebGL.
        arguments += ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "about:blank"]
        redirect = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._log = (profile.with_suffix(".log")).open("w")
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "browser", *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=self._log,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._to, self._from = os.fdopen(write_end, "wb"), os.fdopen(read_end, "rb")
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        [page] = [t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self._send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._send("Page.enable")
        self._send("Page.addScriptToEvaluateOnNewDocument", source=_LIBRARY)
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            while b"\0" not in self._buffer:
                chunk = os.read(self._from.fileno(), 1 << 16)
                assert chunk, f"the browser has exited: {Path(self._log.name).read_text()[-2000:]}"
                self._buffer += chunk
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, address: str) -> None:
        self._send("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 120) -> Any:
        """Wait until an expression is truthy, and return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"window.__all ? ({script}) : null")):
            assert time.monotonic() < deadline, f"not on the page: {script}\n{self.text()[:3000]}"
            time.sleep(0.25)
        return value

    def text(self) -> str:
        return self.run("window.__text()")

    def wait_for_text(self, text: str) -> None:
        self.wait(f"window.__text().includes({json.dumps(text)})")

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches a selector and contains a text."""
        matches = f"e.matches({json.dumps(selector)}) && e.innerText.includes({json.dumps(text)})"
        found = f"window.__all().filter(e => {matches})[0]"
        self.wait(f"!!{found}")
        self.run(f"{found}.click()")

    def screenshot(self, path: Path) -> None:
        """Save the visible part of the page as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._send("Browser.close")
        self._process.wait(30)
        self._to.close()
        self._from.close()
        self._log.close()
