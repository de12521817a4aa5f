"""The values that arguments of published engine versions can have, for :mod:`llmgw.settings.engine_flags`.

Read out of the parsers of the versions of :mod:`llmgw.settings.engine_flag_tables`, in the same groups. ``*`` stands
for any value, where a version leaves open what another lists. An argument that is not here was never listed.
"""

from __future__ import annotations

from collections.abc import Mapping

CHOICES: Mapping[str, Mapping[tuple[str, str], str]] = {
    "vllm": {
        ("0.11.2", "0.11.2"): """
--all2all-backend=None --convert=reward --kv-offloading-backend=None --lora-extra-vocab-size=256|512
--task=None|auto|classify|draft|embed|embedding|generate|reward|score|transcription
--tokenizer-mode=auto|custom|mistral|slow
""",
        ("0.11.2", "0.16.0"): """
--block-size=1|128|16|256|32|64|8
""",
        ("0.11.2", "0.20.2"): """
--safetensors-load-strategy=*
""",
        ("0.11.2", "0.30.0"): """
--collect-detailed-traces=all,model|all,worker|model,all|model,worker|worker,all|worker,model
""",
        ("0.11.2", "0.32.0"): """
--kv-cache-dtype=auto|bfloat16|fp8|fp8_ds_mla|fp8_e4m3|fp8_e5m2|fp8_inc
""",
        ("0.11.2", "0.33.0"): """
--all2all-backend=allgather_reducescatter|deepep_high_throughput|deepep_low_latency|flashinfer_all2allv|naive|pplx
--chat-template-content-format=auto|openai|string --collect-detailed-traces=None|all|model|worker
--convert=auto|classify|embed|none --dtype=auto|bfloat16|float|float16|float32|half
--expert-placement-strategy=linear|round_robin --kv-offloading-backend=lmcache|native
--logprobs-mode=processed_logits|processed_logprobs|raw_logits|raw_logprobs --lora-dtype=auto|bfloat16|float16
--mamba-cache-dtype=auto|float32 --mamba-ssm-cache-dtype=auto|float32 --max-lora-rank=1|128|16|256|32|320|512|64|8
--mm-encoder-tp-mode=data|weights --mm-processor-cache-type=lru|shm --prefix-caching-hash-algo=sha256|sha256_cbor
--runner=auto|draft|generate|pooling --scheduling-policy=fcfs|priority
--uvicorn-log-level=critical|debug|error|info|trace|warning
""",
        ("0.16.0", "0.20.2"): """
--all2all-backend=mori
""",
        ("0.16.0", "0.31.0"): """
--mamba-cache-mode=all
""",
        ("0.16.0", "0.33.0"): """
--mamba-cache-dtype=float16 --mamba-cache-mode=align|none --mamba-ssm-cache-dtype=float16
--prefix-caching-hash-algo=xxhash|xxhash_cbor --tokenizer-mode=*
""",
        ("0.20.2", "0.32.0"): """
--kv-cache-dtype=float16|fp8_per_token_head|int8_per_token_head|nvfp4|turboquant_3bit_nc|turboquant_4bit_nc
--kv-cache-dtype=turboquant_k3v4_nc|turboquant_k8v4
""",
        ("0.20.2", "0.33.0"): """
--all2all-backend=flashinfer_nvlink_one_sided|flashinfer_nvlink_two_sided|nixl_ep --block-size=*
--dcp-comm-backend=a2a|ag_rs --gdn-prefill-backend=flashinfer|triton --mm-tensor-ipc=direct_rpc|torch_shm
--offload-backend=auto|prefetch|uva --performance-mode=balanced|interactivity|throughput
""",
        ("0.24.0", "0.32.0"): """
--spec-method=medusa|mlp_speculator
""",
        ("0.24.0", "0.33.0"): """
--all2all-backend=deepep_v2|mori_high_throughput|mori_low_latency --fingerprint-mode=custom|full|hash|none
--gdn-prefill-backend=cutedsl --mamba-cache-dtype=bfloat16 --mamba-ssm-cache-dtype=bfloat16
--mm-encoder-attn-dtype=None|fp8 --safetensors-load-strategy=None|eager|lazy|prefetch|torchao
--spec-method=None|custom_class|deepseek_mtp|dflash|draft_model|eagle|eagle3|ernie_mtp|exaone4_5_mtp|exaone_moe_mtp
--spec-method=extract_hidden_states|gemma4_mtp|glm4_moe_lite_mtp|glm4_moe_mtp|glm_ocr_mtp|hy_v3_mtp|longcat_flash_mtp
--spec-method=mimo_mtp|mimo_v2_mtp|minimax_m3_mtp|mtp|nemotron_h_mtp|ngram|ngram_gpu|pangu_ultra_moe_mtp|qwen3_5_mtp
--spec-method=qwen3_next_mtp|step3p5_mtp|suffix
""",
        ("0.27.1", "0.32.0"): """
--kv-cache-dtype=int4_per_token_head
""",
        ("0.27.1", "0.33.0"): """
--jit-monitor-mode=error|warn --kda-prefill-backend=auto|flashkda|triton
--mamba-ssu-algorithm=None|auto|horizontal|simple|vertical --mm-hasher-algorithm=blake3|sha256|sha512
--spec-method=bailing_hybrid_mtp|dspark|inkling_mtp|kimi_k3_mtp --video-pruning-method=evs|vidcom2
""",
        ("0.28.0", "0.32.0"): """
--kv-cache-dtype=nvfp4_4over6
""",
        ("0.28.0", "0.33.0"): """
--mm-processor-device=auto|cpu|cuda --spec-method=bailing_hybrid_v3_mtp|dots3_note_mtp
""",
        ("0.29.0", "0.33.0"): """
--dcp-comm-backend=None --per-request-spec-decode-metrics=detailed|none|summary --spec-method=hy_v4_mtp|qwen4_exp_mtp
""",
        ("0.30.0", "0.32.0"): """
--kv-cache-dtype=nvfp4_ds_mla
""",
        ("0.30.0", "0.33.0"): """
--kda-decode-backend=auto|flashinfer|native|triton --kda-prefill-backend=flashinfer|fused --spec-method=glm5_next_mtp
""",
        ("0.31.0", "0.33.0"): """
--all2all-backend=moonep --anthropic-disabled-thinking-effort=auto|high|low|max|medium|none|xhigh
--log-level=CRITICAL|DEBUG|ERROR|INFO|NOTSET|WARNING --tool-strict-level=auto|function|parameter
""",
        ("0.32.0", "0.32.0"): """
--kv-cache-dtype=ultraquant_4bit
""",
        ("0.32.0", "0.33.0"): """
--gdn-prefill-backend=aiter_flydsl
""",
        ("0.33.0", "0.33.0"): """
--gdn-prefill-backend=sycl --kv-cache-dtype=* --spec-method=step5_mtp --tool-strict-level=None
""",
    },
    "sglang": {
        ("0.4.6.post5", "0.5.2"): """
--lora-backend=*
""",
        ("0.4.6.post5", "0.5.6.post2"): """
--load-balance-method=shortest_queue
""",
        ("0.4.6.post5", "0.5.9"): """
--speculative-algorithm=EAGLE|EAGLE3|NEXTN
""",
        ("0.4.6.post5", "0.5.12"): """
--ep-dispatch-algorithm=* --expert-distribution-recorder-mode=* --quantization=qoq
""",
        ("0.4.6.post5", "0.5.19"): """
--attention-backend=cutlass_mla --quantization=marlin
""",
        ("0.4.6.post5", "0.5.23"): """
--attention-backend=aiter|fa3|flashinfer|flashmla|torch_native|triton --deepep-mode=auto|low_latency|normal
--disaggregation-mode=decode|null|prefill --disaggregation-transfer-backend=mooncake|nixl
--dtype=auto|bfloat16|float|float16|float32|half --grammar-backend=llguidance|none|outlines|xgrammar
--hicache-write-policy=write_back|write_through|write_through_selective --kv-cache-dtype=auto|fp8_e4m3|fp8_e5m2
--load-balance-method=round_robin
--load-format=auto|bitsandbytes|dummy|gguf|layered|npcache|pt|remote|safetensors|sharded_state
--log-requests-level=0|1|2 --mm-attention-backend=fa3|sdpa|triton_attn
--quantization=awq|awq_marlin|bitsandbytes|fp8|gguf|gptq|gptq_marlin|modelopt|modelopt_fp4|moe_wna16|w8a8_fp8
--quantization=w8a8_int8 --reasoning-parser=deepseek-r1|qwen3 --sampling-backend=flashinfer|pytorch
--schedule-policy=dfs-weight|fcfs|lpm|random --tokenizer-mode=auto|slow
--tool-call-parser=deepseekv3|llama3|mistral|pythonic|qwen25
""",
        ("0.5.2", "0.5.2"): """
--attention-backend=hybrid_linear_attn --decode-attention-backend=hybrid_linear_attn
--prefill-attention-backend=hybrid_linear_attn
""",
        ("0.5.2", "0.5.6.post2"): """
--load-balance-method=minimum_tokens
""",
        ("0.5.2", "0.5.9"): """
--speculative-algorithm=STANDALONE
""",
        ("0.5.2", "0.5.19"): """
--attention-backend=dual_chunk_flash_attn --decode-attention-backend=cutlass_mla|dual_chunk_flash_attn
--prefill-attention-backend=cutlass_mla|dual_chunk_flash_attn
""",
        ("0.5.2", "0.5.23"): """
--attention-backend=ascend|intel_amx|trtllm_mha|trtllm_mla|wave
--decode-attention-backend=aiter|ascend|fa3|flashinfer|flashmla|intel_amx|torch_native|triton|trtllm_mha|trtllm_mla
--decode-attention-backend=wave --disaggregation-transfer-backend=ascend|fake
--flashinfer-mxfp4-moe-precision=bf16|default --hicache-io-backend=direct|kernel
--hicache-mem-layout=layer_first|page_first --hicache-storage-backend=file|hf3fs|mooncake|nixl
--hicache-storage-prefetch-policy=best_effort|timeout|wait_complete --log-requests-level=3
--lora-target-modules=all|down_proj|gate_proj|gate_up_proj|k_proj|o_proj|q_proj|qkv_proj|up_proj|v_proj
--mamba-ssm-dtype=bfloat16|float32 --moe-a2a-backend=deepep|none
--moe-runner-backend=auto|flashinfer_cutlass|flashinfer_mxfp4|flashinfer_trtllm|triton|triton_kernel
--prefill-attention-backend=aiter|ascend|fa3|flashinfer|flashmla|intel_amx|torch_native|triton|trtllm_mha|trtllm_mla
--prefill-attention-backend=wave --quantization=mxfp4|petit_nvfp4|w4afp8
--reasoning-parser=deepseek-v3|glm45|gpt-oss|kimi|qwen3-thinking|step3 --schedule-policy=lof
--speculative-attention-mode=decode|prefill --tool-call-parser=deepseekv31|glm45|gpt-oss|kimi_k2|qwen3_coder|step3
""",
        ("0.5.6.post2", "0.5.9"): """
--speculative-algorithm=NGRAM
""",
        ("0.5.6.post2", "0.5.19"): """
--nsa-decode-backend=aiter|fa3|flashmla_auto|flashmla_kv|flashmla_sparse|tilelang
--nsa-prefill-backend=aiter|fa3|flashmla_auto|flashmla_kv|flashmla_sparse|tilelang
--piecewise-cuda-graph-compiler=eager|inductor
""",
        ("0.5.6.post2", "0.5.20"): """
--kv-cache-dtype=fp4_e2m1
""",
        ("0.5.6.post2", "0.5.23"): """
--attention-backend=fa4|flex_attention|intel_xpu|nsa --decode-attention-backend=fa4|flex_attention|intel_xpu|nsa
--elastic-ep-backend=mooncake|none --fp8-gemm-backend=aiter|auto|cutlass|deep_gemm|flashinfer_trtllm|triton
--hicache-io-backend=kernel_ascend --hicache-mem-layout=page_first_direct|page_first_kv_split|page_head
--hicache-storage-backend=aibrix|dynamic|eic --kv-cache-dtype=bf16|bfloat16
--load-format=flash_rl|private|remote_instance --lora-backend=ascend|csgmv|torch_native|triton
--lora-eviction-policy=fifo|lru --lora-target-modules=embed_tokens|lm_head --max-lora-chunk-size=128|16|32|64
--mm-attention-backend=aiter_attn|ascend_attn --moe-a2a-backend=ascend_fuseep|mooncake
--moe-runner-backend=cutlass|deep_gemm|flashinfer_cutedsl --prefill-attention-backend=fa4|flex_attention|intel_xpu|nsa
--quantization=auto-round|compressed-tensors|modelopt_fp8|modelslim --radix-eviction-policy=lfu|lru
--reasoning-parser=kimi_k2|minimax|minimax-append-think --rl-on-policy-target=fsdp --sampling-backend=ascend
--sampling-defaults=model|openai --schedule-policy=priority
--speculative-draft-load-format=auto|bitsandbytes|dummy|flash_rl|gguf|layered|npcache|private|pt|remote
--speculative-draft-load-format=remote_instance|safetensors|sharded_state
--speculative-moe-a2a-backend=ascend_fuseep|deepep|mooncake|none
--speculative-moe-runner-backend=auto|cutlass|deep_gemm|flashinfer_cutedsl|flashinfer_cutlass|flashinfer_mxfp4
--speculative-moe-runner-backend=flashinfer_trtllm|triton|triton_kernel --speculative-ngram-match-type=BFS|PROB
--tool-call-parser=deepseekv32|glm|minimax-m2|qwen
""",
        ("0.5.9", "0.5.9"): """
--reasoning-parser=nano_v3
""",
        ("0.5.9", "0.5.12"): """
--mamba-scheduler-strategy=auto|extra_buffer|no_buffer --speculative-draft-model-quantization=qoq
""",
        ("0.5.9", "0.5.19"): """
--nsa-decode-backend=trtllm --nsa-prefill-backend=trtllm --nsa-prefill-cp-mode=in-seq-split|round-robin-split
--speculative-draft-model-quantization=marlin
""",
        ("0.5.9", "0.5.23"): """
--disaggregation-transfer-backend=mori --encoder-transfer-backend=mooncake|zmq_to_scheduler|zmq_to_tokenizer
--fp4-gemm-backend=auto|flashinfer_cudnn|flashinfer_cutlass|flashinfer_trtllm --fp8-gemm-backend=flashinfer_deepgemm
--load-balance-method=auto|follow_bootstrap_room|total_requests|total_tokens --load-format=fastsafetensors
--log-requests-format=json|text --mamba-backend=flashinfer|triton --mamba-ssm-dtype=float16 --mm-attention-backend=fa4
--moe-a2a-backend=flashinfer|mori --quantization=mxfp8|quark_int4fp8_moe --reasoning-parser=interns1|step3p5
--remote-instance-weight-loader-backend=nccl|transfer_engine --schedule-policy=routing-key
--speculative-draft-load-format=fastsafetensors
--speculative-draft-model-quantization=auto-round|awq|awq_marlin|bitsandbytes|compressed-tensors|fp8|gguf|gptq
--speculative-draft-model-quantization=gptq_marlin|modelopt|modelopt_fp4|modelopt_fp8|modelslim|moe_wna16|mxfp4|mxfp8
--speculative-draft-model-quantization=petit_nvfp4|quark_int4fp8_moe|unquant|w4afp8|w8a8_fp8|w8a8_int8
--speculative-moe-a2a-backend=flashinfer|mori
--tool-call-parser=gigachat3|glm47|hermes|interns1|lfm2|mimo|step3p5|trinity
""",
        ("0.5.12", "0.5.12"): """
--fp4-gemm-backend=cutlass
""",
        ("0.5.12", "0.5.19"): """
--prefill-cp-mode=in-seq-split
""",
        ("0.5.12", "0.5.23"): """
--attention-backend=compressed|dsv4|tokenspeed_mla --decode-attention-backend=compressed|dsv4|tokenspeed_mla
--elastic-ep-backend=nixl --fp4-gemm-backend=flashinfer_cutedsl --fp8-gemm-backend=flashinfer_cutlass
--hicache-storage-backend=simm --linear-attn-backend=cutedsl|flashinfer|triton
--linear-attn-decode-backend=cutedsl|flashinfer|triton --linear-attn-prefill-backend=cutedsl|flashinfer|triton
--load-format=mistral|runai_streamer --lora-target-modules=kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj
--mm-attention-backend=flashinfer_cudnn --moe-a2a-backend=megamoe|nixl
--moe-runner-backend=aiter|flashinfer_trtllm_routed|marlin --prefill-attention-backend=compressed|dsv4|tokenspeed_mla
--quantization=mlx_q4|mlx_q8|modelopt_mixed|quark|unquant --radix-eviction-policy=priority|slru
--reasoning-parser=auto|deepseek-v4|gemma4|hunyuan|mimo|mistral|nemotron_3|poolside_v1
--remote-instance-weight-loader-backend=modelexpress --speculative-algorithm=*
--speculative-draft-load-format=mistral|runai_streamer
--speculative-draft-model-quantization=mlx_q4|mlx_q8|modelopt_mixed|quark --speculative-moe-a2a-backend=megamoe|nixl
--speculative-moe-runner-backend=aiter|flashinfer_trtllm_routed|marlin --tokenizer-backend=fastokens|huggingface
--tool-call-parser=auto|deepseekv4|gemma4|hunyuan|poolside_v1
""",
        ("0.5.17", "0.5.19"): """
--dsa-prefill-cp-mode=in-seq-split|round-robin-split --mamba-scheduler-strategy=*
--nsa-decode-backend=flashinfer_sparse_mla|flashmla_sparse_q8
--nsa-prefill-backend=flashinfer_sparse_mla|flashmla_sparse_q8
""",
        ("0.5.17", "0.5.21"): """
--cuda-graph-backend-decode=breakable|disabled|full|tc_piecewise
--cuda-graph-backend-prefill=breakable|disabled|full|tc_piecewise --cuda-graph-tc-compiler=eager|inductor
""",
        ("0.5.17", "0.5.23"): """
--attention-backend=cutedsl_mla|dsa|hpc_ops --bf16-gemm-backend=auto|cutedsl|torch --cp-strategy=interleave|zigzag
--dcp-comm-backend=a2a|ag_rs|fi_a2a --decode-attention-backend=cutedsl_mla|dsa|hpc_ops
--decoupled-spec-role=drafter|null|verifier --deepep-dispatcher-output-dtype=auto|bf16|fp8|int8|nvfp4
--disaggregation-transfer-backend=mooncake_tcp
--dsa-decode-backend=aiter|fa3|flashinfer_sparse_mla|flashmla_auto|flashmla_kv|flashmla_sparse|flashmla_sparse_q8
--dsa-decode-backend=tilelang|trtllm --dsa-paged-mqa-logits-backend=aiter|auto|cutedsl|deepgemm
--dsa-prefill-backend=aiter|fa3|flashinfer_sparse_mla|flashmla_auto|flashmla_kv|flashmla_sparse|flashmla_sparse_q8
--dsa-prefill-backend=tilelang|trtllm --dsa-topk-backend=flashinfer|sgl-kernel|torch
--elastic-ep-join-mode=recover|scale --encoder-transfer-backend=auto --ep-dispatch-algorithm=dynamic|fake|lp|static
--expert-distribution-recorder-mode=per_pass|per_token|stat|stat_approx
--flashinfer-allreduce-fusion-backend=auto|mnnvl|trtllm --fp4-gemm-backend=marlin --fuseep-mode=1|2
--hicache-storage-backend=mori|shm --kv-cache-dtype=fp4_mx_block16|mxfp8|nvfp4 --kv-canary=log|none|raise
--kv-canary-real-data=all|none|partial --linear-attn-backend=flashkda|nvidia_kda|ptx_kda
--linear-attn-decode-backend=flashkda|nvidia_kda|ptx_kda --linear-attn-prefill-backend=flashkda|nvidia_kda|ptx_kda
--linear-attn-verify-backend=cutedsl|flashinfer|flashkda|nv_cutedsl|nvidia_kda|ptx_kda|triton --load-format=presharded
--lora-target-modules=qkvr|weights_proj|wk|wo_ud|wq_b
--mamba-radix-cache-strategy=auto|extra_buffer|extra_buffer_lazy|no_buffer --mm-attention-backend=amx_attn|xpu_attn
--mm-feature-transport=cpu|cuda_ipc --moe-a2a-backend=ascend_tp|pplx
--moe-runner-backend=experimental_sgl_marlin|experimental_sgl_trtllm|hpc_ops|humming
--prefill-attention-backend=cutedsl_mla|dsa|hpc_ops
--quantization=auto-round-int8|humming|mxfp_w4a8|nvfp4_online|quark_mxfp4
--reasoning-parser=apertus2509|cohere_command4|inkling|kimi_k3|minimax-m3 --retraction-policy=length|priority
--return-hidden-states-mode=full|last --speculative-draft-load-format=presharded
--speculative-draft-model-quantization=auto-round-int8|humming|mxfp_w4a8|nvfp4_online|quark_mxfp4
--speculative-moe-a2a-backend=ascend_tp|pplx
--speculative-moe-runner-backend=experimental_sgl_marlin|experimental_sgl_trtllm|hpc_ops|humming
--tool-call-parser=apertus2509|cohere_command4|inkling|kimi_k3|minicpm5|minimax-m3
--weight-cache-mode=client|daemon|off
""",
        ("0.5.18", "0.5.23"): """
--disaggregation-decode-retraction-backup=cpu_tensor|host_pool
--expert-balancedness-report-mode=both|off|prometheus|server_log --fp8-gemm-backend=flashinfer_cutedsl
--image-processor-backend=auto|pil|torchvision --linear-attn-backend=helion --linear-attn-decode-backend=helion
--linear-attn-prefill-backend=helion --linear-attn-verify-backend=helion --mm-feature-transport=cuda_vmm
--mm-global-cache-backend=mooncake --moe-runner-backend=megamoe --reasoning-parser=muse
--speculative-draft-kv-cache-dtype=auto|bf16|bfloat16|fp8_e4m3|fp8_e5m2 --speculative-moe-runner-backend=megamoe
--startup-weight-load-mode=overlap|serial --tool-call-parser=muse
""",
        ("0.5.19", "0.5.19"): """
--bf16-gemm-backend=flashinfer_pr4266
""",
        ("0.5.19", "0.5.23"): """
--attention-backend=minicpm_flashattn|minicpm_flashinfer --bf16-gemm-backend=gemv
--decode-attention-backend=minicpm_flashattn|minicpm_flashinfer --deepep-v2-mode=direct|hybrid
--dsv4-prefill-backend=auto|flashmla_sparse|flashmla_sparse_q8 --flashinfer-mxfp4-moe-precision=fp8
--hicache-host-memory-mode=buffer_only|cache --hicache-storage-backend=sim --linear-attn-backend=intel_xpu
--linear-attn-decode-backend=intel_xpu --linear-attn-prefill-backend=intel_xpu --linear-attn-verify-backend=intel_xpu
--load-format=expert_pack --moe-a2a-backend=deepep_v2 --moe-runner-backend=intel_xpu
--prefill-attention-backend=minicpm_flashattn|minicpm_flashinfer --reasoning-parser=dots|ling3
--speculative-draft-load-format=expert_pack --speculative-dsa-topk-backend=flashinfer|sgl-kernel|torch
--speculative-moe-a2a-backend=deepep_v2 --speculative-moe-runner-backend=intel_xpu
--tool-call-parser=dots|ling3|spark25
""",
        ("0.5.20", "0.5.23"): """
--attention-backend=qsa --decode-attention-backend=qsa --dsa-decode-backend=triton --dsa-prefill-backend=triton
--dsv4-attn-backend=auto|flashmla|trtllm --flashinfer-a2a-dispatch-type=auto|bf16|mxfp8|nvfp4
--hicache-storage-backend=npu_memcache --moe-a2a-backend=flashinfer_megamoe --moe-runner-backend=flashinfer_megamoe
--ple-offload-backend=file|pinned --prefill-attention-backend=qsa
--reasoning-parser=granite_thinking_parser|k2_horizon|nanbeige --schedule-policy=hrrn
--speculative-moe-runner-backend=flashinfer_megamoe --tool-call-parser=k2_horizon|nanbeige
--unified-cache-external-linker-backend=mooncake|mori
""",
        ("0.5.21", "0.5.23"): """
--boundary-reduction=ar|auto|rs|rs+rsv|rsv --disaggregation-decode-retraction-backup=none
--flashinfer-allreduce-fusion-backend=cutedsl --hicache-storage-backend=tensorcast
--prefill-kv-cache-dequant-dtype=auto|fp8_e4m3|nvfp4 --radix-eviction-policy=tlru
--reasoning-parser=deepseek-v41|gigachat35|iquest_q1 --sampling-backend=intel_xpu
--schedule-policy=shortest-prefill-first --tool-call-parser=deepseekv41|gigachat35|iquest_q1
""",
        ("0.5.22", "0.5.23"): """
--attention-backend=llada2_cfg_flashinfer --cuda-graph-backend-decode=* --cuda-graph-backend-prefill=*
--decode-attention-backend=llada2_cfg_flashinfer --disaggregation-decode-allocation-policy=early|prefill_complete
--dsa-decode-backend=intel_xpu --dsa-prefill-backend=intel_xpu|triton_sparse_mla --dsa-triton-union=0|2|4
--hicache-storage-backend=seaweedfs --load-format=instanttensor --prefill-attention-backend=llada2_cfg_flashinfer
--qsa-indexer-dtype=auto|bfloat16|fp8_e4m3 --speculative-draft-load-format=instanttensor
""",
        ("0.5.23", "0.5.23"): """
--dsv4-attn-backend=flashmla_mega --lora-backend=triton_v2 --moe-runner-backend=lora_cutedsl|lora_marlin|lora_triton
--monokernel-backend=amd --reasoning-parser=beam|response_template
--speculative-moe-runner-backend=lora_cutedsl|lora_marlin|lora_triton --tool-call-parser=beam|response_template
--unified-cache-external-linker-backend=dynamic
""",
    },
    "llamacpp": {
        ("b11434", "b11434"): """
--cache-type-k=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0
--cache-type-k-draft=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0
--cache-type-v=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0
--cache-type-v-draft=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0 --fit=0|1|disabled|enabled|false|off|on|true
--flash-attn=-1|0|1|auto|disabled|enabled|false|off|on|true
--log-colors=-1|0|1|auto|disabled|enabled|false|off|on|true --pooling=cls|last|mean|none|rank
--reasoning=-1|0|1|auto|disabled|enabled|false|off|on|true --rope-scaling=linear|none|yarn
--spec-draft-sampling=greedy|probabilistic --spec-draft-type-k=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0
--spec-draft-type-v=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0 --split-mode=layer|none|row|tensor
-ctk=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0 -ctkd=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0
-ctv=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0 -ctvd=bf16|f16|f32|iq4_nl|q4_0|q4_1|q5_0|q5_1|q8_0
-fa=-1|0|1|auto|disabled|enabled|false|off|on|true -fit=0|1|disabled|enabled|false|off|on|true
-rea=-1|0|1|auto|disabled|enabled|false|off|on|true -sm=layer|none|row|tensor
""",
    },
}  # fmt: skip
"""By engine: which values of an argument each span of versions has."""
