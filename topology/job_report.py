"""The figures and charts of a job (a run with `collect`) in its report: what was collected, part by part."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from topology.charts import Series, line_chart
from topology.history import History, Summary
from topology.report_page import duration, figure, number

COLORS = 6  # that the page has
PASS = "collected/pass@"


def job_cards(history: History, figures: Summary) -> list[tuple[str, str, str]]:
    """(name, value, note) of the figures at the top."""
    last = history.steps[-1]
    parts, samples = last["step"], last["collected/samples"]
    cards = [
        (
            "rows",
            f"{last['collected/rows']:,}",
            f"in {parts} {'part' if parts == 1 else 'parts'}, {duration(figures.seconds)}",
        ),
        ("samples kept", f"{last['collected/kept']:,}", f"of {samples:,}"),
    ]
    if last.get("collected/score") is not None:
        cards.append(("mean score", number(last["collected/score"]), "of all samples, kept or not"))
    cards += [(_passed(key), number(last[key]), "mean over the prompts") for key in _pass_keys(history)]
    length = last["collected/tokens"] / samples if samples else None
    cards += [
        ("tokens/s generated", number(figures.generated_per_s, ".0f"), "all makers together"),
        ("response length", number(length, ".1f"), "tokens, mean over all samples"),
    ]
    return cards


def job_charts(history: History) -> Iterable[str]:
    chart = partial(line_chart, x_label="part")
    kept = [
        Series("samples", history.series("collected/samples"), 5),
        Series("kept", history.series("collected/kept"), 0),
    ]
    yield figure("Samples", "in the files so far", chart(kept, label="samples", zero=True), kept)
    score = [Series("score", history.series("collected/score"), 1)]
    yield figure("Score", "mean over all samples so far", chart(score, label="score"))
    keys = _pass_keys(history)
    passed = [Series(_passed(key), history.series(key), place % COLORS) for place, key in enumerate(keys)]
    if passed:
        yield figure("Pass at k", "mean over the prompts so far", chart(passed, label="pass@k", zero=True), passed)
    rate = [Series("generated", history.series("tokens_per_s/generated"), 4)]
    yield figure("Tokens per second", "over each part", chart(rate, label="tokens/s", zero=True))


def _pass_keys(history: History) -> list[str]:
    return [key for key in history.steps[-1] if key.startswith(PASS)]


def _passed(key: str) -> str:
    return key.partition("/")[2]
