"""The losses and advantages against TRL's own code, called unbound on a stub of its trainers: values and gradients.

In double precision, so that a difference is one of the formula. Importing TRL takes seconds, hence one file for all.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from trainers.algorithms.advantages import estimator_of
from trainers.algorithms.base import TokenBatch
from trainers.algorithms.factory import build_algorithm
from trainers.batch import Totals
from trainers.config import AlgorithmConfig

with patch("trl.import_utils.is_vllm_available", lambda *_, **__: False):  # importing vLLM too would take seconds
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

SAMPLES, LONGEST, MAX_TOKENS = 6, 9, 16
ACCELERATOR = SimpleNamespace(
    num_processes=1,
    process_index=0,
    sync_gradients=False,
    device=torch.device("cpu"),
    gather=lambda value: value,
    gather_for_metrics=lambda value: value,
    reduce=lambda value, reduction: value,
)


class Case:
    """Random samples of different lengths: padded as TRL has them, [SAMPLES, LONGEST], and flat as ours."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        lengths = torch.randint(2, LONGEST + 1, (SAMPLES,), generator=random)
        self.mask = (torch.arange(LONGEST) < lengths[:, None]).double()
        self.proximal = -normal(SAMPLES, LONGEST).abs() - 0.1
        self.current = self.proximal + 0.3 * normal(SAMPLES, LONGEST)
        self.behaviour = self.proximal + 0.3 * normal(SAMPLES, LONGEST)
        self.reference = self.proximal + 0.3 * normal(SAMPLES, LONGEST)
        self.entropy = normal(SAMPLES, LONGEST).abs()
        self.advantages = normal(SAMPLES)
        self.lengths = lengths.double()

    def flat(self, values: Tensor) -> Tensor:
        return values.expand(SAMPLES, LONGEST)[self.mask.bool()]

    def ours(self, **config) -> tuple[float, Tensor]:
        """Loss, and its gradient [SAMPLES, LONGEST] by the current policy's log-probs."""
        current = self.current.clone().requires_grad_()
        batch = TokenBatch(
            current=self.flat(current),
            proximal=self.flat(self.proximal),
            behaviour=self.flat(self.behaviour),
            reference=self.flat(self.reference),
            entropy=self.flat(self.entropy),
            advantages=self.flat(self.advantages[:, None]),
            samples=self.flat(torch.arange(SAMPLES)[:, None]),
            lengths=self.flat(self.lengths[:, None]),
            totals=Totals(int(self.lengths.sum()), SAMPLES, MAX_TOKENS),
        )
        loss = build_algorithm(TypeAdapter(AlgorithmConfig).validate_python(config))(batch).loss
        return _with_gradient(loss, current)

    def of_grpo_trainer(self, cap: float | None = None, **settings) -> tuple[float, Tensor]:
        """The same from TRL, whose proximal policy is `old_per_token_logps`."""
        current = self.current.clone().requires_grad_()
        stub = SimpleNamespace(
            **{
                **{"loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2},
                **{"beta": 0.0, "entropy_coef": 0.0, "off_policy_mask_threshold": None},
                **settings,
            },
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            _get_per_token_logps_and_entropies=lambda *_, **__: (current, self.entropy, None),
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            top_entropy_quantile=1.0,
            use_vllm=cap is not None,
            vllm_importance_sampling_correction=True,
            _entropy_bonus_enabled=bool(settings.get("entropy_coef")),
            use_adaptive_entropy=False,
            aux_loss_enabled=False,
            max_completion_length=MAX_TOKENS,
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True),
            accelerator=ACCELERATOR,
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        ids = torch.zeros(SAMPLES, LONGEST, dtype=torch.long)
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": torch.ones_like(ids),
            "completion_ids": ids,
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.proximal,
            "sampling_per_token_logps": self.behaviour,
            "ref_per_token_logps": self.reference,
            "num_items_in_batch": self.mask.sum(),
            "importance_sampling_ratio": (self.proximal - self.behaviour).exp().clamp(max=cap or 1.0),
        }
        return _with_gradient(GRPOTrainer._compute_loss(stub, None, inputs), current)

    def of_dpo_trainer(self, loss: str, beta: float) -> tuple[float, Tensor]:
        """TRL's, whose batch has all chosen samples before all rejected ones, and a column before the first target."""
        current = self.current.clone().requires_grad_()
        order = torch.arange(SAMPLES).view(-1, 2).T.flatten()

        def model(values: Tensor):
            inner = SimpleNamespace(
                log_probs=(values * self.mask)[order],
                **{
                    "entropy": self.entropy[order],
                    "mean_logits": self.entropy[order],
                    "is_top1": self.mask[order].bool(),
                },
            )
            return lambda **_: inner

        stub = SimpleNamespace(
            **{"beta": beta, "loss_types": [loss], "loss_weights": [1.0], "label_smoothing": 0.0, "ld_alpha": None},
            model=SimpleNamespace(training=False),
            ref_model=model(self.reference),
            accelerator=ACCELERATOR,
            args=SimpleNamespace(gradient_checkpointing_kwargs=None),
            _metrics=defaultdict(lambda: defaultdict(list)),
            aux_loss_enabled=False,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            use_weighting=False,
            _total_train_tokens=0,
            _tp_size=1,
        )
        reference = (self.reference * self.mask).sum(1)[order]
        mask = torch.cat([torch.zeros(SAMPLES, 1), self.mask], dim=1)[order]
        inputs = {
            "input_ids": torch.zeros(SAMPLES, LONGEST + 1, dtype=torch.long),
            "attention_mask": torch.ones(SAMPLES, LONGEST + 1),
            "completion_mask": mask,
            "ref_chosen_logps": reference[: SAMPLES // 2],
            "ref_rejected_logps": reference[SAMPLES // 2 :],
        }
        return _with_gradient(DPOTrainer._compute_loss(stub, model(current), inputs, False), current)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """TRL's, [prompts * samples], for rewards [prompts, samples]."""
    count = rewards.numel()
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(per_device_train_batch_size=count, gradient_checkpointing_kwargs=None),
        _generate=lambda prompts: ([[1]] * count, [[2, 3]] * count, ["text"] * count),
        _calculate_rewards=lambda *_: rewards.reshape(-1, 1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (torch.zeros(count, 2), None, None),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        accelerator=ACCELERATOR,
        beta=0.0,
        mask_truncated_completions=False,
        normalize_advantages=False,
        num_generations=rewards.shape[1],
        pad_to_multiple_of=None,
        reward_clip_range=None,
        reward_func_names=["score"],
        reward_weights=torch.ones(1, dtype=torch.float64),
        _pending_extra_logs={},
        _pending_metrics={},
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(list, rewards=defaultdict(list)),
    )
    return RLOOTrainer._generate_and_score_completions(stub, [{"prompt": "question"}] * count)["advantages"]


def _with_gradient(loss: Tensor, current: Tensor) -> tuple[float, Tensor]:
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad


def agree(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert theirs[1].abs().max() > 1e-3
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-12)


UNWEIGHTED = {"corrections": {"truncate": None}}
BOUNDS = {"clip_low": 0.1, "clip_high": 0.3, **UNWEIGHTED}
THEIR_BOUNDS = {"epsilon_low": 0.1, "epsilon_high": 0.3}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"type": "grpo", "normalise": "sequence", **BOUNDS}, {"loss_type": "grpo", **THEIR_BOUNDS}),
        ({"type": "dr_grpo", **BOUNDS}, {"loss_type": "dr_grpo", **THEIR_BOUNDS}),
        ({"type": "dapo", **BOUNDS}, {"loss_type": "dapo", **THEIR_BOUNDS}),
        ({"type": "grpo", **BOUNDS}, {"loss_type": "bnpo", **THEIR_BOUNDS}),
        ({"type": "cispo", "clip_high": 0.2, **UNWEIGHTED}, {"loss_type": "cispo", "epsilon_high": 1.2}),
        (
            {"type": "gspo", **UNWEIGHTED},
            {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        ),
        (
            {"type": "gspo", "normalise": "token", **BOUNDS},
            {"loss_type": "dapo", "importance_sampling_level": "sequence", **THEIR_BOUNDS},
        ),
    ],
    ids=["grpo", "dr_grpo", "dapo", "grpo over tokens", "cispo", "gspo", "gspo over tokens"],
)
def test_a_policy_loss_and_its_gradient_are_those_of_trl(ours, theirs, seed):
    case = Case(seed)

    agree(case.ours(**ours), case.of_grpo_trainer(**theirs))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"kl_coef": 0.2, "kl_estimator": "k3", **UNWEIGHTED}, {"beta": 0.2}),
        ({"entropy_coef": 0.05, **UNWEIGHTED}, {"entropy_coef": 0.05}),
        ({"corrections": {"truncate": {"cap": 1.1}}}, {"cap": 1.1}),
        ({"corrections": {"truncate": None, "mask_off_policy": 0.05}}, {"off_policy_mask_threshold": 0.05}),
    ],
    ids=["kl", "entropy", "truncated importance sampling", "off-policy sequence mask"],
)
def test_what_composes_with_a_loss_does_what_it_does_in_trl(ours, theirs):
    case = Case()
    alone = case.ours(type="dapo", clip_high=0.2, **UNWEIGHTED)

    found = case.ours(type="dapo", clip_high=0.2, **ours)

    agree(found, case.of_grpo_trainer(loss_type="dapo", **theirs))
    assert found[0] != pytest.approx(alone[0], rel=1e-3)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_a_preference_loss_and_its_gradient_are_those_of_trl(loss):
    case = Case()

    agree(case.ours(type="dpo", beta=0.3, loss=loss), case.of_dpo_trainer(loss, beta=0.3))


def test_the_advantages_of_rloo_are_those_of_trl():
    rewards = np.random.default_rng(0).normal(size=(5, 4))
    settings = TypeAdapter(AlgorithmConfig).validate_python({"type": "rloo"})
    kept, lengths = np.ones((5, 4), bool), np.full((5, 4), 2)

    ours = estimator_of(settings)(list(rewards), list(kept), list(lengths))

    np.testing.assert_allclose(np.concatenate(ours), rloo_advantages(torch.tensor(rewards)).numpy(), rtol=1e-6)
