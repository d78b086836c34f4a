"""A policy model in Megatron-core from a Hugging Face folder.

Guarantees: every weight of the folder is used and every parameter is loaded (names must match exactly); what the model
cannot represent is refused with the reason before anything is built. Parallelism is declared in Megatron's config and
applied by its layers; nothing here depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import Bridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from trainers.config import MegatronBackend
from trainers.megatron.attention import PackedLayout, SegmentAttention
from trainers.megatron.context import StripedAttention, put_together
from trainers.megatron.moe import SequentialExpertsBridge, set_experts_apart
from trainers.megatron.norm import Norm
from trainers.megatron.process_group import all_ranks_together
from trainers.megatron.vocab import VocabShard, log_probs
from trainers.megatron.vocab_divergence import log_probs_and_divergence
from trainers.parallel import unsupported

FAMILIES: dict[str, type[Bridge]] = {
    "llama": LLaMABridge,
    "qwen2": Qwen2Bridge,
    "qwen3": Qwen3Bridge,
    "qwen3_moe": SequentialExpertsBridge,
}
_LOCAL_NORMS = {
    "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}


class PolicyModel(GPTModel):
    """Packed tokens in, two figures of each target out. Logits exist chunk by chunk, for target rows only."""

    entropy_gradient = False  # set by whoever computes a loss that differentiates the entropy

    def _postprocess(self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedLayout, **__: Any) -> Tensor:
        """float32 [2, targets], with a teacher [6, targets]: the outputs; hidden states on all but the last stage."""
        if not self.post_process:
            return hidden_states
        own = self._outputs(self._target_rows(hidden_states, packed_seq_params), packed_seq_params)
        if self.config.context_parallel_size == 1:
            return own
        return put_together(own, packed_seq_params.own, packed_seq_params.every_target)

    def _target_rows(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states[:, 0].index_select(0, layout.logit_rows)

    def _outputs(self, rows: Tensor, layout: PackedLayout) -> Tensor:
        """Log-probs and entropies of the targets, from the hidden states [targets, hidden] that predict them; and with a
        teacher their divergence from it, and the overlap of the top-k."""
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        shard, gradient = self._vocab_shard(weight.size(0)), self.entropy_gradient
        if layout.distillation is not None:
            targets, temperatures = layout.targets, layout.temperatures
            return log_probs_and_divergence(
                rows, weight, targets, temperatures, shard, layout.distillation, entropy_gradient=gradient
            )
        return torch.stack(
            log_probs(rows, weight, layout.targets, layout.temperatures, shard, entropy_gradient=gradient)
        )

    def _vocab_shard(self, size: int) -> VocabShard:
        rank = parallel_state.get_tensor_model_parallel_rank()
        group = parallel_state.get_tensor_model_parallel_group()
        return VocabShard(rank * size, size, self.vocab_size, group)


class _LocalBridge:
    """Mixed into a bridge of mbridge: Megatron's plain-torch layers, names of their norms, transformers 5 settings."""

    def __init__(self, hf_config: Any, **kwargs: Any) -> None:
        self._OTHER_MAPPING = _LOCAL_NORMS
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # mbridge changes it in place, for all models of the process
        self._MLP_MAPPING = {**self._MLP_MAPPING, "pre_mlp_layernorm.weight": _LOCAL_NORMS["pre_mlp_layernorm.weight"]}
        super().__init__(hf_config, **kwargs)

    def _adjust_mapping_for_shared_weights(self) -> None:
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"


def read_config(folder: Path) -> Any:
    """The Hugging Face config of a supported model. Raises ValueError naming what is not supported."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{folder}: model family {config.model_type!r} is not supported by the megatron backend; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    rope = dict(getattr(config, "rope_parameters", None) or {})
    for refused, reason in (
        (rope.get("rope_type", "default") != "default", f"rope scaling ({rope.get('rope_type')})"),
        ("sliding_attention" in (getattr(config, "layer_types", None) or ()), "sliding window attention"),
        (config.model_type != "qwen2" and getattr(config, "attention_bias", False), "attention_bias"),
        (getattr(config, "mlp_bias", False), "mlp_bias"),
        (config.hidden_act != "silu", f"activation {config.hidden_act}"),
        (getattr(config, "decoder_sparse_step", 1) != 1, "layers without experts (decoder_sparse_step)"),
        (bool(getattr(config, "mlp_only_layers", None)), "layers without experts (mlp_only_layers)"),
    ):
        if refused:
            raise ValueError(f"{folder}: the megatron backend does not support {reason} for {config.model_type}")
    config.rope_theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    config.rope_scaling = None
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def check_layout(backend: MegatronBackend, hf_config: Any) -> None:
    """Raises ValueError with every reason why the model cannot be split as the backend says."""
    reasons = unsupported(
        backend,
        layers=hf_config.num_hidden_layers,
        heads=hf_config.num_attention_heads,
        kv_heads=hf_config.num_key_value_heads,
        intermediate=getattr(hf_config, "moe_intermediate_size", hf_config.intermediate_size),
        experts=getattr(hf_config, "num_experts", 0),
    )
    if reasons:
        raise ValueError("; ".join(f"backend.{reason}" for reason in reasons))


def build_bridge(hf_config: Any, dtype: torch.dtype, *, recompute: bool, sequence_parallel: bool = False) -> Bridge:
    """Knows how Megatron's names and layouts correspond to Hugging Face's. Needs the parallel state."""
    family = FAMILIES[hf_config.model_type]
    bridge = type(f"Local{family.__name__}", (_LocalBridge, family), {})(hf_config, dtype=dtype)
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    bridge.set_extra_args(
        use_cpu_initialization=not torch.cuda.is_available(),
        sequence_parallel=sequence_parallel,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **(full if recompute else {}),
    )
    bridge.make_vocab_size_divisible_by = tensor_parallel
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = -(-hf_config.vocab_size // tensor_parallel) * tensor_parallel
    return bridge


def build_model(bridge: Bridge, kind: type[PolicyModel] = PolicyModel) -> PolicyModel:
    """This rank's part of the model, with random weights."""
    hf_config = bridge.hf_config
    model = kind(
        config=bridge.config,
        transformer_layer_spec=block_spec(bridge.config),
        vocab_size=bridge.padded_vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        position_embedding_type="none",  # rotary positions are applied by SegmentAttention
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
    )
    model.vocab_size = hf_config.vocab_size
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    set_experts_apart(model)
    return model.to(bridge.dtype)


def block_spec(config: Any) -> TransformerBlockSubmodules:
    """Megatron's plain-torch layers with our attention, and norms that work with sequence parallelism."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = SegmentAttention if config.context_parallel_size == 1 else StripedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)


def load_weights(bridge: Bridge, model: PolicyModel, folder: Path, unused: Collection[str] = ()) -> None:
    """Read the folder's safetensors into the model. Raises ValueError when names, without `unused`, do not match."""
    io = bridge._get_safetensor_io(str(folder))
    found = set(io.load_hf_weight_names())
    tied = {"lm_head.weight"} if bridge.hf_config.tie_word_embeddings else set()
    names = bridge._weight_name_mapping_mcore_local_to_global(model).values()
    wanted = all_ranks_together({name for local in names for name in bridge._weight_name_mapping_mcore_to_hf(local)})
    missing, extra = sorted(wanted - found), sorted(found - wanted - tied - set(unused))
    if missing or extra:
        raise ValueError(
            f"{folder}: weights missing: {missing[:5] or 'none'}, not of this model: {extra[:5] or 'none'}"
        )
    with torch.no_grad():
        bridge.load_weights([model], str(folder))


@torch.no_grad()  # collectives on parameters leave a hook on each, more of them with every export
def export_weights(bridge: Bridge, model: Any) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor), each name once; tensors may be views of the parameters. Collective."""
    seen = set()
    for name, tensor in bridge.export_weights([model]):
        if name not in seen:
            seen.add(name)
            yield name, tensor.detach()
