"""Accessibility of pages by axe-core in headless Chromium: contrast, names, texts, keyboard.

    npm install --prefix outputs/node axe-core
    python -m tests.accessibility outputs/site --axe outputs/node/node_modules/axe-core/axe.min.js

Opens each page of files and folders at 1,400 and 390 pixels, in light and in dark colours, and
prints a line for each violation of axe-core's rules, and for each page that is wider than its
window. A page of a site needs the site's folder. `--pages FOLDER` first writes the pages of
commands there, by small runs, and opens them too. `--pictures FOLDER` writes a picture of each
page. The exit status is 1 for a violation, 2 if axe-core or Chromium is missing.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import IO, Any
from urllib.parse import quote, urlsplit

WIDTHS = (1400, 390)
"""Widths of windows in CSS pixels: a screen and a telephone."""
SCHEMES = ("light", "dark")
HEIGHT = 900
LEFT_OUT = ("*search_index*", "*workers/search*")
"""Addresses that aren't loaded: a site's search reads the text of all its pages on each page."""
SMALL = ("+recipe=breast_cancer_mlp", "train.epochs=2", "monitor.tensorboard=false")
TRAINED = ("+recipe=lenet5_digits", "train.epochs=1", "monitor.tensorboard=false")
PAGES: Mapping[str, tuple[str, ...]] = {
    "first/recipe.yaml": (*TRAINED, "hydra.run.dir=first"),
    "second/recipe.yaml": (*TRAINED, "train.optimizer.lr=0.02", "hydra.run.dir=second"),
    "report/index.html": ("report", "first", "--out", "report"),
    "compared.html": ("compare", "first", "second", "--out", "compared.html"),
    "sweep/amortisation.html": (
        "-m", "+recipe=lenet5_digits", "device=ascend910", "stages=[data,build,compile]",
        "train.sink_size=10,100", "hydra.sweep.dir=sweep",
    ),
    "runs.html": ("runs", ".", "--html"),
    "rate.html": ("find-rate", *SMALL[:1], "--out", "rate.html"),
    "better.html": (
        "better", *SMALL, "--pairs", "6", "--out", "better.html", "--", "train.optimizer.lr=0.01",
    ),
    "arena/arena.html": (
        "arena", *SMALL, "--optimizers", "momentum,adamw", "--trials", "2", "--seeds", "6",
        "--out", "arena",
    ),
    "priced/timeline.html": (
        *TRAINED, "device=ascend910", "stages=[data,build,compile]", "hydra.run.dir=priced",
    ),
}  # fmt: skip
"""Commands that write pages, and runs that they read, by a file that they write."""
CHECK = """
axe.run(document, {resultTypes: ["violations"]}).then(found => JSON.stringify({
  violations: found.violations.map(each => [each.id, each.help, each.nodes[0].target.join(" ")]),
  width: document.documentElement.scrollWidth,
}))
"""


class Browser:
    """A headless Chromium, driven by the messages of its DevTools on two pipes."""

    def __init__(self, to_browser: IO[bytes], from_browser: IO[bytes]) -> None:
        self._out, self._in = to_browser, from_browser
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")
        # Pages of commands forbid scripts but their own.
        self.call("Page.setBypassCSP", enabled=True)
        self.call("Network.enable")
        self.call("Network.setBlockedURLs", urls=LEFT_OUT)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools; return its result. Raises RuntimeError."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        answer = self._read("id", self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def open(self, address: str, width: int, scheme: str) -> None:
        """Open a page in a window of a width, and wait until it is loaded."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[scheme_feature])
        self.navigate(address)

    def navigate(self, address: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.call("Page.navigate", url=address)
        self._read("method", "Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """Return the value of a script, of a promise if it is one."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    def _read(self, key: str, value: Any) -> dict[str, Any]:
        """Return the next message with a value at a key."""
        while True:
            text = bytearray()
            while (letter := self._in.read(1)) != b"\0":
                if not letter:
                    raise RuntimeError("Chromium has ended")
                text += letter
            message: dict[str, Any] = json.loads(text)
            if message.get(key) == value:
                return message


@contextmanager
def open_browser(program: str) -> Iterator[Browser]:
    """Start Chromium with a profile of its own, and end it."""
    commands, to_browser = os.pipe()
    from_browser, results = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        # Chromium reads descriptor 3 and writes 4.
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{results}', "bash", program, *flags,
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, results), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(results)
        with os.fdopen(to_browser, "wb") as out, os.fdopen(from_browser, "rb") as read:
            try:
                yield Browser(out, read)
            finally:
                process.terminate()
                process.wait()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine alone, since some pages have paths from the root; yield the
    address."""
    handler = partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def list_pages(path: Path) -> tuple[Path, list[Path]]:
    """Return a folder and its HTML files, at a path of one or of the other.

    Raises FileNotFoundError.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    pages = [path] if path.is_file() else sorted(path.rglob("*.html"))
    if not pages:
        raise FileNotFoundError(f"{path}: has no HTML files")
    return (path.parent if path.is_file() else path), pages


def check_page(browser: Browser, address: str, axe: str, pictures: Path | None) -> Iterator[str]:
    """Yield the violations of a page at each width, in light and dark colours."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            browser.open(address, width, scheme)
            browser.evaluate(axe)
            found = json.loads(browser.evaluate(CHECK))
            texts = [f"{rule}: {meaning}: {node}" for rule, meaning, node in found["violations"]]
            if found["width"] > width:
                texts.append(f"wider than its window: {found['width']} pixels")
            yield from (f"at {width}, {scheme}: {text}" for text in texts)
            if pictures is not None:
                path = urlsplit(address).path.strip("/").replace("/", "-")
                picture = browser.call("Page.captureScreenshot")["data"]
                file = pictures / f"{path.removesuffix('.html')}-{width}-{scheme}.png"
                file.write_bytes(base64.b64decode(picture))
            # A page may have kept its colours for the next visit.
            browser.navigate("about:blank")
            origin = "{0.scheme}://{0.netloc}".format(urlsplit(address))
            browser.call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")


def write_pages(folder: Path) -> None:
    """Write the pages of commands. Raises RuntimeError for a command that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, command in PAGES.items():
        print(f"python -m pipeline {shlex.join(command)}", flush=True)
        words = [sys.executable, "-m", "pipeline", *command]
        ended = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        if not (folder / file).exists():
            raise RuntimeError(f"{file} wasn't written: {ended.stderr[-1000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE|FOLDER")
    parser.add_argument("--axe", type=Path, required=True, metavar="axe.min.js")
    parser.add_argument("--chromium", default="chromium", metavar="PROGRAM")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="write pages of commands")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    given = parser.parse_args(arguments)
    program = shutil.which(given.chromium)
    if program is None:
        print(f"{given.chromium}: no such program; --chromium names Chromium", file=sys.stderr)
        return 2
    if not given.axe.is_file():
        print(f"{given.axe}: no such file; `npm install axe-core` brings it", file=sys.stderr)
        return 2
    if given.pages is not None:
        write_pages(given.pages)
    paths = [*given.paths, *([given.pages] if given.pages else [])]
    try:
        listed = [list_pages(path) for path in paths]
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if not listed:
        print("no pages: name files or folders with HTML", file=sys.stderr)
        return 2
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
    axe = given.axe.read_text("utf-8")
    count = 0
    with open_browser(program) as browser:
        for folder, pages in listed:
            with serve(folder) as root:
                for page in pages:
                    address = f"{root}/{quote(page.relative_to(folder).as_posix())}"
                    for text in check_page(browser, address, axe, given.pictures):
                        print(f"{page} {text}", flush=True)
                        count += 1
    print(f"{sum(len(pages) for _, pages in listed)} pages: {count} violations")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
