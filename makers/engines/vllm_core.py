"""vLLM's own engine, in this process, with the semantics of rollouts. Synchronous; every method on one thread.

How the guarantees of makers/engines/engine.py are kept here:
- log-probs: `logprobs_mode="processed_logprobs"`, the sampled token's entry only, in vLLM's flat form.
- versions: vLLM labels each step with the version set after an update; steps and updates alternate on one thread and
  asynchronous scheduling is off (with it, a step launched under the old weights would get the new label).
- updates: names, shapes and checksums are checked before the model is touched. A load that fails nevertheless puts
  the module tree back together, but its values may be mixed, so the core is quarantined until a whole version is in.
- several processes (`tensor_parallel`, `pipeline_parallel`): vLLM's workers are children of this one and end with it. Each
  takes its part of a version from shared memory; a version is in only when it is in all of them. With stages several
  batches are under way between two steps, so these are brought home before anything changes.
- prefixes: the cache key carries the version (`cache_salt`). With `recompute`, requests that are running at an update
  drop their keys and values and compute them again under the new weights, so that every later token is exactly what
  the new version says; without, they go on with the old keys and values.

The samples of a group are separate requests, one seed each: vLLM's own `n` would seed them seed, seed+1, ..., which
makes neighbouring groups share samples, and would return them all at the end only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer.records import InfraFailure
from makers.config import VllmEngine
from makers.engines.engine import NO_VERSION, GroupRequest, Sample

if TYPE_CHECKING:
    from makers.engines.shared import SharedWeights

    Weights = Mapping[str, Any] | SharedWeights  # tensors by name; shared where the workers are processes of their own

MAX_PREFILL_TOKENS = 2048  # of one step on CPU, unless a single prompt needs more


def prepare_environment(threads: int, workers: int) -> None:
    """Settings that vLLM and torch read when they are imported. `threads` are those of all processes together."""
    threads = max(1, threads // workers)
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # this process has threads, and a fork copies locks that they hold
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_gib
    import torch

    torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else the first step waits for a C++ compiler


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a checkpoint folder, as an update must cover them."""
    import json

    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some checkpoints store the tied layer twice
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


class _Group:
    """A group in the engine: its samples arrive one by one."""

    def __init__(self, request: Any, requests: list[str]) -> None:
        self.request = request
        self.requests = requests
        self.samples: list[Any] = [None] * len(requests)
        self.missing = len(requests)


class VllmCore:
    """Groups in, finished groups out, one `step` at a time."""

    def __init__(
        self, config: VllmEngine, model_path: str, *, seed: int, recompute: bool, version: int, sleeps: bool
    ) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.expected = checkpoint_shapes(Path(model_path))
        self.version = version
        self.quarantined: str | None = None  # why nothing may be generated
        self._recompute = recompute
        self._sleeps = sleeps
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**self._arguments(config, model_path, seed, sleeps)))
        self._engine.set_weight_version(str(version))
        if (
            config.pipeline_parallel > 1
        ):  # makes the buffers between the stages, for which vLLM has no other time on CPU
            self._engine.engine_core.execute_dummy_batch()
        self._groups: dict[int, _Group] = {}
        self._owner: dict[str, tuple[int, int]] = {}  # request -> group, index of the sample
        self._ended: list[tuple[int, list[Sample]]] = []  # groups that ended outside step()
        self._next_request = 0

    @property
    def running(self) -> int:
        """Groups that step() has not returned."""
        return len(self._groups) + len(self._ended)

    def add(self, group: int, request: GroupRequest) -> None:
        """Enter a group. Raises ValueError when vLLM refuses it, and then none of it has entered."""
        if self.quarantined is not None:
            raise InfraFailure(f"engine is quarantined: {self.quarantined}")
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt

        entered: list[str] = []
        try:
            for index, (prompt_ids, settings) in enumerate(self._asked(request)):
                name = f"{group}/{index}/{self._next_request}"
                self._next_request += 1
                prompt = TokensPrompt(prompt_token_ids=prompt_ids, cache_salt=str(self.version))
                self._engine.add_request(name, prompt, settings)
                entered.append(name)
                self._owner[name] = (group, index)
        except BaseException as error:
            self._forget(entered)
            if isinstance(error, VLLMClientError):  # which is no ValueError
                raise ValueError(str(error)) from error
            raise
        self._groups[group] = _Group(request, entered)

    def step(self) -> list[tuple[int, list[Sample]]]:
        """One forward pass of everything that runs. Returns the groups whose last sample ended in it.

        An exception from here is final: vLLM cannot go on after one.
        """
        ended, self._ended = self._ended, []
        return ended or self._step()

    def _step(self) -> list[tuple[int, list[Sample]]]:
        finished = []
        for output in self._engine.step():
            group, index = self._owner.pop(output.request_id)
            state = self._groups[group]
            state.samples[index] = self._answer(state.request, index, output)
            state.missing -= 1
            if state.missing == 0:
                del self._groups[group]
                finished.append((group, [sample for sample in state.samples if sample is not None]))
        return finished

    def abort(self, group: int) -> None:
        """Take a group out, if it is still in."""
        state = self._groups.pop(group, None)
        if state is not None:
            self._forget(state.requests)

    def abort_all(self) -> list[int]:
        """Take every group out, and say which there were."""
        groups = list(self._groups)
        for group in groups:
            self.abort(group)
        return groups

    def load(self, version: int, weights: Weights) -> None:
        """Replace all weights. They have been checked against `expected`; see `quarantined` for what may remain."""
        self._bring_home()
        self.quarantined = f"loading version {version} of the weights did not finish"
        # A worker that raised would leave the answers of the others in their queues, to be taken for those of the next call.
        errors = [error for error in self._engine.collective_rpc(_load_in_worker, args=(weights,)) if error is not None]
        if errors:
            raise RuntimeError("; ".join(errors))
        self._engine.set_weight_version(str(version))
        self._engine.reset_prefix_cache(reset_running_requests=self._recompute)
        self.version = version
        self.quarantined = None

    def sleep(self, level: int) -> None:
        """Nothing may be running. Raises ValueError for what is not possible.

        On CPU vLLM pauses and frees nothing. On GPU it frees what `enable_sleep_mode` lets it; not yet run on one.
        """
        import torch

        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: 1 keeps the weights in the host's memory, 2 drops them")
        if not self._sleeps and torch.cuda.is_available():
            raise ValueError("this engine was not made to share its device: vLLM decides at its start what it can free")
        self._bring_home()
        if level == 2:
            self.version, self.quarantined = NO_VERSION, "its weights were dropped when it went to sleep"
        self._engine.sleep(level)

    def wake(self) -> None:
        self._engine.wake_up()

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _arguments(self, config: VllmEngine, model_path: str, seed: int, sleeps: bool) -> dict[str, Any]:
        return engine_arguments(config, model_path, seed, sleeps)

    def _asked(self, request: GroupRequest) -> Iterator[tuple[list[int], Any]]:
        """What vLLM is asked for each sample of a group: token ids and SamplingParams."""
        for seed in request.seeds:
            yield list(request.prompt_ids), _sampling_params(request, seed)

    def _answer(self, request: GroupRequest, index: int, output: Any) -> Sample:
        """From what vLLM returned for the sample `index` of a group."""
        return _sample(output.outputs[0])

    def _bring_home(self) -> None:
        """End the batches that pipeline stages are working on: their tokens are of the version that is in now."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        while any(batch.total_num_scheduled_tokens for _, batch, _ in core.batch_queue):
            self._ended += self._step()
        core.resume_scheduler()

    def _forget(self, requests: Sequence[str]) -> None:
        alive = [name for name in requests if self._owner.pop(name, None) is not None]
        self._engine.abort_request(alive)


def engine_arguments(config: VllmEngine, model_path: str, seed: int, sleeps: bool) -> dict[str, Any]:
    """What vLLM is started with, by device. `extra` of the config has the last word."""
    import torch

    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": seed % 2**31,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "distributed_executor_backend": "mp" if config.workers > 1 else "uni",
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
    }
    if torch.cuda.is_available():
        device: dict[str, Any] = {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": bool(config.enforce_eager),
            "enable_sleep_mode": sleeps,
        }
    else:
        device = {
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30 / config.workers),
            "enforce_eager": config.enforce_eager is not False,
            # A seeded request whose prompt is computed in chunks ends vLLM's engine on CPU, so prompts go in whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(MAX_PREFILL_TOKENS, config.max_model_len),
            "block_size": 32,  # the smallest the CPU kernels like: short prompts are shared within a group
        }
    return {**arguments, **device, **config.extra}


def _sampling_params(request: GroupRequest, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        seed=seed,
        stop=list(request.stop),
        detokenize=bool(request.stop),  # text is needed to look for stop strings, and for nothing else
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sample(completion: Any) -> Sample:
    token_ids = np.asarray(completion.token_ids, np.int32)
    logprobs = np.asarray(completion.logprobs.logprobs, np.float32)
    versions = np.empty(token_ids.size, np.int32)
    for span in completion.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return Sample(token_ids, logprobs, versions, completion.finish_reason == "length")


def _load_in_worker(worker: Any, weights: Weights) -> str | None:
    """Runs inside each of vLLM's workers: load through its layerwise reload, and mend the module tree if that fails.

    Returns what went wrong, None if nothing did.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    model = worker.model_runner.get_model()
    try:
        worker.reload_weights(weights_iterator=list(weights.items()))
        _refresh_tied_head(model, worker.model_config.hf_config)
        _repack_experts(model)
    except Exception as error:
        # vLLM leaves half the modules on the meta device; a later load would fail or, worse, mix old pieces in.
        for module in model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(module, info)
                info.reset()  # type: ignore[no-untyped-call]
        layerwise.LOADING_LAYERS.clear()
        return f"{worker.rank}: {error!r}" if worker.parallel_config.world_size > 1 else repr(error)
    return None


def _refresh_tied_head(model: Any, hf_config: Any) -> None:
    """Derive again what an output layer computed from the embedding it is tied to.

    On CPU vLLM multiplies by a packed copy of the weights. A reload brings the shared parameter up to date, but not
    the copy of a tied output layer, to which no tensor of its own was loaded: its logits would stay those of the first
    version.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if getattr(hf_config, "tie_word_embeddings", False):
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: Any) -> None:
    """Bring experts into the layout that vLLM's CPU kernel multiplies, which it does at the first load only.

    A reload leaves them as they came, and the kernel would read rows of one as pieces of another.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and isinstance(kernel.fused_experts, CPUUnquantizedExperts):
            kernel.fused_experts.process_weights_after_loading(module)
