"""The page that `report.html` is filled into, and how a figure and a number are written on it.

Braces in `PAGE` are doubled where they are literal: the text goes through `str.format`.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from topology.charts import Series

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Tandem</title>
<style>
:root {{
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f27; --soft: #667080; --rule: #e3e6ec; --bad: #b3261e;
  --c0: #2f6fde; --c1: #0f9d76; --c2: #e08a1e; --c3: #d1495b; --c4: #7b5cd6; --c5: #5b6b7f;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #12151b; --card: #1a1f28; --text: #e6e9ef; --soft: #97a1b1; --rule: #2b323e; --bad: #ff8a80;
    --c0: #6ea0ff; --c1: #3fcf9f; --c2: #f2b155; --c3: #ff8093; --c4: #ab92ff; --c5: #9aa8bb;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }}
h1 {{ font-size: 26px; margin: 0; letter-spacing: -0.01em; }}
h1 span {{ font-size: 13px; font-weight: 600; vertical-align: middle; margin-left: 8px; padding: 3px 10px;
  border-radius: 99px; border: 1px solid var(--rule); color: var(--soft); letter-spacing: 0; }}
small {{ color: var(--soft); font-size: 12.5px; }}
.cause {{ color: var(--bad); }}
.cards {{ display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(176px, 1fr)); margin: 22px 0 14px; }}
.card, figure, details {{ background: var(--card); border: 1px solid var(--rule); border-radius: 12px; }}
.card {{ padding: 12px 14px; display: flex; flex-direction: column; }}
.card b {{ font-size: 18px; white-space: nowrap; font-variant-numeric: tabular-nums; letter-spacing: -0.01em; }}
.bound {{ margin: 0 0 22px; }}
.charts {{ display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 470px), 1fr)); }}
figure {{ margin: 0; padding: 14px 16px 8px; }}
figcaption {{ margin-bottom: 4px; }}
figcaption div {{ min-height: 20px; }}
.key {{ font-size: 12.5px; color: var(--soft); margin-right: 14px; }}
.key i {{ display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }}
svg {{ width: 100%; height: auto; display: block; }}
svg text {{ fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }}
.grid {{ stroke: var(--rule); stroke-width: 1; }}
.line {{ fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }}
.faint {{ opacity: 0.35; stroke-width: 1.4; }}
.s0 {{ stroke: var(--c0); }} .s1 {{ stroke: var(--c1); }} .s2 {{ stroke: var(--c2); }}
.s3 {{ stroke: var(--c3); }} .s4 {{ stroke: var(--c4); }} .s5 {{ stroke: var(--c5); }}
.f0 {{ fill: var(--c0); }} .f1 {{ fill: var(--c1); }} .f2 {{ fill: var(--c2); }}
.f3 {{ fill: var(--c3); }} .f4 {{ fill: var(--c4); }} .f5 {{ fill: var(--c5); }}
.b0 {{ background: var(--c0); }} .b1 {{ background: var(--c1); }} .b2 {{ background: var(--c2); }}
.b3 {{ background: var(--c3); }} .b4 {{ background: var(--c4); }} .b5 {{ background: var(--c5); }}
details {{ margin-top: 14px; padding: 12px 16px; }}
summary {{ cursor: pointer; font-weight: 600; }}
pre {{ overflow-x: auto; font-size: 12.5px; line-height: 1.45; }}
table {{ border-collapse: collapse; font-size: 13px; margin-top: 8px; width: 100%; }}
td {{ padding: 3px 14px 3px 0; vertical-align: top; border-top: 1px solid var(--rule); overflow-wrap: anywhere; }}
td:first-child, td:nth-child(2) {{ white-space: nowrap; color: var(--soft); }}
</style>
</head>
<body><main>
<h1>{title}<span>{state}</span></h1>
{cause}
<div class="cards">{cards}</div>
{bound}
<div class="charts">{charts}</div>
<details><summary>Events</summary><table>{events}</table></details>
<details><summary>Configuration</summary><pre>{config}</pre></details>
</main></body>
</html>
"""


def figure(title: str, note: str, svg: str, legend: Iterable[Series] = ()) -> str:
    keys = "".join(f'<span class="key"><i class="b{s.color}"></i>{escape(s.name)}</span>' for s in legend)
    return (
        f"<figure><figcaption><b>{escape(title)}</b> <small>{escape(note)}</small>"
        f"<div>{keys}</div></figcaption>{svg}</figure>"
    )


def number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
