"""`tandem export`: the newest checkpoint of a run as a Hugging Face folder, without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

from topology.config import ConfigError, load_config
from topology.models import ModelError, resolve_model
from topology.roles import POLICY
from topology.runs import RunError, RunFolder


def export_policy(folder: RunFolder, destination: Path) -> int:
    """Write the policy to `destination`, which must not exist yet; the step of the checkpoint. Raises ConfigError."""
    from trainers.checkpoints import RANKS_FOLDER, CheckpointError, find_latest

    if destination.exists():
        raise ConfigError(f"{destination} exists: choose a folder that does not, or remove it")
    config = load_config(folder.config)
    if config.collect is not None:
        raise ConfigError(f"run {folder.name} has no trainers (it has `collect`), so there is no policy to export")
    try:
        checkpoint = find_latest(folder.checkpoints)
        model_path = resolve_model(config.model.path)
    except (CheckpointError, ModelError) as error:
        raise ConfigError(str(error)) from None
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch: nothing is worth compiling for one export
    from trainers.learner import Rendezvous
    from trainers.rank import TrainerRank

    rank = TrainerRank(
        config.trainers[POLICY],
        model_path=str(model_path),
        rendezvous=Rendezvous(rank=0, world_size=1, address="127.0.0.1:0", timeout=config.limits.start),
        bucket_bytes=config.weights.bucket_bytes,
        seed=config.seed,
    )
    rank.start()
    try:
        rank.restore(str(checkpoint.path / RANKS_FOLDER))
        rank.export_huggingface(str(destination))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise RunError(f"{destination} cannot be written: {error}") from error
    finally:
        rank.close()
    return checkpoint.step
