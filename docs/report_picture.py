"""The picture of a run's report that the README shows: `python docs/report_picture.py RUN`.

Needs Chromium or Chrome on this machine, and writes `docs/report.png`: the top of the page that `trellis report RUN`
writes, light, 1,280 points wide. The run is that of `make train`, which nobody has to make anew for another picture.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trellis.commands.line import main as trellis

OUT = Path(__file__).parent / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = "1280,1400"


def picture(page: Path, out: Path) -> None:
    """Writes what a browser without a window shows of a page.

    Raises:
        SystemExit: there is no browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"A picture of a page needs a browser: none of {', '.join(BROWSERS)} is on this machine.")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command = [browser, *options, f"--window-size={SIZE}", f"--screenshot={out}", page.resolve().as_uri()]
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)


def main() -> int:
    """Writes the report of a run anew, and the picture of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="RUN", type=Path)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    args = parser.parse_args()
    code = trellis(["report", str(args.folder)])
    if code == 0:
        picture(args.folder / "report.html", args.out)
        print(args.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
