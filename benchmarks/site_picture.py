"""Takes the picture of a gallery page for the home page: builds the site, opens it in Chromium.

    make pictures

Needs Chromium: the package `chromium` of Debian and Ubuntu, `google-chrome` elsewhere.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "gallery/digits_gan/"
PICTURE = ROOT / "docs" / "assets" / "gallery-page.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 1100  # pixels


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each file."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main() -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"Expected one of {', '.join(BROWSERS)} on the PATH. Install Chromium.")
    with tempfile.TemporaryDirectory() as folder:
        mkdocs = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder)
        subprocess.run(mkdocs, check=True, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1", **os.environ})
        handler = functools.partial(Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            take(browser, f"http://127.0.0.1:{server.server_port}/{PAGE}")
            server.shutdown()


def take(browser: str, address: str) -> None:
    """Writes the picture of a page."""
    options = [
        *("--headless", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"),
        *(f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={PICTURE}"),
    ]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's own sandbox refuses to run as root
    subprocess.run([browser, *options, address], check=True, timeout=120)


if __name__ == "__main__":
    main()
