"""Where the figures of a run go: `metrics.jsonl` and `events.jsonl` always, TensorBoard and Weights & Biases by setting.

Guarantees: a metrics object or an event is on its way to the disk when the call returns (one line, flushed); every line
is valid JSON (a value that is not finite becomes null); several processes may append events to the same file.
After a resume a step may appear twice in `metrics.jsonl`: the later line is the one that counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainers.config import MetricsConfig, WandbConfig

Scalar = float | int | str | None


class Charts(Protocol):
    """A service that draws numbers over steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MissingExtra(ImportError):
    """A setting asks for a package that is not installed."""

    def __init__(self, setting: str, package: str, extra: str) -> None:
        super().__init__(
            f"{setting} needs the package {package}: pip install 'tandem-rl[{extra}]', or take the setting away"
        )


class Recorder:
    """Appends metrics and events of one run. `wall_clock` gives seconds since the epoch."""

    def __init__(
        self, folder: Path, charts: Sequence[Charts] = (), wall_clock: Callable[[], float] = time.time
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (folder / "metrics.jsonl").open("a", buffering=1)
        self._events = folder / "events.jsonl"
        self._charts = tuple(charts)
        self._wall_clock = wall_clock

    def metrics(self, values: Mapping[str, Scalar]) -> None:
        """Record the metrics object of one step; it holds `step`."""
        self._metrics.write(_line(values))
        self.chart(int(values["step"] or 0), values)

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened now, see `append_event`."""
        append_event(self._events, kind, wall_time=self._wall_clock(), **fields)

    def chart(self, step: int, values: Mapping[str, Any]) -> None:
        """Draw the finite numbers of `values` at `step`, where a chart service is set. `step` itself is the axis."""
        numbers = {key: float(v) for key, v in values.items() if key != "step" and _is_number(v)}
        for charts in self._charts:
            charts.scalars(step, numbers)

    def close(self) -> None:
        self._metrics.close()
        for charts in self._charts:
            charts.close()


def append_event(file: Path, kind: str, *, wall_time: float | None = None, **fields: Any) -> None:
    """Append `{"time": seconds since the epoch, "event": kind, ...}` as one line; `wall_time` is now unless given."""
    now = time.time() if wall_time is None else wall_time
    with file.open("a") as stream:
        stream.write(_line({"time": round(now, 3), "event": kind, **fields}))


def open_recorder(folder: Path, config: MetricsConfig, *, name: str, run_config: Mapping[str, Any]) -> Recorder:
    """The recorder of the run `name` in its folder. Raises MissingExtra for a chart service that is not installed."""
    charts: list[Charts] = []
    if config.tensorboard:
        charts.append(TensorBoard(folder / "tensorboard"))
    if config.wandb is not None:
        charts.append(WeightsAndBiases(folder, config.wandb, name=name, run_config=run_config))
    return Recorder(folder, charts)


class TensorBoard:
    """Event files for `tensorboard --logdir`. Written without torch."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra("metrics.tensorboard", "tensorboard", "tensorboard") from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        points = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run of Weights & Biases. `mode: offline` writes below the run folder, to be sent later with `wandb sync`."""

    def __init__(self, folder: Path, config: WandbConfig, *, name: str, run_config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("metrics.wandb", "wandb", "wandb") from error
        self._run = wandb.init(
            project=config.project,
            name=name,
            mode=config.mode,
            dir=str(folder),
            config=dict(run_config),
            settings=wandb.Settings(silent=True),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps({key: _plain(value) for key, value in values.items()}) + "\n"


def _plain(value: Any) -> Any:
    """What JSON can say of `value`: numpy numbers as numbers, not-finite as null, unknown things as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
