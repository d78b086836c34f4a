"""From the config of a maker to the maker. Each kind is imported only when it is built."""

from __future__ import annotations

from buffer.records import InfraFailure
from makers import config as settings
from makers.maker import Maker
from weights.client import WeightClient

PARTS = ("stage", "needs", "slots", "start", "make", "status", "close")  # of the Maker protocol


def build_maker(
    config: settings.MakerConfig,
    *,
    name: str,
    model_path: str,
    policy_path: str | None = None,
    weights: WeightClient | None,
    seed: int,
    sleeps: bool = False,
) -> Maker:
    """The maker that `config` describes, not yet started.

    `model_path` is the checkpoint folder of the maker's model, `policy_path` the run's (None: the same);
    `weights` is None where no trainer publishes any.
    `sleeps`: it shares its device, and will be told to give the memory back (see makers.maker.Sleeper). A kind of your
    own (`package.module:Class`) is called with its options as keyword arguments. Raises InfraFailure when what it returns
    is not a maker.
    """
    if isinstance(config, settings.RolloutMaker):
        from makers.engines.engine import NO_VERSION
        from makers.engines.vllm import InProcessVllm
        from makers.rollout import RolloutMaker

        engine = InProcessVllm(
            config.engine,
            model_path,
            threads=config.resources.threads(config.engine.threads),
            seed=seed,
            recompute=config.recompute,
            sleeps=sleeps,
            version=NO_VERSION if weights is not None else 0,  # without a trainer the folder's weights are the policy
        )
        return RolloutMaker(config, name=name, model_path=model_path, engine=engine, weights=weights)
    if isinstance(config, settings.RewardMaker):
        from makers.reward import RewardMaker

        return RewardMaker(config, name=name, model_path=model_path)
    if isinstance(config, settings.RewardModelMaker):
        from makers.reward_model import RewardModelMaker

        stage = settings.reward_model_stage(name.split("/")[1])  # maker/GROUP/INDEX
        return RewardModelMaker(config, name=name, stage=stage, model_path=model_path)
    if isinstance(config, settings.JudgeMaker):
        from makers.judge import JudgeMaker

        return JudgeMaker(
            config, name=name, stage=settings.reward_model_stage(name.split("/")[1]), model_path=model_path,
            policy_path=policy_path or model_path, sleeps=sleeps,
        )  # fmt: skip
    if isinstance(config, settings.TeacherMaker):
        from makers.teacher import TeacherMaker

        return TeacherMaker(config, name=name, model_path=model_path, sleeps=sleeps)
    if isinstance(config, settings.ReferenceMaker) and config.engine is not None:
        from makers.engine_reference import EngineReferenceMaker

        return EngineReferenceMaker(config, config.engine, name=name, model_path=model_path, sleeps=sleeps)
    if isinstance(config, settings.ReferenceMaker):
        from makers.reference import ReferenceMaker

        return ReferenceMaker(config, name=name, model_path=model_path)
    if isinstance(config, settings.DatasetMaker):
        from makers.dataset import DatasetMaker

        return DatasetMaker(config, name=name, model_path=model_path)
    return _custom(config, name)


def _custom(config: settings.CustomMaker, name: str) -> Maker:
    from makers.dotted import load_dotted

    maker: Maker = load_dotted(config.kind)(**config.options)
    absent = [part for part in PARTS if not hasattr(maker, part)]
    if absent:
        raise InfraFailure(f"maker {name}: {config.kind} made a {type(maker).__name__} without {', '.join(absent)}")
    return maker
