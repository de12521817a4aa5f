"""The arguments of published engine versions, for :mod:`llmgw.settings.engine_flags`.

Read out of the parsers of the versions named in ``VERSIONS``. A group is headed by the first and the last version
that have its arguments. ``=`` stands for one value, ``+`` for one or more, ``*`` for any number, ``?`` for one or none.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        "0.11.2",
        "0.16.0",
        "0.20.2",
        "0.24.0",
        "0.27.1",
        "0.28.0",
        "0.29.0",
        "0.30.0",
        "0.31.0",
        "0.32.0",
        "0.33.0",
    ),
    "sglang": (
        "0.4.6.post5",
        "0.5.2",
        "0.5.6.post2",
        "0.5.9",
        "0.5.12",
        "0.5.17",
        "0.5.18",
        "0.5.19",
        "0.5.20",
        "0.5.21",
        "0.5.22",
        "0.5.23",
    ),
    "llamacpp": ("b11434",),
}
"""The versions that were read, oldest first."""

TABLES: Mapping[str, Mapping[tuple[str, str], str]] = {
    "vllm": {
        ("0.11.2", "0.11.2"): """
--cuda-graph-sizes+ --disable-mm-preprocessor-cache --enable-multimodal-encoder-data-parallel
--eplb-log-balancedness --eplb-step-interval= --eplb-window-size= --guided-decoding-backend=
--guided-decoding-disable-additional-properties= --guided-decoding-disable-any-whitespace=
--guided-decoding-disable-fallback= --lora-extra-vocab-size= --no-eplb-log-balancedness --num-lookahead-slots=
--num-redundant-experts= --override-pooler-config= --task= -O=
""",
        ("0.11.2", "0.16.0"): """
--disable-frontend-multiprocessing --disable-log-requests --logits-processor-pattern=
--no-disable-frontend-multiprocessing --no-disable-log-requests --swap-space=
""",
        ("0.11.2", "0.24.0"): """
--max-long-partial-prefills= --max-num-partial-prefills=
""",
        ("0.11.2", "0.27.1"): """
--calculate-kv-scales --no-calculate-kv-scales --override-attention-dtype=
""",
        ("0.11.2", "0.33.0"): """
--additional-config= --aggregate-engine-logging --all2all-backend= --allow-credentials --allowed-headers=
--allowed-local-media-path= --allowed-media-domains+ --allowed-methods= --allowed-origins= --api-key+
--api-server-count= --async-scheduling --block-size= --chat-template-content-format= --chat-template=
--code-revision= --collect-detailed-traces+ --compilation-config= --config-format= --config= --convert=
--cpu-offload-gb= --cudagraph-capture-sizes+ --data-parallel-address= --data-parallel-backend=
--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-rank= --data-parallel-rpc-port=
--data-parallel-size-local= --data-parallel-size= --data-parallel-start-rank= --dbo-decode-token-threshold=
--dbo-prefill-token-threshold= --dcp-kv-cache-interleave-size= --decode-context-parallel-size= --default-mm-loras=
--disable-cascade-attn --disable-chunked-mm-input --disable-custom-all-reduce --disable-fastapi-docs
--disable-hybrid-kv-cache-manager --disable-log-stats --disable-nccl-for-dp-synchronization --disable-sliding-window
--disable-uvicorn-access-log --distributed-executor-backend= --download-dir= --dtype= --ec-transfer-config=
--enable-auto-tool-choice --enable-chunked-prefill --enable-dbo --enable-eplb --enable-expert-parallel
--enable-force-include-usage --enable-log-outputs --enable-log-requests --enable-lora --enable-mm-embeds
--enable-prefix-caching --enable-prompt-embeds --enable-prompt-tokens-details --enable-request-id-headers
--enable-server-load-tracking --enable-sleep-mode --enable-ssl-refresh --enable-tokenizer-info-endpoint
--enforce-eager --eplb-config= --exclude-tools-when-tool-choice-none --expert-placement-strategy=
--fully-sharded-loras --generation-config= --gpu-memory-utilization= --h11-max-header-count=
--h11-max-incomplete-event-size= --headless --hf-config-path= --hf-overrides= --hf-token? --host= --ignore-patterns+
--interleave-mm-strings --io-processor-plugin= --kv-cache-dtype= --kv-cache-memory-bytes= --kv-events-config=
--kv-offloading-backend= --kv-offloading-size= --kv-sharing-fast-prefill --kv-transfer-config=
--limit-mm-per-prompt= --load-format= --log-config-file= --log-error-stack --logits-processors+ --logprobs-mode=
--long-prefill-token-threshold= --lora-dtype= --lora-modules+ --mamba-block-size= --mamba-cache-dtype=
--mamba-ssm-cache-dtype= --master-addr= --master-port= --max-cpu-loras= --max-cudagraph-capture-size= --max-log-len=
--max-logprobs= --max-lora-rank= --max-loras= --max-model-len= --max-num-batched-tokens= --max-num-seqs=
--max-parallel-loading-workers= --media-io-kwargs= --middleware= --mm-encoder-attn-backend= --mm-encoder-tp-mode=
--mm-processor-cache-gb= --mm-processor-cache-type= --mm-processor-kwargs= --mm-shm-cache-max-object-size-mb=
--model-impl= --model-loader-extra-config= --model= --nnodes= --no-allow-credentials --no-async-scheduling
--no-data-parallel-external-lb --no-data-parallel-hybrid-lb --no-disable-cascade-attn --no-disable-chunked-mm-input
--no-disable-custom-all-reduce --no-disable-fastapi-docs --no-disable-hybrid-kv-cache-manager
--no-disable-nccl-for-dp-synchronization --no-disable-sliding-window --no-disable-uvicorn-access-log
--no-enable-auto-tool-choice --no-enable-chunked-prefill --no-enable-dbo --no-enable-eplb
--no-enable-expert-parallel --no-enable-force-include-usage --no-enable-log-outputs --no-enable-log-requests
--no-enable-lora --no-enable-mm-embeds --no-enable-prefix-caching --no-enable-prompt-embeds
--no-enable-prompt-tokens-details --no-enable-request-id-headers --no-enable-server-load-tracking
--no-enable-sleep-mode --no-enable-ssl-refresh --no-enable-tokenizer-info-endpoint --no-enforce-eager
--no-exclude-tools-when-tool-choice-none --no-fully-sharded-loras --no-interleave-mm-strings
--no-kv-sharing-fast-prefill --no-log-error-stack --no-ray-workers-use-nsight --no-return-tokens-as-token-ids
--no-skip-mm-profiling --no-skip-tokenizer-init --no-tokens-only --no-trust-remote-code
--no-trust-request-chat-template --no-use-tqdm-on-load --node-rank= --num-gpu-blocks-override=
--otlp-traces-endpoint= --override-generation-config= --pipeline-parallel-size= --pooler-config= --port=
--prefix-caching-hash-algo= --pt-load-map-location= --quantization= --ray-workers-use-nsight
--reasoning-parser-plugin= --reasoning-parser= --response-role= --return-tokens-as-token-ids --revision=
--root-path= --runner= --safetensors-load-strategy= --scheduler-cls= --scheduling-policy= --seed=
--served-model-name+ --show-hidden-metrics-for-version= --skip-mm-profiling --skip-tokenizer-init
--speculative-config= --ssl-ca-certs= --ssl-cert-reqs= --ssl-certfile= --ssl-keyfile= --stream-interval=
--structured-outputs-config= --tensor-parallel-size= --tokenizer-mode= --tokenizer-revision= --tokenizer=
--tokens-only --tool-call-parser= --tool-parser-plugin= --tool-server= --trust-remote-code
--trust-request-chat-template --uds= --use-tqdm-on-load --uvicorn-log-level= --video-pruning-rate= --worker-cls=
--worker-extension-cls= -asc= -dcp= -dp= -dpa= -dpb= -dpe -dph -dpl= -dpn= -dpp= -dpr= -n= -pp= -q= -r= -tp=
""",
        ("0.16.0", "0.33.0"): """
--allow-deprecated-quantization --attention-backend= --attention-config= --cp-kv-cache-interleave-size=
--cudagraph-metrics --default-chat-template-kwargs= --disable-access-log-for-endpoints= --enable-flashinfer-autotune
--enable-layerwise-nvtx-tracing --enable-log-deltas --enable-logging-iteration-details --enable-mfu-metrics
--enable-offline-docs --enable-return-routed-experts --enable-tower-connector-lora --kernel-config=
--kv-cache-metrics --kv-cache-metrics-sample= --mamba-cache-mode= --mm-encoder-only
--no-allow-deprecated-quantization --no-cudagraph-metrics --no-enable-flashinfer-autotune
--no-enable-layerwise-nvtx-tracing --no-enable-log-deltas --no-enable-logging-iteration-details
--no-enable-mfu-metrics --no-enable-offline-docs --no-enable-return-routed-experts --no-enable-tower-connector-lora
--no-kv-cache-metrics --no-mm-encoder-only --no-specialize-active-lora --optimization-level=
--prefill-context-parallel-size= --profiler-config= --specialize-active-lora --ssl-ciphers= --ubatch-size=
--weight-transfer-config= -ac= -cc= -ep -pcp=
""",
        ("0.20.2", "0.33.0"): """
--cpu-offload-params+ --dcp-comm-backend= --distributed-timeout-seconds= --enable-elastic-ep
--enable-ep-weight-filter --enable-flash-late-interaction --enable-mamba-cache-stochastic-rounding
--fail-on-environ-validation --gdn-prefill-backend= --grpc --ir-op-priority= --kv-cache-dtype-skip-layers+
--language-model-only --lora-target-modules+ --mamba-backend= --mamba-cache-philox-rounds= --mm-tensor-ipc=
--moe-backend= --no-enable-elastic-ep --no-enable-ep-weight-filter --no-enable-flash-late-interaction
--no-enable-mamba-cache-stochastic-rounding --no-fail-on-environ-validation --no-language-model-only --no-numa-bind
--no-scheduler-reserve-full-isl --numa-bind --numa-bind-cpus+ --numa-bind-nodes+ --offload-backend=
--offload-group-size= --offload-num-in-group= --offload-params+ --offload-prefetch-step= --performance-mode=
--reasoning-config= --renderer-num-workers= --scheduler-reserve-full-isl --shutdown-timeout= -sc=
""",
        ("0.24.0", "0.33.0"): """
--cpu-distributed-timeout-seconds= --data-parallel-multi-port-external-lb --data-parallel-supervisor-port=
--device-ids= --diffusion-config= --dp-supervisor-probe-failure-threshold= --dp-supervisor-probe-interval-s=
--dp-supervisor-probe-timeout-s= --enable-cumem-allocator --enable-mixed-moe-lora-format --fingerprint-mode=
--fingerprint-value= --jit-monitor-verbose --linear-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path=
--mm-encoder-fp8-scale-save-margin= --mm-encoder-fp8-scale-save-path= --no-enable-cumem-allocator
--no-enable-mixed-moe-lora-format --no-jit-monitor-verbose --no-use-fp64-gumbel --prefill-schedule-interval=
--quantization-config= --safetensors-prefetch-block-size= --safetensors-prefetch-num-threads= --spec-method=
--spec-model= --spec-tokens= --use-fp64-gumbel --watermark= -dc= -dpm
""",
        ("0.27.1", "0.29.0"): """
--enable-bf16x3-router-gemm --no-enable-bf16x3-router-gemm
""",
        ("0.27.1", "0.33.0"): """
--cohere-format= --cohere-is-reasoning-model --enable-fault-tolerance --enable-moe-shared-loras
--enable-per-request-metrics --fault-tolerance-config= --jit-monitor-mode= --kda-prefill-backend=
--mamba-ssu-algorithm= --max-num-scheduled-tokens= --mm-hasher-algorithm= --mm-ipc-gpu-memory-gb=
--model-class-overrides= --no-cohere-is-reasoning-model --no-enable-fault-tolerance --no-enable-moe-shared-loras
--no-enable-per-request-metrics --no-use-replayssm --prefix-match-unit= --replayssm-buffer-len= --use-replayssm
--video-pruning-method=
""",
        ("0.28.0", "0.33.0"): """
--ec-manager-config= --mm-device-do-normalize --mm-processor-device= --no-mm-device-do-normalize
--no-return-sampling-mask --return-sampling-mask
""",
        ("0.29.0", "0.33.0"): """
--dcp-q-replicate --enable-batch-sharded-sampling --enable-trace-replay --max-num-queued-reqs=
--max-num-queued-tokens= --no-dcp-q-replicate --no-enable-batch-sharded-sampling --no-enable-trace-replay
--per-request-spec-decode-metrics= --prefix-cache-retention-interval= --sse-keep-alive-interval=
""",
        ("0.30.0", "0.30.0"): """
--enable-mamba-fine-grained-prefix-cache --no-enable-mamba-fine-grained-prefix-cache
""",
        ("0.30.0", "0.33.0"): """
--dp-sync-interval= --elastic-ep-max-dp-size= --enable-nccl-comm-suspend --enable-scale-out --engram-config=
--kda-decode-backend= --no-enable-nccl-comm-suspend --no-enable-scale-out --sparse-indexer-topk-backend=
--watermark-config=
""",
        ("0.31.0", "0.33.0"): """
--anthropic-disabled-thinking-effort= --aux-output-config= --device-memory-utilization=
--enable-mamba-shared-prefix-checkpoint --log-level= --logging-config= --long-prefill-token-threshold-adaptive
--max-lora-cls-labels= --max-num-active-seqs= --no-enable-mamba-shared-prefix-checkpoint
--no-long-prefill-token-threshold-adaptive --no-swa-bounded-replay --no-trust-request-mm-kwargs
--sleep-preserve-parameter-names+ --swa-bounded-replay --tool-strict-level= --trust-request-mm-kwargs
""",
        ("0.32.0", "0.33.0"): """
--custom-histogram-buckets= --enable-hc-sp --enable-shm-tensor-arena --grpc-port= --no-enable-hc-sp
--no-enable-shm-tensor-arena --no-sleep-mode-offload-cudagraph --sleep-mode-offload-cudagraph
""",
        ("0.33.0", "0.33.0"): """
--disable-auto-tool-choice --disable-batch-sharded-sampling --disable-chunked-prefill --disable-cumem-allocator
--disable-dbo --disable-elastic-ep --disable-ep-weight-filter --disable-eplb --disable-expert-parallel
--disable-fault-tolerance --disable-flash-late-interaction --disable-flashinfer-autotune
--disable-force-include-usage --disable-hc-sp --disable-layerwise-nvtx-tracing --disable-log-deltas
--disable-log-outputs --disable-log-requests --disable-logging-iteration-details --disable-lora
--disable-mamba-cache-stochastic-rounding --disable-mamba-shared-prefix-checkpoint --disable-mfu-metrics
--disable-mixed-moe-lora-format --disable-mm-embeds --disable-moe-shared-loras --disable-nccl-comm-suspend
--disable-offline-docs --disable-per-request-metrics --disable-prefix-caching --disable-prompt-embeds
--disable-prompt-tokens-details --disable-request-id-headers --disable-return-routed-experts --disable-scale-out
--disable-server-load-tracking --disable-shm-tensor-arena --disable-sleep-mode --disable-ssl-refresh
--disable-tokenizer-info-endpoint --disable-tower-connector-lora --disable-trace-replay --enable-cascade-attn
--enable-chunked-mm-input --enable-custom-all-reduce --enable-fastapi-docs --enable-hybrid-kv-cache-manager
--enable-nccl-for-dp-synchronization --enable-sliding-window --enable-uvicorn-access-log --monokernel
--no-monokernel --reasoning-effort-map= --sleep-mode-backend= --watchdog-config=
""",
    },
    "sglang": {
        ("0.4.6.post5", "0.4.6.post5"): """
--enable-flashinfer-mla --enable-flashmla --n-share-experts-fusion= --pdlb-url=
""",
        ("0.4.6.post5", "0.5.2"): """
--enable-deepep-moe --enable-ep-moe --max-micro-batch-size=
""",
        ("0.4.6.post5", "0.5.9"): """
--ds-channel-config-path= --ds-heavy-channel-num= --ds-heavy-channel-type= --ds-heavy-token-num=
--ds-sparse-decode-threshold= --enable-double-sparsity
""",
        ("0.4.6.post5", "0.5.12"): """
--debug-tensor-dump-inject= --enable-nan-detection
""",
        ("0.4.6.post5", "0.5.17"): """
--torchao-config=
""",
        ("0.4.6.post5", "0.5.19"): """
--collect-tokens-histogram --cuda-graph-bs+ --cuda-graph-max-bs= --enable-expert-distribution-metrics
--stream-output
""",
        ("0.4.6.post5", "0.5.23"): """
--allow-auto-truncate --api-key= --attention-backend= --base-gpu-id= --bucket-e2e-request-latency+
--bucket-inter-token-latency+ --bucket-time-to-first-token+ --chat-template= --chunked-prefill-size=
--completion-template= --constrained-json-whitespace-pattern= --context-length= --cpu-offload-gb=
--data-parallel-size= --debug-tensor-dump-input-file= --debug-tensor-dump-output-folder= --decode-log-interval=
--deepep-config= --deepep-mode= --delete-ckpt-after-loading --device= --disable-chunked-prefix-cache
--disable-cuda-graph --disable-cuda-graph-padding --disable-custom-all-reduce --disable-fast-image-processor
--disable-outlines-disk-cache --disable-overlap-schedule --disable-radix-cache --disaggregation-bootstrap-port=
--disaggregation-ib-device= --disaggregation-mode= --disaggregation-transfer-backend= --dist-init-addr=
--dist-timeout= --download-dir= --dp-size= --dtype= --enable-cache-report --enable-custom-logit-processor
--enable-dp-attention --enable-dp-lm-head --enable-eplb --enable-hierarchical-cache --enable-memory-saver
--enable-metrics --enable-mixed-chunk --enable-multimodal --enable-nccl-nvls --enable-p2p-check
--enable-request-time-stats-logging --enable-tokenizer-batch-encode --enable-torch-compile --ep-dispatch-algorithm=
--ep-num-redundant-experts= --ep-size= --eplb-rebalance-num-iterations= --expert-distribution-recorder-buffer-size=
--expert-distribution-recorder-mode= --expert-parallel-size= --file-storage-path= --flashinfer-mla-disable-ragged
--gpu-id-step= --grammar-backend= --hicache-ratio= --hicache-size= --hicache-write-policy= --host=
--init-expert-location= --is-embedding --json-model-override-args= --kv-cache-dtype= --kv-events-config=
--load-balance-method= --load-format= --log-level-http= --log-level= --log-requests --log-requests-level=
--lora-backend= --lora-paths* --max-loras-per-batch= --max-prefill-tokens= --max-running-requests=
--max-total-tokens= --mem-fraction-static= --mm-attention-backend= --model-path= --moe-dense-tp-size=
--nccl-init-addr= --nnodes= --node-rank= --num-continuous-decode-steps= --page-size= --pipeline-parallel-size=
--port= --pp-size= --preferred-sampling-params= --quantization-param-path= --quantization= --random-seed=
--reasoning-parser= --revision= --sampling-backend= --schedule-conservativeness= --schedule-policy=
--served-model-name= --show-time-cost --skip-tokenizer-init --speculative-accept-threshold-acc=
--speculative-accept-threshold-single= --speculative-algorithm= --speculative-draft-model-path=
--speculative-eagle-topk= --speculative-num-draft-tokens= --speculative-num-steps= --speculative-token-map=
--stream-interval= --tensor-parallel-size= --tokenizer-mode= --tokenizer-path= --tool-call-parser=
--torch-compile-max-bs= --tp-size= --triton-attention-num-kv-splits= --triton-attention-reduce-in-fp32
--trust-remote-code --warmups= --watchdog-timeout=
""",
        ("0.5.2", "0.5.2"): """
--debug-tensor-dump-prefill-only --enable-flashinfer-cutlass-moe --enable-flashinfer-mxfp4-moe
--enable-flashinfer-trtllm-moe --enable-triton-kernel-moe
""",
        ("0.5.2", "0.5.6.post2"): """
--hybrid-kvcache-ratio?
""",
        ("0.5.2", "0.5.9"): """
--disaggregation-decode-dp= --disaggregation-decode-tp= --disaggregation-prefill-pp=
""",
        ("0.5.2", "0.5.19"): """
--prefill-round-robin-balance
""",
        ("0.5.2", "0.5.23"): """
--crash-dump-folder= --custom-weight-loader* --decode-attention-backend=
--disable-flashinfer-cutlass-moe-fp4-allgather --disable-hybrid-swa-memory --disable-shared-experts-fusion
--enable-cudagraph-gc --enable-flashinfer-allreduce-fusion --enable-lmcache --enable-lora
--enable-metrics-for-all-schedulers --enable-mscclpp --enable-pdmux --enable-profile-cuda-graph
--enable-return-hidden-states --enable-symm-mem --enable-two-batch-overlap --ep= --eplb-algorithm=
--eplb-min-rebalancing-utilization-threshold= --eplb-rebalance-layers-per-chunk= --flashinfer-mxfp4-moe-precision=
--gc-warning-threshold-secs= --generation-tokens-buckets+ --hicache-io-backend= --hicache-mem-layout=
--hicache-storage-backend-extra-config= --hicache-storage-backend= --hicache-storage-prefetch-policy=
--lora-target-modules* --mamba-ssm-dtype= --max-loaded-loras= --max-lora-rank= --max-mamba-cache-size=
--max-queued-requests= --model-impl= --model-loader-extra-config= --model= --moe-a2a-backend= --moe-runner-backend=
--nccl-port= --num-reserved-decode-tokens= --numa-node+ --offload-group-size= --offload-mode=
--offload-num-in-group= --offload-prefetch-step= --prefill-attention-backend= --prompt-tokens-buckets+
--scheduler-recv-interval= --skip-server-warmup --sleep-on-idle --sm-group-num= --speculative-attention-mode=
--speculative-draft-model-revision= --speculative-draft-model= --swa-full-tokens-ratio=
--tbo-token-distribution-threshold= --tokenizer-worker-num= --tool-server= --weight-loader-disable-mmap
--weight-version=
""",
        ("0.5.6.post2", "0.5.6.post2"): """
--enable-flashinfer-autotune --load-watch-interval= --piecewise-cuda-graph-tokens=
""",
        ("0.5.6.post2", "0.5.9"): """
--mm-max-concurrent-calls= --mm-per-request-timeout= --multi-item-scoring-delimiter=
--speculative-ngram-branch-length= --speculative-ngram-max-match-window-size=
--speculative-ngram-min-match-window-size=
""",
        ("0.5.6.post2", "0.5.12"): """
--enable-piecewise-cuda-graph
""",
        ("0.5.6.post2", "0.5.19"): """
--enable-nsa-prefill-context-parallel --nsa-decode-backend= --nsa-prefill-backend= --piecewise-cuda-graph-compiler=
--piecewise-cuda-graph-max-tokens=
""",
        ("0.5.6.post2", "0.5.20"): """
--keep-mm-feature-on-device
""",
        ("0.5.6.post2", "0.5.23"): """
--abort-on-priority-when-disabled --checkpoint-engine-wait-weights-before-ready --config=
--constrained-json-disable-any-whitespace --debug-tensor-dump-layers+ --decrypted-config-file=
--decrypted-draft-config-file= --disable-tokenizer-batch-decode --disaggregation-decode-enable-offload-kvcache
--disaggregation-decode-polling-interval= --dllm-algorithm-config= --dllm-algorithm=
--dynamic-batch-tokenizer-batch-size= --dynamic-batch-tokenizer-batch-timeout= --elastic-ep-backend=
--enable-attn-tp-input-scattered --enable-broadcast-mm-inputs-process --enable-deterministic-inference
--enable-draft-weights-cpu-backup --enable-dynamic-batch-tokenizer --enable-fp32-lm-head --enable-fused-qk-norm-rope
--enable-layerwise-nvtx-marker --enable-priority-scheduling --enable-single-batch-overlap
--enable-torch-compile-debug-mode --enable-torch-symm-mem --enable-trace --enable-weights-cpu-backup
--export-metrics-to-file --export-metrics-to-file-dir= --fastapi-root-path= --forward-hooks= --fp8-gemm-backend=
--grpc-mode --kt-cpuinfer= --kt-max-deferred-experts-per-token= --kt-method= --kt-num-gpu-experts=
--kt-threadpool-count= --kt-weight-path= --lora-eviction-policy= --mamba-full-memory-ratio= --max-lora-chunk-size=
--mm-enable-dp-encoder --mm-process-config= --modelopt-checkpoint-restore-path= --modelopt-checkpoint-save-path=
--modelopt-export-path= --modelopt-quant= --mooncake-ib-device= --otlp-traces-endpoint= --pdmux-config-path=
--pp-max-micro-batch-size= --priority-scheduling-preemption-threshold= --quantize-and-serve --radix-eviction-policy=
--remote-instance-weight-loader-seed-instance-ip= --remote-instance-weight-loader-seed-instance-service-port=
--remote-instance-weight-loader-send-weights-group-ports= --rl-on-policy-target= --rl-quant-profile=
--sampling-defaults= --schedule-low-priority-values-first --speculative-draft-load-format=
--speculative-moe-a2a-backend= --speculative-moe-runner-backend= --speculative-ngram-capacity=
--speculative-ngram-match-type= --speculative-ngram-max-bfs-breadth= --speculative-ngram-min-bfs-breadth=
--tokenizer-metrics-allowed-custom-labels+ --tokenizer-metrics-custom-labels-header=
--triton-attention-split-tile-size=
""",
        ("0.5.9", "0.5.9"): """
--disable-hicache-numa-detect
""",
        ("0.5.9", "0.5.12"): """
--custom-sigquit-handler= --hybrid-kvcache-ratio
""",
        ("0.5.9", "0.5.19"): """
--mamba-scheduler-strategy= --nsa-prefill-cp-mode= --piecewise-cuda-graph-tokens+
""",
        ("0.5.9", "0.5.23"): """
--admin-api-key= --attention-context-parallel-size= --attn-cp-size= --disable-flashinfer-autotune
--enable-dynamic-chunking --enable-lora-overlap-loading --enable-multi-layer-eagle
--enable-precise-embedding-interpolation --enable-prefill-delayer --enable-prefix-mm-cache
--enable-return-routed-experts --encoder-only --encoder-transfer-backend= --encoder-urls+ --extra-metric-labels=
--fp4-gemm-backend= --hf-chat-template-name= --hierarchical-sparse-attention-extra-config= --language-only
--limit-mm-data-per-request= --log-requests-format= --log-requests-target+ --mamba-backend= --mamba-track-interval=
--model-checksum? --moe-data-parallel-size= --moe-dp-size= --pp-async-batch-depth=
--prefill-delayer-forward-passes-buckets+ --prefill-delayer-max-delay-passes=
--prefill-delayer-token-usage-low-watermark= --prefill-delayer-wait-seconds-buckets+ --prefill-max-requests=
--remote-instance-weight-loader-backend= --remote-instance-weight-loader-start-seed-via-transfer-engine
--soft-watchdog-timeout= --speculative-draft-attention-backend= --speculative-draft-model-quantization=
--uvicorn-access-log-exclude-prefixes*
""",
        ("0.5.12", "0.5.12"): """
--enable-deepep-waterfill --no-record-nolora-graph --record-nolora-graph
""",
        ("0.5.12", "0.5.19"): """
--disable-piecewise-cuda-graph --enable-breakable-cuda-graph --enable-prefill-context-parallel
--enforce-piecewise-cuda-graph --prefill-cp-mode= --speculative-dflash-draft-window-size=
""",
        ("0.5.12", "0.5.20"): """
--elastic-ep-rejoin
""",
        ("0.5.12", "0.5.22"): """
--speculative-skip-dp-mlp-sync
""",
        ("0.5.12", "0.5.23"): """
--batch-notify-size= --debug-cuda-graph --default-priority-value= --detokenizer-worker-num=
--disable-priority-preemption --disaggregation-decode-enable-radix-cache --enable-adaptive-dispatch-to-encoder
--enable-aiter-allreduce-fusion --enable-dp-attention-local-control-broadcast --enable-elastic-expert-backup
--enable-forward-pass-metrics --enable-fused-moe-sum-all-reduce --enable-hisparse --enable-http2
--enable-mfu-metrics --enable-mis --enable-mm-global-cache --enable-quant-communications
--enable-return-indexer-topk --enable-ssl-refresh --enable-streaming-session --enable-strict-thinking
--enforce-disable-flashinfer-allreduce-fusion --enforce-shared-experts-fusion --engine-info-bootstrap-port=
--experts-shared-outer-loras --forward-pass-metrics-ipc-name= --forward-pass-metrics-worker-id= --gc-threshold+
--grpc-http-sidecar-port= --hisparse-config= --incremental-streaming-output --linear-attn-backend=
--linear-attn-decode-backend= --linear-attn-prefill-backend= --lora-drain-wait-threshold= --lora-strict-loading
--lora-use-virtual-experts --model-config-parser= --modelexpress-config= --msprobe-dump-config=
--no-experts-shared-outer-loras --no-lora-strict-loading --pre-warm-nccl --prefill-delayer-max-delay-ms=
--prefill-delayer-queue-min-ratio= --prefill-only-disable-kv-cache --speculative-adaptive
--speculative-adaptive-config= --speculative-dflash-block-size= --speculative-draft-window-size=
--speculative-ngram-external-corpus-max-tokens= --speculative-ngram-external-corpus-path=
--speculative-ngram-external-sam-budget= --speculative-ngram-max-trie-depth= --ssl-ca-certs= --ssl-certfile=
--ssl-keyfile-password= --ssl-keyfile= --stream-response-default-include-usage --strip-thinking-cache
--tokenizer-backend= --use-ray --weight-loader-drop-cache-after-load --weight-loader-prefetch-checkpoints
--weight-loader-prefetch-num-threads=
""",
        ("0.5.17", "0.5.19"): """
--dsa-prefill-cp-mode= --enable-dsa-prefill-context-parallel --enable-gdn-replayssm-spec
""",
        ("0.5.17", "0.5.21"): """
--cuda-graph-tc-compiler=
""",
        ("0.5.17", "0.5.23"): """
--asr-max-buffer-seconds= --asr-max-concurrent-sessions= --bf16-gemm-backend= --cp-strategy=
--cuda-graph-backend-decode= --cuda-graph-backend-prefill= --cuda-graph-bs-decode+ --cuda-graph-bs-prefill+
--cuda-graph-config= --cuda-graph-max-bs-decode= --cuda-graph-max-bs-prefill= --dcp-comm-backend=
--dcp-replicate-q-proj --dcp-size= --decode-context-parallel-size= --decoupled-spec-bind-endpoint=
--decoupled-spec-connect-endpoints= --decoupled-spec-rank= --decoupled-spec-role= --deepep-dispatcher-output-dtype=
--default-chat-template-kwargs= --disable-attn-tp-gather --disable-decode-cuda-graph --disable-prefill-cuda-graph
--disaggregation-decode-extra-slots= --dllm-fdfo --dsa-decode-backend= --dsa-paged-mqa-logits-backend=
--dsa-prefill-backend= --dsa-topk-backend= --dwdp-size= --elastic-ep-initial-size= --elastic-ep-join-mode=
--elastic-ep-join-rank-offset= --elastic-ep-scale-timeout= --enable-cp-decode-attn-tp
--enable-deepseek-v4-fp4-indexer --enable-dsa-cache-layer-split --enable-flexkv --enable-int8-mamba-checkpoint
--enable-linear-replayssm --enable-linear-replayssm-spec --enable-mamba-cache-stochastic-rounding
--enable-page-major-kv-layout --enable-prefill-cp --enable-scattered-sconv --enable-session-radix-cache
--enable-tf32-matmul --enable-unified-memory --enable-waterfill --encoder-bootstrap-port= --encoder-register-urls+
--flashinfer-allreduce-fusion-backend= --flashinfer-autotune-skip-ops+ --flexkv-config-file= --fuseep-mode=
--grpc-port= --int8-mamba-ckpt-size= --kv-canary-real-data= --kv-canary-sweep-interval= --kv-canary=
--linear-attn-verify-backend= --linear-replayssm-cache-len= --lmcache-config-file= --load-snapshot-publish-interval=
--mamba-cache-philox-rounds= --mamba-max-states-per-path= --mamba-radix-cache-strategy= --max-ep-size=
--min-free-slots-delay= --mm-feature-transport= --mm-io-worker-num= --mm-processor-worker-num=
--no-dcp-replicate-q-proj --no-dllm-fdfo --optimistic-prefill-attempts= --radix-cache-backend= --retraction-policy=
--return-hidden-states-mode= --sidecar-args= --sidecar= --smg-grpc-mode --smg-http-sidecar-port= --spec-trace-dir=
--speculative-dspark-align-verify-tokens-to-graph-tier --speculative-dspark-block-size=
--speculative-dspark-confidence-sts-path= --speculative-dspark-sps-table-path= --speculative-use-rejection-sampling
--trace-modules= --weight-cache-mode= --weight-cache-socket= --weight-cache-timeout=
""",
        ("0.5.18", "0.5.23"): """
--allowed-media-domains+ --c128-page-size= --disaggregation-decode-retraction-backup= --enable-tp-lm-head-all-to-all
--expert-balancedness-report-mode= --http2-max-concurrent-streams= --image-processor-backend= --language-model-only
--media-url-max-file-size-mb= --mlx-enable-sampling --mm-global-cache-backend= --mm-preprocess-cache-size-mb=
--no-enable-tp-lm-head-all-to-all --speculative-draft-kv-cache-dtype= --startup-weight-load-mode=
--trust-mm-content-hashes
""",
        ("0.5.19", "0.5.23"): """
--deepep-v2-mode= --dsv4-prefill-backend= --enable-dense-mlp-attn-tp --enable-layernorm-sp --enable-lean-attention
--enable-shared-experts-attn-tp --enable-w4a4-mxfp4-megamoe --gated-launch-port= --hicache-host-memory-mode=
--hicache-storage-prefetch-retry-max-attempts= --hicache-storage-prefetch-retry-poll-interval=
--http2-initial-connection-window-size= --load-publish-endpoint= --prefill-decode-interval=
--speculative-dsa-topk-backend=
""",
        ("0.5.20", "0.5.23"): """
--dsv4-attn-backend= --enable-response-store --enable-unified-cache-external-linker --flashinfer-a2a-dispatch-type=
--no-ple-offload-embedding --ple-offload-backend= --ple-offload-dir= --ple-offload-embedding
--radix-eviction-policy-config= --return-input-ids --return-output-ids --sampling-mask-max-tokens=
--speculative-domino-candidate-pool-size= --unified-cache-external-linker-backend= --uno-lora-path=
""",
        ("0.5.21", "0.5.23"): """
--boundary-reduction= --constrained-json-max-whitespace-cnt= --context-bucket= --cuda-graph-max-seq-len-prefill=
--cuda-graph-prefill-max-context= --disable-aiter-allreduce-fusion-in-decode
--disable-aiter-allreduce-fusion-in-prefill --disaggregation-decode-host-receive-threshold=
--disaggregation-enable-kv-checksum --enable-decoder-swa-bounded-replay --enable-encoder-swa-bounded-replay
--enable-linker-mla-dedup --enable-pd-role-switch --grpc-response-timeout-secs= --hicache-host-memory-fraction=
--otlp-service-name= --prefill-kv-cache-dequant-dtype= --shared-experts-tp-size= --speculative-draft-sink-size=
--swa-prefix-tails= --trust-request-chat-template
""",
        ("0.5.22", "0.5.23"): """
--attention-data-parallel-size= --attn-dp-size= --disaggregation-decode-allocation-policy= --dsa-triton-union=
--enable-dsa-fused-indexer --enable-kv-cache-sharding --enable-watermark --no-enable-dsa-fused-indexer
--no-speculative-enable-w4a4-mxfp4-megamoe --qsa-indexer-dtype= --speculative-enable-w4a4-mxfp4-megamoe
--speculative-use-block-verification --watermark-config=
""",
        ("0.5.23", "0.5.23"): """
--enable-amd-monokernel --enable-hicache --enable-http-worker-reuseport --enable-megamoe-for-layernorm-sp
--enable-nvidia-megakernel --enable-paged-experts --enable-return-aux-hidden-states --monokernel-backend=
--no-enable-decoder-swa-bounded-replay --no-enable-fused-qk-norm-rope --no-enable-tf32-matmul
--no-mm-enable-dp-encoder --paged-experts-num-resident= --prefill-decode-interval-min-bs=
--return-aux-hidden-state-layer-ids+ --unified-cache-external-linker-config=
""",
    },
    "llamacpp": {
        ("b11434", "b11434"): """
--adaptive-decay= --adaptive-target= --agent --alias= --api-key-file= --api-key= --api-prefix= --backend-sampling
--batch-size= --cache-idle-slots --cache-list --cache-prompt --cache-ram= --cache-reuse= --cache-type-k-draft=
--cache-type-k= --cache-type-v-draft= --cache-type-v= --chat-template-file= --chat-template-kwargs= --chat-template=
--check-tensors --checkpoint-min-step= --completion-bash --cont-batching --context-shift
--control-vector-layer-range= --control-vector-scaled= --control-vector= --cors-credentials --cors-headers=
--cors-methods= --cors-origins= --cpu-mask-batch-draft= --cpu-mask-batch= --cpu-mask-draft= --cpu-mask= --cpu-moe
--cpu-moe-draft --cpu-range --cpu-range-batch --cpu-range-draft --cpu-strict-batch-draft= --cpu-strict-batch=
--cpu-strict-draft= --cpu-strict= --ctx-checkpoints= --ctx-size= --defrag-thold= --device-draft= --device=
--docker-repo= --draft-max= --draft-min= --draft-n-min= --draft-n= --draft-p-min= --draft-p-split= --draft=
--dry-allowed-length= --dry-base= --dry-multiplier= --dry-penalty-last-n= --dry-sequence-breaker= --dynatemp-exp=
--dynatemp-range= --embd-gemma-default --embd-normalize= --embedding --embeddings --escape --fim-qwen-1.5b-default
--fim-qwen-14b-spec --fim-qwen-30b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fit-ctx=
--fit-target= --fit= --flash-attn= --frequency-penalty= --gpt-oss-120b-default --gpt-oss-20b-default
--gpu-layers-draft= --gpu-layers= --grammar-file= --grammar= --help --hf-file= --hf-repo-draft= --hf-repo=
--hf-token= --host= --ignore-eos --image-max-tokens= --image-min-tokens= --jinja --json-schema-file= --json-schema=
--keep= --kv-offload --kv-unified --kv-unified-per-slot= --lazy-mode= --list-devices --load-mode= --log-colors=
--log-disable --log-file= --log-jsonl --log-prefix --log-prompts-dir= --log-timestamps --log-verbose
--log-verbosity= --logit-bias= --lookup-cache-dynamic= --lookup-cache-static= --lora-init-without-apply
--lora-scaled= --lora= --main-gpu= --mcp-servers-config= --mcp-servers-json= --media-path= --metrics --min-p=
--mirostat-ent= --mirostat-lr= --mirostat= --mmproj-auto --mmproj-device= --mmproj-offload --mmproj-url= --mmproj=
--model-draft= --model-url= --model= --models-autoload --models-dir= --models-max= --models-preset=
--mtmd-batch-max-tokens= --n-cpu-ffn= --n-cpu-moe-draft= --n-cpu-moe= --n-gpu-layers-draft= --n-gpu-layers=
--n-predict= --no-agent --no-cache-idle-slots --no-cache-prompt --no-cont-batching --no-context-shift
--no-cors-credentials --no-escape --no-host --no-jinja --no-kv-offload --no-kv-unified --no-log-jsonl
--no-log-prefix --no-log-timestamps --no-mmproj --no-mmproj-auto --no-mmproj-offload --no-models-autoload
--no-op-offload --no-perf --no-prefill-assistant --no-reasoning-preserve --no-repack --no-skip-chat-parsing
--no-slots --no-spec-draft-backend-sampling --no-ui --no-ui-mcp-proxy --no-warmup --no-webui --no-webui-mcp-proxy
--numa= --offline --op-offload --override-kv= --override-tensor-draft= --override-tensor= --parallel= --path= --perf
--poll-batch-draft= --poll-batch= --poll-draft= --poll= --pooling= --port= --predict= --prefill-assistant
--presence-penalty= --prio-batch-draft= --prio-batch= --prio-draft= --prio= --props --reasoning-budget-message=
--reasoning-budget= --reasoning-effort= --reasoning-format= --reasoning-preserve --reasoning= --repack
--repeat-last-n= --repeat-penalty= --rerank --reranking --reuse-port --reverse-prompt= --rope-freq-base=
--rope-freq-scale= --rope-scale= --rope-scaling= --rpc= --sampler-seq= --samplers= --sampling-seq= --seed=
--skip-chat-parsing --sleep-idle-seconds= --slot-prompt-similarity= --slot-save-path= --slots --spec-default
--spec-draft-backend-sampling --spec-draft-cpu-mask-batch= --spec-draft-cpu-mask= --spec-draft-cpu-moe
--spec-draft-cpu-range --spec-draft-cpu-strict-batch= --spec-draft-cpu-strict= --spec-draft-device= --spec-draft-hf=
--spec-draft-model= --spec-draft-n-cpu-moe= --spec-draft-n-max= --spec-draft-n-min= --spec-draft-ncmoe=
--spec-draft-ngl= --spec-draft-override-tensor= --spec-draft-p-min= --spec-draft-p-split= --spec-draft-poll-batch=
--spec-draft-poll= --spec-draft-prio-batch= --spec-draft-prio= --spec-draft-sampling= --spec-draft-threads-batch=
--spec-draft-threads= --spec-draft-type-k= --spec-draft-type-v= --spec-ngram-map-k-min-hits=
--spec-ngram-map-k-size-m= --spec-ngram-map-k-size-n= --spec-ngram-map-k4v-min-hits= --spec-ngram-map-k4v-size-m=
--spec-ngram-map-k4v-size-n= --spec-ngram-min-hits= --spec-ngram-mod-n-match= --spec-ngram-mod-n-max=
--spec-ngram-mod-n-min= --spec-ngram-simple-min-hits= --spec-ngram-simple-size-m= --spec-ngram-simple-size-n=
--spec-ngram-size-m= --spec-ngram-size-n= --spec-synth-len= --spec-synth-rates= --spec-type --special --split-mode=
--spm-infill --sse-ping-interval= --ssl-cert-file= --ssl-key-file= --swa-checkpoints= --swa-full --tags= --temp=
--temperature= --tensor-split= --threads-batch-draft= --threads-batch= --threads-draft= --threads-http= --threads=
--timeout= --tools-runtime= --tools= --top-k= --top-n-sigma= --top-nsigma= --top-p= --typical-p= --typical=
--ubatch-size= --ui --ui-config-file= --ui-config= --ui-mcp-proxy --usage --verbose --verbosity= --version
--video-ffmpeg-dir= --video-fps= --video-timestamp-interval= --vision-gemma-12b-default --vision-gemma-4b-default
--warmup --webui --webui-config-file= --webui-config= --webui-mcp-proxy --xtc-probability= --xtc-threshold=
--yarn-attn-factor= --yarn-beta-fast= --yarn-beta-slow= --yarn-ext-factor= --yarn-orig-ctx= -C= -Cb= -Cbd= -Cd= -Cr
-Crb -Crd -a= -ag -b= -bs -c= -cb -cl -cmoe -cmoed -cms= -cram= -ctk= -ctkd= -ctv= -ctvd= -ctxcp= -dev= -devd= -dr=
-dt= -e -fa= -fit= -fitc= -fitt= -h -hf= -hfd= -hff= -hfr= -hfrd= -hft= -j= -jf= -kvo -kvu -l= -lcd= -lcs= -lm= -lv=
-lzm= -m= -md= -mg= -mm= -mmdev= -mmu= -mu= -n= -ncffn= -ncmoe= -ncmoed= -ngl= -ngld= -nkvo -no-ag -no-kvu -nocb
-np= -nr -ot= -otd= -r= -rea= -s= -sm= -sp -sps= -t= -tb= -tbd= -td= -to= -ts= -ub= -v
""",
    },
}  # fmt: skip
"""By engine: which arguments each span of versions has."""
