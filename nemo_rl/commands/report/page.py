"""Put the page together: one HTML file that needs no other file.

Invariant: the data is JSON without any `<`, and the content security policy allows only the page's own scripts.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPTS = ("uPlot.iife.min.js", "elements.js", "charts.js", "samples.js", "rollouts.js", "page.js")
_STYLES = ("uPlot.min.css", "page.css")


def make_page(data: Mapping[str, Any]) -> str:
    """Return the HTML of a page.

    Args:
        data: `runs`, each as `RunView.as_json` returns it, perhaps with `samples`; `live`, whether a server answers
            requests of the page; `version` and `written`.
    """
    scripts = "\n".join(map(_asset, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {"'self'" if data.get('live') else "'none'"}; base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLES": "\n".join(map(_asset, _STYLES)), "DATA": as_json(data), "SCRIPTS": scripts}
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _asset("page.html"))


def as_json(data: Any) -> str:
    """Format data as JSON that may be inserted into HTML."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return files("nemo_rl.commands.report").joinpath("assets", name).read_text(encoding="utf-8")
