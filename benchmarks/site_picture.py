"""Takes pictures of the site: builds it, opens it in Chromium.

    make pictures

One, of a page of the gallery, is for the home page. The others, in build/screens, are to look at
after a change: what is drawn, in both widths and both schemes, is cut off or unreadable nowhere.

Needs Chromium: the package `chromium` of Debian and Ubuntu, `google-chrome` elsewhere.
"""

import functools
import http.server
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "gallery/"
PICTURE = ROOT / "docs" / "assets" / "gallery-page.png"
SCREENS = ROOT / "build" / "screens"
SEEN = {"home": "", "gallery": "gallery/", "how-it-works": "how-it-works/"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 1100  # pixels
WIDTHS = {1300: 4000, 400: 8000}  # of a desk and of a telephone, and how much of the page is seen
SCHEMES = {"dark": 0, "light": 1}  # as Blink counts them


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
            address = f"http://127.0.0.1:{server.server_port}/"
            take(browser, address + PAGE, PICTURE, WIDTH, HEIGHT)
            SCREENS.mkdir(parents=True, exist_ok=True)
            for (name, page), (width, height), scheme in itertools.product(
                SEEN.items(), WIDTHS.items(), SCHEMES
            ):
                picture = SCREENS / f"{name}-{width}-{scheme}.png"
                take(browser, address + page, picture, width, height, scheme)
            server.shutdown()


def take(
    browser: str, address: str, picture: Path, width: int, height: int, scheme: str = "light"
) -> None:
    """Writes the picture of a page."""
    options = [
        *("--headless", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"),
        *(f"--window-size={width},{height}", f"--screenshot={picture}"),
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
    ]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's own sandbox refuses to run as root
    subprocess.run([browser, *options, address], check=True, timeout=120)


if __name__ == "__main__":
    main()
