"""vLLM's names, and what each is in Octavo: one table of options, fields, methods and imports.

An entry has one of four states. SUPPORTED: the same name and meaning. RENAMED: the same meaning
under our name, and vLLM's is accepted. NO_EFFECT: its neutral values ask for what Octavo does
anyway. REFUSED: the feature is missing; its neutral value is vLLM's default, which leaves it off.
A neutral value is accepted and changes nothing; any other is an error that says why, and what to
use. `docs/from-vllm.md` is made from this table.

Not here: reading or checking the values of supported names; their owners do that.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

VERSION = "0.33.0"  # the vLLM whose names these are; names it has dropped since are kept


class Kind(str, Enum):
    """Where a name is used."""

    ENGINE = "engine option"
    SERVER = "server flag"
    SAMPLING = "sampling parameter"
    REQUEST = "request field"
    METHOD = "method of LLM"
    ASYNC_METHOD = "method of AsyncLLM"
    ARGUMENT = "argument of LLM's methods"
    PROMPT = "key of a prompt"
    IMPORT = "import"


class Status(str, Enum):
    """What a name is here; see the module."""

    SUPPORTED = "supported"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Form(Enum):
    """How an option is written on a command line: --x, --x VALUE, --x A B."""

    FLAG = "flag"
    VALUE = "value"
    LIST = "list"


class Entry(NamedTuple):
    """One name.

    ours: the name here, if it is another. meaning: vLLM's value -> ours, of supported and renamed
    names. neutral: values that change nothing (None is one too, of names that are not supported);
    any_value: all are. note: why they change nothing, or what a value means here. reason, use: why
    other values are refused, and what to use.
    """

    kind: Kind
    name: str
    status: Status
    ours: str = ""
    meaning: tuple[tuple[object, object], ...] = ()
    neutral: tuple[object, ...] = ()
    any_value: bool = False
    note: str = ""
    reason: str = ""
    use: str = ""

    def is_neutral(self, value: object) -> bool:
        """Whether `value` may be given and changes nothing."""
        if self.any_value or any(same(value, item) for item in self.neutral):
            return True
        return value is None and self.status in (Status.NO_EFFECT, Status.REFUSED)

    def refusal(self) -> str:
        """Why, and what to use; follows the name, or the name and its value."""
        return f"{self.reason}; {self.use}" if self.use else self.reason

    @property
    def form(self) -> Form:
        first = self.neutral[0] if self.neutral else None
        if isinstance(first, bool) or (self.any_value and not self.neutral):
            return Form.FLAG
        return Form.LIST if isinstance(first, list) else Form.VALUE


def same(one: object, other: object) -> bool:
    """Equal, with 1 and 1.0 but not 1 and True; empty collections are alike."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    empty = (list, tuple, set, frozenset, dict)
    if isinstance(one, empty) and isinstance(other, empty) and not one and not other:
        return True
    return one == other


class Why(NamedTuple):
    """The reason for which names are refused, and what to use."""

    reason: str
    use: str = ""


# fmt: off
# --- reasons ------------------------------------------------------------------------------------

_LORA = Why("LoRA adapters are not supported",
            "merge the adapter into the weights (peft: merge_and_unload) and load the result")
_SPECULATIVE = Why("speculative decoding is not supported", "leave it out: answers are the same")
_MEDIA = Why("images, audio and video are not supported", "use a text model with text prompts")
_POOLING = Why("embedding, classification and scoring are not supported", "only text is generated")
_FORM = "vLLM has replaced it"
_BACKEND = Why("llguidance enforces every grammar", "leave it out")
_PARSERS = Why("parsers and grammars of a format belong together",
               "a format is one file of octavo.text.tools or octavo.text.reasoning")
_REASONING = Why("where reasoning begins and ends follows from its format and the prompt",
                 "use reasoning_parser")
_BEAM = Why("beam search is not supported", "use n with a temperature, and rank by "
            "cumulative_logprob")
_PROCESSORS = Why("logits processors are not supported: their Python would hold up all requests",
                  "use logit_bias, allowed_token_ids or bad_words")
_PARALLEL = Why("a model is divided by tensor_parallel_size alone, on one machine",
                "start several servers behind a load balancer")
_ENGINES = Why("a server starts, numbers and routes to all of its engines (data_parallel_size)",
               "leave it out; several servers need a load balancer")
_GPU = Why("it chooses among GPU kernels of vLLM's", "leave it out")
_COMPILE = Why("nothing is compiled with torch: steps are captured as they are",
               "leave it out; enforce_eager=True turns capturing off")
_MAMBA = Why("state-space models are not supported", "docs/models.md lists the models that are")
_MOE = Why("mixtures of experts are not supported", "docs/models.md lists the models that are")
_OFFLOAD = Why("weights stay in memory", "use quantization='int8' or 'int4' to make them smaller")
_TRANSFER = Why("the KV cache is not sent to other machines or stores",
                "prefixes are cached in memory (enable_prefix_caching)")
_RL = Why("weights cannot be changed while the engine runs", "start an engine with the new weights")
_PROFILER = Why("there is no profiler", "use py-spy or perf on the engine's process")
_TRACE = Why("spans of requests are a server's (octavo serve --otlp-traces-endpoint)",
             "trace=FILE writes the engine's steps and requests, for Perfetto")
_LOGGING = Why("there is one log", "set OCTAVO_LOG_LEVEL, OCTAVO_LOG_FORMAT, or configure the "
               "logger 'octavo'")
_CUSTOM = Why("vLLM's classes cannot be plugged in",
              "use attention.register_attention_impl, devices.register or LLM(scheduler=...)")
_CONFIG_JSON = Why("a checkpoint's config.json is taken as it is", "edit a copy")
_MIDDLEWARE = Why("the server runs no code of others", "put a proxy in front")
_RAY = Why("Ray is not used", "leave it out")
_SLEEP = Why("an engine cannot sleep", "close() gives the memory back; start another to go on")
_LOADING = Why("there is one way to read safetensors and GGUF", "leave it out")
_TOKENIZER = Why("a model is loaded with its tokenizer, in one way", "leave it out")
_STORED = Why("Hugging Face's own settings apply", "set HF_TOKEN or HF_HOME in the environment")
_EXPERIMENTAL = Why("it is an experiment of vLLM's", "leave it out")
_METRICS = Why("the metrics are fixed", "docs/server.md lists all of them")
_DIFFUSION = Why("diffusion models are not supported", "docs/models.md lists the models that are")
_REMOVED = Why("vLLM has dropped it", "leave it out")
_QUEUE = Why("only waiting requests are counted", "use max_waiting")
_GUARD = Why("there is no watchdog", "--restart-engine restarts an engine that died")
_PROMPTS = Why("prompts are text or token ids", "use prompt or prompt_token_ids")
_TRUNCATE = Why("prompts are never cut silently", "cut the prompt before it is sent")
_IDS = Why("log-probabilities are given for the likeliest tokens", "use logprobs (at most 20)")
_WATERMARK = Why("answers are not watermarked", "leave it out")
_REPETITION = Why("repetitions do not end an answer", "use repetition_penalty or stop")
_SESSION = Why("requests are independent of each other", "equal prefixes are cached anyway")

# fmt: on
# --- how the table is written -------------------------------------------------------------------


def _supported(kind: Kind, names: str) -> list[Entry]:
    return [Entry(kind, name, Status.SUPPORTED) for name in names.split()]


def _values(value: Any) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _no_effect(kind: Kind, note: str, **neutral: Any) -> list[Entry]:
    """Names with their neutral values (one, or a tuple of several); others are refused."""
    return [
        Entry(
            kind,
            name,
            Status.NO_EFFECT,
            neutral=_values(value),
            note=note,
            reason=f"only {_listed(_values(value))} is supported: {note}",
        )
        for name, value in neutral.items()
    ]


def _any_value(kind: Kind, note: str, names: str) -> list[Entry]:
    """Names of which every value is neutral."""
    return [Entry(kind, n, Status.NO_EFFECT, any_value=True, note=note) for n in names.split()]


def _refused(kind: Kind, why: Why, **neutral: Any) -> list[Entry]:
    """Names of missing features, with their neutral values (one, or a tuple of several)."""
    return [
        Entry(kind, name, Status.REFUSED, neutral=_values(value), reason=why.reason, use=why.use)
        for name, value in neutral.items()
    ]


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(map(repr, values))


def _replaced(kind: Kind) -> list[Entry]:
    """vLLM's old names of structured outputs, which it has dropped."""
    names = ("json", "regex", "choice", "grammar", "whitespace_pattern")
    return [
        *(
            entry
            for name in names
            for entry in _refused(
                kind, Why(_FORM, f"use structured_outputs.{name}"), **{f"guided_{name}": None}
            )
        ),
        *_refused(kind, _BACKEND, guided_decoding_backend=None),
    ]


# fmt: off
# Short, because the table is long: the kinds of its rows.
E, V, S, R, M, A, P = (Kind.ENGINE, Kind.SERVER, Kind.SAMPLING, Kind.REQUEST, Kind.METHOD,
                       Kind.ARGUMENT, Kind.IMPORT)

_ENGINE = [
    *_supported(E, """model tokenizer revision kv_cache_dtype seed tensor_parallel_size
        data_parallel_size gpu_memory_utilization kv_cache_memory_bytes enforce_eager
        num_gpu_blocks_override swap_space chat_template preemption_mode async_scheduling
        data_parallel_address tool_call_parser"""),
    Entry(E, "reasoning_parser", Status.SUPPORTED, neutral=("",)),
    *[Entry(E, name, Status.SUPPORTED, neutral=(None,)) for name in
      ("block_size", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs")],
    Entry(E, "max_model_len", Status.SUPPORTED, neutral=(-1, "auto"),
          note="-1 and 'auto' are the default: the model's window, or what fits in memory"),
    Entry(E, "generation_config", Status.SUPPORTED, meaning=(("vllm", "octavo"),),
          note="'vllm' is 'octavo' here: the built-in defaults"),
    Entry(E, "dtype", Status.SUPPORTED,
          meaning=(("half", "float16"), ("float", "float32"),
                   ("bf16", "bfloat16")),
          note="a CPU computes float16 in float32, which holds each of its values"),
    Entry(E, "quantization", Status.SUPPORTED,
          meaning=(("awq_marlin", "awq"), ("gptq_marlin", "gptq")),
          note="'awq', 'gptq' (and '..._marlin') and 'gguf' for checkpoints that are stored so; "
               "'int8' and 'int4' quantize any model; 'w8a8' and 'w4a8' activations, too, on a "
               "CPU"),
    Entry(E, "device", Status.SUPPORTED,
          note="'auto', 'cpu', 'cuda', 'cuda:1'"),
    Entry(E, "scheduling_policy", Status.RENAMED, "scheduler", neutral=("fcfs",),
          note="'fcfs' is the default, 'priority' the policy of that name"),
    Entry(E, "attention_backend", Status.RENAMED, "attention_impl"),
    Entry(E, "device_memory_utilization", Status.RENAMED, "gpu_memory_utilization"),
    Entry(E, "use_tqdm_on_load", Status.RENAMED, "load_progress"),
    # Asked for in many scripts, and done anyway.
    *_no_effect(E, "prompts are always computed in chunks", enable_chunked_prefill=True),
    *_no_effect(E, "no code of a checkpoint is ever run, so that nothing has to be trusted",
                trust_remote_code=(True, False)),
    *_no_effect(E, "the tokenizers library reads every tokenizer", tokenizer_mode=("auto", "hf")),
    *_no_effect(E, "the files themselves say what they are", load_format=("auto", "hf"),
                config_format=("auto", "hf")),
    *_no_effect(E, "there is one implementation of each architecture", model_impl=("auto", "vllm")),
    *_no_effect(E, "text is generated, and nothing else", runner=("auto", "generate"),
                convert=("auto", "none"), task=("auto", "generate")),
    Entry(E, "distributed_executor_backend", Status.SUPPORTED, neutral=(None,),
          note="'mp' is this machine, 'uni' a single process"),
    *_no_effect(E, "there is one kind of worker", worker_cls="auto"),
    *_no_effect(E, "distributed_executor_backend is for ranks and engines alike",
                data_parallel_backend="mp"),
    Entry(E, "data_parallel_rpc_port", Status.SUPPORTED, neutral=(None,)),
    *_no_effect(E, "steps are captured at every level; enforce_eager turns that off",
                optimization_level=(2, 1, 3)),
    *_no_effect(E, "a request may ask for up to 20", max_logprobs=20),
    *_no_effect(E, "log-probabilities are taken before penalties and temperature",
                logprobs_mode="raw_logprobs"),
    *_any_value(E, "statistics cost nothing and are always kept (llm.engine.stats)",
                "disable_log_stats"),
    *_any_value(E, "how ranks communicate follows from the device",
                "disable_custom_all_reduce disable_nccl_for_dp_synchronization"),
    *_any_value(E, "there is no cascade attention", "disable_cascade_attn"),
    *_no_effect(E, "requests are not logged unless log_requests is set", disable_log_requests=True),
    *_any_value(E, "there is one block manager, and one way to handle outputs",
                "use_v2_block_manager disable_async_output_proc disable_frontend_multiprocessing"),
    # vLLM's defaults are accepted; other values are refused.
    *_refused(E, _LORA, enable_lora=False, max_loras=1, max_lora_rank=16, default_mm_loras=None,
              fully_sharded_loras=False, max_cpu_loras=None, lora_dtype="auto",
              lora_target_modules=[], enable_tower_connector_lora=False,
              specialize_active_lora=False, enable_mixed_moe_lora_format=False,
              enable_moe_shared_loras=False, max_lora_cls_labels=None, lora_extra_vocab_size=256),
    *_refused(E, _SPECULATIVE, speculative_config={}, spec_method=None, spec_model=None,
              spec_tokens=None, speculative_model=None, num_speculative_tokens=None,
              per_request_spec_decode_metrics="none"),
    *_refused(E, _MEDIA, allowed_local_media_path="", allowed_media_domains=[],
              limit_mm_per_prompt={}, enable_mm_embeds=False, interleave_mm_strings=False,
              media_io_kwargs={}, mm_processor_kwargs={}, mm_processor_cache_gb=(4, 0),
              mm_processor_cache_type="lru", mm_hasher_algorithm="blake3",
              mm_shm_cache_max_object_size_mb=128, mm_encoder_only=False,
              mm_encoder_tp_mode="weights", mm_encoder_attn_backend=None,
              mm_encoder_attn_dtype=None, mm_encoder_fp8_scale_path=None,
              mm_encoder_fp8_scale_save_path=None, mm_encoder_fp8_scale_save_margin=1.5,
              video_pruning_rate=None, video_pruning_method="evs", mm_tensor_ipc="direct_rpc",
              mm_processor_device="auto", mm_ipc_gpu_memory_gb=0, mm_device_do_normalize=True,
              enable_mm_processor_stats=False, io_processor_plugin=None, renderer_num_workers=1),
    *_any_value(E, "only text is processed", "language_model_only skip_mm_profiling "
                "disable_chunked_mm_input disable_mm_preprocessor_cache"),
    *_refused(E, _POOLING, pooler_config=None),
    *_refused(E, Why(_BACKEND.reason, "give its options with a request's structured_outputs"),
              structured_outputs_config={}, aux_output_config={}),
    *_no_effect(E, _BACKEND.reason, guided_decoding_backend=("auto", "guidance")),
    *_refused(E, _PARSERS, reasoning_parser_plugin=None),
    *_refused(E, Why("the markers of reasoning follow from its format", "use reasoning_parser"),
              reasoning_config=None),
    *_refused(E, _PROCESSORS, logits_processors=[]),
    *_refused(E, _PARALLEL, pipeline_parallel_size=1,
              prefill_context_parallel_size=1, decode_context_parallel_size=1,
              master_addr="127.0.0.1", master_port=29501, nnodes=1, node_rank=0,
              distributed_timeout_seconds=None, cpu_distributed_timeout_seconds=None,
              dcp_comm_backend=None, dcp_q_replicate=False, dcp_kv_cache_interleave_size=1,
              cp_kv_cache_interleave_size=None, enable_hc_sp=False,
              enable_batch_sharded_sampling=False,
              enable_shm_tensor_arena=False, max_parallel_loading_workers=None,
              _api_process_count=1, _api_process_rank=0, aggregate_engine_logging=False),
    *_refused(E, _ENGINES, data_parallel_rank=None, data_parallel_start_rank=None,
              data_parallel_size_local=None, data_parallel_hybrid_lb=False,
              data_parallel_external_lb=False, data_parallel_multi_port_external_lb=False),
    *_any_value(E, "engines of a server share no steps", "dp_sync_interval"),
    *_refused(E, Why("the process uses the processors it may run on",
                     "set OMP_NUM_THREADS, taskset or numactl"),
              numa_bind=False, numa_bind_nodes=[], numa_bind_cpus=[]),
    *_refused(E, Why("one device computes", "name it with device"),
              device_ids=[]),
    *_refused(E, _MOE, enable_expert_parallel=False, enable_ep_weight_filter=False,
              moe_backend="auto", all2all_backend="allgather_reducescatter",
              enable_elastic_ep=False, elastic_ep_max_dp_size=None, enable_dbo=False,
              ubatch_size=0, dbo_decode_token_threshold=32, dbo_prefill_token_threshold=512,
              eplb_config={}, enable_eplb=False, expert_placement_strategy="linear",
              enable_return_routed_experts=False),
    *_refused(E, _RAY, ray_workers_use_nsight=False, worker_use_ray=False),
    *_refused(E, _GPU, linear_backend="auto", sparse_indexer_topk_backend="auto",
              use_fp64_gumbel=False, attention_config={}, kernel_config={},
              enable_flashinfer_autotune=False, monokernel=False, ir_op_priority=None,
              jit_monitor_mode="warn", jit_monitor_verbose=False, gdn_prefill_backend=None,
              kda_prefill_backend=None, kda_decode_backend=None,
              enable_layerwise_nvtx_tracing=False, enable_cumem_allocator=False,
              enable_nccl_comm_suspend=False, kv_sharing_fast_prefill=False,
              swa_bounded_replay=True, cudagraph_metrics=False),
    *_refused(E, _COMPILE, compilation_config={}, performance_mode="balanced",
              max_seq_len_to_capture=None, max_context_len_to_capture=None,
              enable_mfu_metrics=False),
    *_refused(E, Why("rotary embeddings are as the checkpoint's config says",
                     "change its config.json"), rope_scaling={}, rope_theta=None),
    *_refused(E, Why("the sizes of captured steps are one text", "use cuda_graph_sizes='1,2,4'"),
              cudagraph_capture_sizes=[], max_cudagraph_capture_size=None),
    *_refused(E, _MAMBA, mamba_config={}, mamba_backend="triton", mamba_cache_dtype="auto",
              mamba_ssm_cache_dtype="auto", mamba_block_size=None, mamba_cache_mode=None,
              mamba_ssu_algorithm=None, enable_mamba_cache_stochastic_rounding=False,
              mamba_cache_philox_rounds=0, enable_mamba_shared_prefix_checkpoint=False,
              replayssm_buffer_len=16, use_replayssm=False),
    *_refused(E, _OFFLOAD, cpu_offload_gb=0, cpu_offload_params=[], offload_backend="auto",
              offload_group_size=0, offload_num_in_group=1, offload_prefetch_step=1,
              offload_params=[]),
    *_refused(E, _TRANSFER, kv_transfer_config=None, kv_events_config=None,
              ec_transfer_config=None, ec_manager_config={}, kv_offloading_size=None,
              kv_offloading_backend="native"),
    *_refused(E, _RL, weight_transfer_config=None, model_weights=""),
    *_refused(E, _SLEEP, enable_sleep_mode=False, sleep_mode_backend="cumem",
              sleep_mode_offload_cudagraph=False, sleep_preserve_parameter_names=[]),
    *_refused(E, _PROFILER, profiler_config=None),
    *_refused(E, _TRACE, otlp_traces_endpoint=None, collect_detailed_traces=[],
              enable_trace_replay=False),
    *_refused(E, _METRICS, show_hidden_metrics_for_version=None, kv_cache_metrics=False,
              kv_cache_metrics_sample=0.01, custom_histogram_buckets=None),
    *_refused(E, _LOGGING, logging_config=None, log_level=None, log_config_file=None,
              enable_logging_iteration_details=False),
    *_refused(E, _CUSTOM, scheduler_cls=None, worker_extension_cls="", model_class_overrides={},
              additional_config={}),
    *_refused(E, _CONFIG_JSON, hf_overrides={}),
    *_refused(E, _LOADING, safetensors_load_strategy=None, safetensors_prefetch_num_threads=8,
              safetensors_prefetch_block_size=16777216, model_loader_extra_config={},
              ignore_patterns=["original/**/*"], pt_load_map_location="cpu"),
    *_refused(E, _STORED, download_dir=None, hf_token=("", True), code_revision=None),
    *_refused(E, _TOKENIZER, skip_tokenizer_init=False, hf_config_path=None),
    *_refused(E, Why("the tokenizer comes from the same revision as the model",
                     "give tokenizer a folder with the other one"), tokenizer_revision=None),
    *_refused(E, _PROMPTS, enable_prompt_embeds=False),
    *_refused(E, _QUEUE, max_num_queued_reqs=None, max_num_queued_tokens=None),
    *_refused(E, Why("one option bounds the running requests", "use max_num_seqs"),
              max_num_active_seqs=None),
    *_refused(E, Why("one option bounds the tokens of a step", "use max_num_batched_tokens"),
              max_num_scheduled_tokens=None),
    *_refused(E, Why("the policy decides on how prompts are cut",
                     "use scheduler='slo,p99_itl_ms=...' to bound the time between tokens"),
              long_prefill_token_threshold=0, long_prefill_token_threshold_adaptive=False,
              prefill_schedule_interval=1, max_num_partial_prefills=1,
              max_long_partial_prefills=1, scheduler_reserve_full_isl=True),
    *_refused(E, Why("no blocks are held back: requests are preempted when the cache is full",
                     "leave it out"), watermark=0),
    *_refused(E, _REMOVED, num_scheduler_steps=1, multi_step_stream_outputs=True,
              num_lookahead_slots=0, scheduler_delay_factor=0, max_paddings=None,
              tokenizer_pool_size=0, enable_reasoning=False, enable_prompt_adapter=False),
    *_refused(E, Why("prefixes are identified by BLAKE2b, as good as SHA-256", "leave it out"),
              prefix_caching_hash_algo="sha256", prefix_cache_retention_interval=0,
              prefix_match_unit=None),
    *_refused(E, Why("a model's windows are part of it", "leave it out"),
              disable_sliding_window=False, disable_hybrid_kv_cache_manager=False),
    *_refused(E, Why("all layers have the same type of KV", "use kv_cache_dtype"),
              kv_cache_dtype_skip_layers=[], calculate_kv_scales=False),
    *_refused(E, Why("a checkpoint says itself how it is quantized", "use quantization"),
              quantization_config=None, allow_deprecated_quantization=False),
    *_refused(E, Why("sampling defaults are the model's or the built-in ones (generation_config)",
                     "give the parameters with the requests"), override_generation_config={}),
    *_refused(E, Why("outputs come at every step", "leave it out"), stream_interval=1),
    *_refused(E, Why("it is an option of the server", "use octavo serve"),
              served_model_name=None, enable_log_requests=False, shutdown_timeout=0,
              tokens_only=False),
    *_refused(E, _GUARD, watchdog_config=None, fault_tolerance_config=None,
              enable_fault_tolerance=False),
    *_refused(E, Why("the environment changes no result, and is not validated", "leave it out"),
              fail_on_environ_validation=False),
    *_refused(E, _DIFFUSION, diffusion_config=None),
    *_refused(E, _WATERMARK, watermark_config=None),
    *_refused(E, _EXPERIMENTAL, engram_config=None, return_sampling_mask=False),
]

_SERVER = [
    *_supported(V, """model_tag config host port uds api_key served_model_name root_path
        allowed_origins allowed_methods allowed_headers allow_credentials ssl_keyfile ssl_certfile
        ssl_ca_certs ssl_cert_reqs log_level uvicorn_log_level disable_log_stats"""),
    Entry(V, "shutdown_timeout", Status.RENAMED, "drain_timeout"),
    Entry(V, "enable_log_requests", Status.RENAMED, "log_requests"),
    *_any_value(V, "there is no log of accesses beside the one of requests",
                "disable_uvicorn_access_log"),
    *_no_effect(V, "usage always has prompt_tokens_details.cached_tokens",
                enable_prompt_tokens_details=(False, True)),
    *_no_effect(V, "every answer has the header X-Request-Id",
                enable_request_id_headers=(False, True)),
    *_no_effect(V, "text parts of a message are joined",
                chat_template_content_format=("auto", "string")),
    *_no_effect(V, "the assistant answers", response_role="assistant"),
    *_refused(V, _LORA, lora_modules=[]),
    *_supported(V, "exclude_tools_when_tool_choice_none"),
    *_no_effect(V, "tools may always be chosen freely", enable_auto_tool_choice=(False, True)),
    *_refused(V, _PARSERS, tool_parser_plugin=""),
    *_refused(V, Why("the server runs no tools", "run them in the client"), tool_server=None),
    *_refused(V, Why("names and arguments of calls are always held to the tools",
                     "strict: false at a tool lets its arguments be any JSON object"),
              tool_strict_level=None),
    *_refused(V, Why("efforts are handed to the chat template as they are",
                     "use chat_template_kwargs, or a template of your own"),
              reasoning_effort_map=None, cohere_is_reasoning_model=True,
              anthropic_disabled_thinking_effort="auto"),
    *_refused(V, Why("only OpenAI's and Anthropic's interfaces are served",
                     "use /v1/chat/completions"),
              cohere_format="cmd4", grpc=False, grpc_port=None, enable_scale_out=False,
              enable_flash_late_interaction=True, tokens_only=False),
    *_refused(V, _MEDIA, trust_request_mm_kwargs=False),
    *_refused(V, Why("templates in requests are not accepted", "use --chat-template"),
              trust_request_chat_template=False),
    *_refused(V, Why("they belong to a request", "send chat_template_kwargs with it"),
              default_chat_template_kwargs={}),
    *_refused(V, Why("it belongs to a request", "send return_tokens_as_token_ids with it"),
              return_tokens_as_token_ids=False),
    *_refused(V, Why("it belongs to a request", "send stream_options with it"),
              enable_force_include_usage=False),
    *_refused(V, Why("the log and /metrics have the times of requests", "read them there"),
              enable_per_request_metrics=False),
    *_no_effect(V, "GET /load always answers", enable_server_load_tracking=(False, True)),
    *_no_effect(V, "/docs loads nothing from elsewhere", enable_offline_docs=(False, True)),
    *_refused(V, Why("streams are sent token by token, and nothing between them", "leave it out"),
              sse_keep_alive_interval=0),
    *_refused(V, Why("/tokenize and /detokenize are there, and no more", "leave it out"),
              enable_tokenizer_info_endpoint=False),
    *_refused(V, Why("prompts and answers are logged together", "use --log-requests"),
              enable_log_outputs=False, enable_log_deltas=True, max_log_len=None),
    *_refused(V, _LOGGING, log_error_stack=False, disable_access_log_for_endpoints=None),
    *_refused(V, Why("answers name no configuration", "leave it out"), fingerprint_mode="full",
              fingerprint_value=None),
    *_refused(V, _ENGINES, data_parallel_supervisor_port=9256, dp_supervisor_probe_interval_s=5,
              dp_supervisor_probe_timeout_s=5, dp_supervisor_probe_failure_threshold=3,
              headless=False),
    *_refused(V, Why("one web process serves all engines of a server",
                     "use several servers behind a load balancer"), api_server_count=1),
    *_refused(V, Why("certificates are read at the start", "start again with the new ones"),
              enable_ssl_refresh=False),
    *_refused(V, Why("the TLS library's own choice of ciphers is used", "leave it out"),
              ssl_ciphers=None),
    *_refused(V, _MIDDLEWARE, middleware=[]),
    *_refused(V, Why("/docs is part of the server", "put a proxy in front"),
              disable_fastapi_docs=False),
    *_refused(V, Why("the sizes of a request's head are fixed (docs/server.md)", "leave it out"),
              h11_max_incomplete_event_size=4194304, h11_max_header_count=256),
]

_SAMPLING = [
    *_supported(S, """n presence_penalty frequency_penalty repetition_penalty temperature top_p
        top_k min_p seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs
        prompt_logprobs detokenize skip_special_tokens include_stop_str_in_output output_kind
        logit_bias allowed_token_ids bad_words structured_outputs thinking_token_budget"""),
    *_no_effect(S, "special tokens are written as they are spelled, without spaces of their own",
                spaces_between_special_tokens=(True,)),
    *_any_value(S, "a value is frozen, so that it is never copied", "skip_clone"),
    *_refused(S, Why("n is the number of answers, and none is left out", "use n"), best_of=1),
    *_refused(S, Why(_FORM, "use structured_outputs=StructuredOutputsParams(...)"),
              guided_decoding=None),
    *_replaced(S),
    *_refused(S, _PROCESSORS, logits_processors=[], extra_args={}),
    *_refused(S, _BEAM, use_beam_search=False, length_penalty=1, early_stopping=False),
    *_refused(S, _TRUNCATE, truncate_prompt_tokens=None),
    *_refused(S, _IDS, logprob_token_ids=[], prompt_logprob_token_ids=[], prompt_logprob_start=0),
    *_refused(S, Why("log-probabilities come as one dict for each position", "leave it out"),
              flat_logprobs=False),
    *_refused(S, Why("outputs come at every step", "leave it out"), stream_interval=1),
    *_refused(S, Why("cached prefixes never change an answer", "leave it out"),
              skip_reading_prefix_cache=False),
    *_refused(S, _REPETITION, repetition_detection=None),
    *_refused(S, _WATERMARK, watermarking=False),
    *_refused(S, Why("it is internal to vLLM", "leave it out"), output_text_buffer_length=0),
    *_refused(S, _EXPERIMENTAL, routed_experts_prompt_start=0, trace_decode_token_ids=[]),
]

_REQUEST = [
    *_supported(R, """model prompt messages n temperature top_p top_k min_p presence_penalty
        frequency_penalty repetition_penalty seed stop stop_token_ids include_stop_str_in_output
        ignore_eos min_tokens max_tokens max_completion_tokens logprobs top_logprobs prompt_logprobs
        logit_bias allowed_token_ids bad_words skip_special_tokens stream stream_options priority
        request_id cache_salt response_format structured_outputs return_token_ids
        return_tokens_as_token_ids echo add_special_tokens tools tool_choice parallel_tool_calls
        reasoning_effort include_reasoning thinking_token_budget
        add_generation_prompt continue_final_message chat_template_kwargs tokens
        return_token_strs"""),
    *[Entry(R, name, Status.SUPPORTED, note="of /v1/responses") for name in
      ("input", "instructions", "max_output_tokens", "reasoning", "text", "include", "truncation")],
    *_refused(R, Why("the server keeps no responses", "send all items in input"),
              previous_response_id=None, previous_input_messages=None),
    *_refused(R, Why("the server keeps no responses", "use stream"), background=False),
    *_refused(R, Why("items are the answer's messages", "leave it out"),
              enable_response_messages=False),
    *_any_value(R, "bookkeeping of the caller's", "user"),
    *_no_effect(R, "special tokens are written as they are spelled, as fast tokenizers do either "
                "way", spaces_between_special_tokens=(True, False)),
    *_refused(R, Why("n is the number of answers, and none is left out", "use n"), best_of=1),
    *_refused(R, _BEAM, use_beam_search=False, length_penalty=1, early_stopping=False),
    *_replaced(R),
    *_refused(R, _TRUNCATE, truncate_prompt_tokens=None, truncation_side=None),
    *_refused(R, _IDS, logprob_token_ids=[]),
    *_refused(R, _PROMPTS, prompt_embeds=[]),
    *_refused(R, Why("models complete a prompt, and do not fill gaps", "leave it out"), suffix=""),
    *_refused(R, Why("templates in requests are not accepted", "start with --chat-template"),
              chat_template=None),
    *_refused(R, Why("documents are not shown to the model", "write them into a message"),
              documents=[]),
    *_refused(R, _MEDIA, media_io_kwargs={}, mm_processor_kwargs={}, mm_payload=None,
              return_mm_kwargs=False),
    *_refused(R, _SESSION, session_id=None),
    *_refused(R, _TRANSFER, kv_transfer_params={}, ec_transfer_params={}),
    *_refused(R, _PROCESSORS, vllm_xargs={}),
    *_refused(R, _REPETITION, repetition_detection=None),
    *_refused(R, Why("outputs come at every step", "leave it out"), stream_interval=1),
    *_refused(R, _WATERMARK, watermarking=False),
    *_refused(R, Why("/tokenize with the messages gives it", "leave it out"),
              return_prompt_text=False, return_token_offsets=False),
    *_refused(R, _RL, return_weight_versions=False),
    *_refused(R, _EXPERIMENTAL, routed_experts_prompt_start=0),
]

_NO_QUEUE = Why("LLM runs what it is given and returns the answers",
                "use LLMEngine or AsyncLLM for requests that come one by one")

_METHODS = [
    *_supported(M, "generate chat get_tokenizer get_default_sampling_params reset_prefix_cache "
                "from_engine_args"),
    Entry(M, "llm_engine", Status.RENAMED, "engine"),
    *_refused(M, _BEAM, beam_search=None),
    *_refused(M, _POOLING, embed=None, encode=None, classify=None, score=None, reward=None),
    *_refused(M, _NO_QUEUE, enqueue=None, enqueue_chat=None, wait_for_completion=None),
    *_refused(M, Why("there are no worker processes", "llm.engine is in this process"),
              collective_rpc=None, apply_model=None, get_world_size=None),
    *_refused(M, _SLEEP, sleep=None, wake_up=None, release_kv_cache_memory=None),
    *_refused(M, _PROFILER, start_profile=None, stop_profile=None),
    *_refused(M, Why("llm.engine.stats has the figures", "octavo serve has them on /metrics"),
              get_metrics=None),
    *_refused(M, Why("llm.config has the options, llm.engine.limits what came of them"),
              model_config=None, vllm_config=None),
    *_refused(M, Why("the tokenizer cannot be exchanged", "use LLM(tokenizer=...)"),
              set_tokenizer=None),
    *_refused(M, _MEDIA, reset_mm_cache=None),
    *_refused(M, _RL, init_weight_transfer_engine=None, shutdown_weight_transfer_engine=None,
              start_weight_update=None, start_draft_weight_update=None, update_weights=None,
              finish_weight_update=None, update_weight_version=None, get_weight_version=None),
]

Y = Kind.ASYNC_METHOD
_ASYNC_METHODS = [
    *_supported(Y, """generate abort get_tokenizer reset_prefix_cache check_health do_log_stats
        shutdown is_running is_stopped errored dead_error from_engine_args"""),
    *_refused(Y, _LORA, add_lora=None, remove_lora=None, list_loras=None, pin_lora=None),
    *_refused(Y, _POOLING, encode=None),
    *_refused(Y, _SLEEP, sleep=None, wake_up=None, is_sleeping=None, pause_generation=None,
              resume_generation=None, is_paused=None, release_kv_cache_memory=None,
              checkpoint_prepare=None, checkpoint_restore=None),
    *_refused(Y, _PROFILER, start_profile=None, stop_profile=None),
    *_refused(Y, _TRACE, is_tracing_enabled=None),
    *_refused(Y, _MEDIA, reset_mm_cache=None, reset_encoder_cache=None),
    *_refused(Y, Why("there are no worker processes"), collective_rpc=None),
    *_refused(Y, _PARALLEL, scale_elastic_ep=None, get_external_elastic_ep_status=None,
              handle_fault=None, get_status=None),
    *_refused(Y, _TRANSFER, notify_kv_transfer_request_rejected=None, get_kv_event_sources=None),
    *_refused(Y, _RL, init_weight_transfer_engine=None, shutdown_weight_transfer_engine=None,
              start_weight_update=None, start_draft_weight_update=None, update_weights=None,
              finish_weight_update=None, update_weight_version=None, get_weight_version=None,
              compute_weight_checksums=None),
    *_refused(Y, Why("text is generated, and nothing else", "use generate"),
              get_supported_tasks=None, add_request=None),
    *_refused(Y, Why("stats has the figures", "use stats.running and stats.waiting"),
              get_num_unfinished_requests=None, get_num_queued_tokens=None, check_admission=None,
              wait_for_requests_to_drain=None, should_keep_api_server_alive=None),
    *_refused(Y, Why("there is one configuration", "use from_engine_args"), from_vllm_config=None),
    *_refused(Y, Why("the tokenizer is asked for", "use await get_tokenizer()"), tokenizer=None),
]

_ARGUMENTS = [
    *_supported(A, """prompts sampling_params use_tqdm priority messages chat_template
        add_generation_prompt continue_final_message tools chat_template_kwargs"""),
    *_no_effect(A, "text parts of a message are joined",
                chat_template_content_format=("auto", "string")),
    *_refused(A, _LORA, lora_request=None),
    *_refused(A, _TRUNCATE, tokenization_kwargs={}),
    *_refused(A, _MEDIA, mm_processor_kwargs={}),
    *_refused(A, Why(_FORM, "use SamplingParams(structured_outputs=...)"),
              guided_options_request=None),
    *_refused(A, Why("vLLM has dropped it", "give the ids as prompts, or as "
                     "{'prompt_token_ids': ids}"), prompt_token_ids=None),
    *_refused(A, _PROMPTS, prompt_embeds=None),
    *_refused(A, Why("blocks that running requests hold stay", "call it when nothing runs"),
              reset_running_requests=False, reset_connector=False),
    *_refused(A, _TRACE, trace_headers=None),
    *_refused(A, Why("the engine is chosen by cached prefix and load", "leave it out"),
              data_parallel_rank=None),
    *_refused(A, _REASONING, reasoning_ended=False, reasoning_parser_kwargs={}),
]

_HELPERS = Why("vLLM's helper functions are its own", "use Python's or write it")

K = Kind.PROMPT
_PROMPT_KEYS = [
    *_supported(K, "prompt prompt_token_ids cache_salt"),
    *_refused(K, _MEDIA, multi_modal_data={}, multi_modal_uuids={}, mm_processor_kwargs={},
              media_io_kwargs={}),
    *_refused(K, _PROMPTS, prompt_embeds=None, prompt_is_token_ids=None, encoder_prompt=None,
              decoder_prompt=None, data=None, data_format=None),
    *_refused(K, Why("tokens have no types or offsets here", "leave it out"), token_type_ids=[],
              prompt_token_offsets=None),
]

# Dotted names below `vllm`. A refused one stands for all that is below it.
_IMPORTS = [
    *_supported(P, """LLM SamplingParams RequestOutput CompletionOutput EngineArgs AsyncEngineArgs
        AsyncLLM AsyncLLMEngine TextPrompt TokensPrompt PromptType __version__
        sampling_params.SamplingParams sampling_params.RequestOutputKind
        sampling_params.StructuredOutputsParams
        outputs.RequestOutput outputs.CompletionOutput logprobs.Logprob sequence.Logprob
        inputs.TextPrompt inputs.TokensPrompt inputs.PromptType
        engine.arg_utils.EngineArgs engine.arg_utils.AsyncEngineArgs
        LLMEngine engine.llm_engine.LLMEngine v1.engine.llm_engine.LLMEngine
        engine.async_llm_engine.AsyncLLMEngine v1.engine.async_llm.AsyncLLM entrypoints.llm.LLM
        utils.FlexibleArgumentParser utils.argparse_utils.FlexibleArgumentParser utils.random_uuid
        logger.init_logger version.__version__"""),
    *_refused(P, _BEAM, **{"BeamSearchParams": None, "sampling_params.BeamSearchParams": None}),
    *_refused(P, Why(_FORM, "use sampling_params.StructuredOutputsParams"),
              **{"sampling_params.GuidedDecodingParams": None}),
    *_refused(P, _REPETITION, **{"sampling_params.RepetitionDetectionParams": None}),
    *_refused(P, _POOLING, pooling_params=None, PoolingParams=None),
    *[entry for task in ("Pooling", "Embedding", "Classification", "Scoring")
      for name in (f"{task}Output", f"{task}RequestOutput")
      for entry in _refused(P, _POOLING, **{name: None, f"outputs.{name}": None})],
    *_refused(P, _LORA, lora=None),
    *_refused(P, _MEDIA, multimodal=None, assets=None),
    *_refused(P, _PROMPTS, **{f"inputs.{name}": None for name in (
        "EmbedsPrompt", "DataPrompt", "ExplicitEncoderDecoderPrompt", "SingletonPrompt")}),
    *_refused(P, _CUSTOM, ModelRegistry=None, model_executor=None, platforms=None, plugins=None,
              forward_context=None, ir=None),
    *_refused(P, Why("there is one configuration, octavo.config.EngineConfig",
                     "give its fields to LLM"),
              VllmConfig=None, **{f"config.{name}": None for name in (
        "VllmConfig", "ModelConfig", "CompilationConfig", "CompilationMode", "CUDAGraphMode",
        "PassConfig", "KernelConfig", "AttentionConfig", "compilation", "CacheConfig",
        "SchedulerConfig", "ParallelConfig", "LoadConfig", "DeviceConfig")}),
    *_refused(P, _TRANSFER, **{"config.KVTransferConfig": None, "config.kv_transfer": None}),
    *_refused(P, _RL, **{"config.WeightTransferConfig": None}),
    *_refused(P, _POOLING, **{"config.PoolerConfig": None}),
    *_refused(P, _PROFILER, **{"config.ProfilerConfig": None}),
    *_refused(P, _REASONING, reasoning=None, **{"config.ReasoningConfig": None}),
    *_refused(P, _MEDIA, **{"config.SpeechToTextConfig": None, "config.speech_to_text": None}),
    *_refused(P, _RAY, initialize_ray_cluster=None, ray=None),
    *_refused(P, _PARALLEL, distributed=None),
    *_refused(P, _PROCESSORS, logits_process=None, **{"v1.sample": None, "v1.worker": None}),
    *_refused(P, Why("llm.engine.stats has the figures", "octavo serve has them on /metrics"),
              **{"v1.metrics": None}),
    *_refused(P, _WATERMARK, **{"v1.watermarking": None}),
    *_refused(P, Why("the parts of vLLM's engine are its own",
                     "docs/architecture.md shows those of Octavo"), v1=None),
    *_refused(P, _PARSERS, tool_parsers=None),
    *_refused(P, _TRACE, tracing=None),
    *_refused(P, Why("LLM(...).get_tokenizer() gives the tokenizer of a model"),
              transformers_utils=None, tokenizers=None, renderers=None),
    *_refused(P, Why("the server is started by a command", "use octavo serve"), entrypoints=None),
    *_refused(P, Why("benchmarks are run by a command", "use octavo bench"), benchmarks=None),
    *_refused(P, Why("nothing counts its users", "leave it out"), usage=None),
    *_refused(P, _HELPERS, utils=None),
    *_refused(P, Why("Octavo has variables of its own", "docs/deploy.md lists them"), envs=None),
]

# fmt: on
# vLLM's short flags.
SHORT_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "-q": "quantization",
        "-tp": "tensor_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-dp": "data_parallel_size",
        "-dcp": "decode_context_parallel_size",
        "-pcp": "prefill_context_parallel_size",
        "-dpn": "data_parallel_rank",
        "-dpr": "data_parallel_start_rank",
        "-dpl": "data_parallel_size_local",
        "-dpa": "data_parallel_address",
        "-dpp": "data_parallel_rpc_port",
        "-dpb": "data_parallel_backend",
        "-dph": "data_parallel_hybrid_lb",
        "-dpe": "data_parallel_external_lb",
        "-dpm": "data_parallel_multi_port_external_lb",
        "-ep": "enable_expert_parallel",
        "-sc": "speculative_config",
        "-dc": "diffusion_config",
        "-cc": "compilation_config",
        "-ac": "attention_config",
        "-O": "optimization_level",
        "-asc": "api_server_count",
    }
)  # fmt: skip

ENTRIES: tuple[Entry, ...] = (
    *_ENGINE,
    *_SERVER,
    *_SAMPLING,
    *_REQUEST,
    *_METHODS,
    *_ASYNC_METHODS,
    *_ARGUMENTS,
    *_PROMPT_KEYS,
    *_IMPORTS,
)
_BY_NAME: Mapping[tuple[Kind, str], Entry] = MappingProxyType(
    {(entry.kind, entry.name): entry for entry in ENTRIES}
)


def entries(kind: Kind) -> list[Entry]:
    """The names of one kind, in the table's order."""
    return [entry for entry in ENTRIES if entry.kind is kind]


def names(kind: Kind) -> list[str]:
    return [entry.name for entry in entries(kind)]


def find(kind: Kind, name: str) -> Entry | None:
    """The entry of a name, if vLLM has it."""
    return _BY_NAME.get((kind, name))


def missing(kind: Kind, owner: object, name: str) -> str:
    """What an AttributeError says of `owner.name`: why, where it is a name of vLLM's."""
    entry = find(kind, name)
    reason = f": {entry.refusal()}" if entry is not None and entry.reason else ""
    return f"{type(owner).__name__} has no {name!r}{reason}"


def refused_import(path: str) -> str | None:
    """Why `path` (below `octavo`) cannot be imported, if it is a name of vLLM's that is refused."""
    parts = path.split(".")
    if find(Kind.IMPORT, path) is None and parts[-1].startswith("__"):
        return None
    for count in range(len(parts), 0, -1):
        entry = find(Kind.IMPORT, ".".join(parts[:count]))
        if entry is not None:
            if entry.status is not Status.REFUSED:
                return None
            return f"vllm.{path} has no counterpart in octavo: {entry.refusal()}"
    return None
