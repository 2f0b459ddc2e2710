# SPDX-License-Identifier: Apache-2.0
"""Pages in a headless Chromium: their document after the scripts have run, and pictures of them."""

import os
import subprocess
import tempfile

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def run(page, *options, width=1400, height=900):
    """The output of the browser, which is given the page of this path."""
    with tempfile.TemporaryDirectory() as profile:
        for browser in BROWSERS:
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                       f"--user-data-dir={profile}", f"--window-size={width},{height}",
                       "--virtual-time-budget=5000", *options, "file://" + os.path.abspath(page)]
            try:
                return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                      text=True, check=True, timeout=120).stdout
            except FileNotFoundError:
                continue
    raise SystemExit("no browser: expected one of " + ", ".join(BROWSERS) +
                     ". Install Debian's package chromium.")


def document(page, **size):
    """The page's elements as text, after its scripts have run."""
    return run(page, "--dump-dom", **size)


def screenshot(page, picture, **size):
    """Writes a picture of the window, as PNG."""
    run(page, "--screenshot=" + os.path.abspath(picture), **size)
