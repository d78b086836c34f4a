"""Small SVG charts for the report: lines and stacked bars, drawn by hand so that the report needs no plotting package.

Guarantees: the output is one `<svg>` element without outside references; colours come from the CSS variables `--c0` to
`--c5`, so the page decides about light and dark; every mark carries a tooltip (`<title>`); values that are not finite
are left out; an empty chart says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34
MAX_BARS = 80
MAX_DOTS = 80


@dataclass(frozen=True)
class Series:
    """A line through `points` (x, y). `errors`: half the height of an error bar at each point."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    faint: bool = False
    dots: bool = False
    errors: Sequence[float] = ()


@dataclass(frozen=True)
class Frame:
    """Maps values to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def line_chart(series: Sequence[Series], *, label: str, x_label: str = "step", zero: bool = False) -> str:
    """Lines over a common x axis. `zero`: the y axis starts at 0."""
    clean = [Series(**{**vars(s), "points": [p for p in s.points if math.isfinite(p[1])]}) for s in series]
    points = [point for s in clean for point in s.points]
    if not points:
        return _empty(label)
    lows = [y - e for s in clean for (_, y), e in zip(s.points, s.errors or [0.0] * len(s.points), strict=False)]
    highs = [y + e for s in clean for (_, y), e in zip(s.points, s.errors or [0.0] * len(s.points), strict=False)]
    low, high = (min(0.0, *lows) if zero else min(lows)), max(highs)
    ticks = nice_ticks(low, high if high > low else low + (abs(low) or 1.0))
    xs = [x for x, _ in points]
    frame = Frame(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, ticks[0], ticks[-1])
    body = _axes(frame, ticks, x_label) + "".join(_line(frame, s, label, x_label) for s in clean)
    return _svg(label, body)


def stacked_bars(
    xs: Sequence[float],
    layers: Sequence[tuple[str, int, Sequence[float]]],
    *,
    label: str,
    unit: str,
    x_label: str = "step",
) -> str:
    """One bar for each x from its layers (name, colour, values), bottom up. Many bars are averaged in groups."""
    if not xs:
        return _empty(label)
    group = math.ceil(len(xs) / MAX_BARS)
    starts = range(0, len(xs), group)
    heights = [[_mean(values[i : i + group]) for _, _, values in layers] for i in starts]
    ticks = nice_ticks(0.0, max(map(sum, heights)) or 1.0)
    frame = Frame(-0.5, len(heights) - 0.5, 0.0, ticks[-1])
    bar = (WIDTH - LEFT - RIGHT) / len(heights) * 0.78
    names = [f"{xs[i]:g}" if group == 1 else f"{xs[i]:g}-{xs[min(i + group, len(xs)) - 1]:g}" for i in starts]
    body = _grid(frame, ticks)
    for position, column in enumerate(heights):
        base = 0.0
        for (name, color, _), value in zip(layers, column, strict=True):
            top, bottom = frame.y(base + value), frame.y(base)
            tip = escape(f"{x_label} {names[position]}: {name} {value:.3g} {unit}")
            body += (
                f'<rect class="f{color}" x="{frame.x(position) - bar / 2:.1f}" y="{top:.1f}" width="{bar:.1f}" '
                f'height="{max(bottom - top, 0):.1f}"><title>{tip}</title></rect>'
            )
            base += value
    every = max(1, math.ceil(len(names) / 12))
    for position in range(0, len(names), every):
        body += _text(frame.x(position), HEIGHT - BOTTOM + 15, f"{xs[starts[position]]:g}", "middle")
    return _svg(label, body + _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle"))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers whose first and last enclose [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those up to `window - 1` before it."""
    return [_mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def _line(frame: Frame, series: Series, label: str, x_label: str) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in series.points)
    style = f"s{series.color}" + (" faint" if series.faint else "")
    marks = f'<polyline class="line {style}" points="{path}"/>'
    for (x, y), error in zip(series.points, series.errors, strict=False):
        marks += (
            f'<line class="line {style}" x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" '
            f'y1="{frame.y(y - error):.1f}" y2="{frame.y(y + error):.1f}"/>'
        )
    if series.faint or len(series.points) > MAX_DOTS:
        return marks
    for x, y in series.points:
        tip = escape(f"{x_label} {x:g}: {series.name or label} {y:.4g}")
        radius = 4 if series.dots else 2
        marks += f'<circle class="f{series.color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}">'
        marks += f"<title>{tip}</title></circle>"
    return marks


def _axes(frame: Frame, ticks: Sequence[float], x_label: str) -> str:
    steps = [t for t in nice_ticks(frame.x_low, frame.x_high, 8) if frame.x_low <= t <= frame.x_high and t == int(t)]
    marks = "".join(_text(frame.x(t), HEIGHT - BOTTOM + 15, f"{t:g}", "middle") for t in steps)
    return _grid(frame, ticks) + marks + _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle")


def _grid(frame: Frame, ticks: Sequence[float]) -> str:
    marks = ""
    for tick in ticks:
        y = frame.y(tick)
        marks += f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        marks += _text(LEFT - 8, y + 4, _number(tick), "end")
    return marks


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{round(value, 10):g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _empty(label: str) -> str:
    return _svg(label, _text(WIDTH / 2, HEIGHT / 2, "nothing was recorded", "middle"))


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else 0.0
