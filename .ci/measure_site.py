"""Measure in a browser which lines of code, tables and pages of the docs site are wider than their place.

    python .ci/measure_site.py runs/site 1280 390       # after make docs; needs chromium

Input: the built site, and widths of a window in pixels. Output: for each width, the pages with cut lines of code, the
widths of tables that scroll, and pages that scroll sideways. On a phone, code and tables may scroll; a page may not.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

_SCRIPT = """<!doctype html><body><script>
const found = {};
function measure(page) {
  return new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.style = "width: WIDTHpx; height: 800px; border: 0";
    frame.src = "/" + page;
    frame.onload = () => {
      const pen = document.createElement("canvas").getContext("2d");
      const document_ = frame.contentDocument;
      const cut = [], tables = [];
      let lines = 0;
      for (const code of document_.querySelectorAll("article pre > code")) {
        const style = frame.contentWindow.getComputedStyle(code);
        const width = code.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
        pen.font = style.fontSize + " " + style.fontFamily;
        for (const line of code.textContent.split("\\n").filter((text) => text.trim())) {
          lines += 1;
          if (pen.measureText(line).width > width + 1) cut.push(line);
        }
      }
      for (const table of document_.querySelectorAll("article .md-typeset__scrollwrap"))
        if (table.scrollWidth > table.clientWidth + 1) tables.push([table.scrollWidth, table.clientWidth]);
      found[page] = {lines, cut, tables, is_wide: document_.documentElement.scrollWidth > WIDTH + 1};
      frame.remove();
      done();
    };
    document.body.append(frame);
  });
}
(async () => {
  for (const page of PAGES) await measure(page);
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found))));
  document.body.replaceChildren(result);
})();
</script></body>"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


def measure(site: Path, width: int, browser: str) -> dict[str, dict]:
    """Return the measures of each page at a width of the window."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    script = site / "_measure.html"
    script.write_text(_SCRIPT.replace("WIDTH", str(width)).replace("PAGES", json.dumps(pages)))
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{script.name}"
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=300000"]
        command += [f"--window-size={max(width, 500)},800", "--dump-dom", address]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        server.shutdown()
    script.unlink()
    encoded = re.search(r'<pre id="result">([^<]*)</pre>', output)
    if encoded is None:
        raise SystemExit(f"cannot measure {site}: the browser did not finish. Run it with fewer pages, or again.")
    return json.loads(base64.b64decode(encoded[1]))


def main() -> None:
    """Measure the site at each width, and print what is too wide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("widths", type=int, nargs="+", help="widths of the window, in pixels")
    args = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("cannot measure: there is no chromium. Install it, for example with apt-get install chromium.")
    for width in args.widths:
        found = measure(args.site, width, browser)
        for page, measures in found.items():
            if measures["cut"] or measures["tables"] or measures["is_wide"]:
                wide = ", the page scrolls sideways" if measures["is_wide"] else ""
                print(f"{width} {page}: {len(measures['cut'])} cut lines, tables {measures['tables']}{wide}")
        lines, cut = (sum(map(count, found.values())) for count in (lambda m: m["lines"], lambda m: len(m["cut"])))
        print(f"{width}: {cut} of {lines} lines of code are cut")


if __name__ == "__main__":
    main()
