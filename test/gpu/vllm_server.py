#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test/gpu/vllm_server.py OUT.json: vLLM's engine decodes with a model of Qwen3-30B-A3B's shape (random weights, fewer
layers) on all GPUs, with Perseus and without. Both engines are there at once and take turns. First greedy tokens with
log-probabilities, of each way with the other's, and of each with itself in batches of one; then steps of decoding in
CUDA graphs: the GPU's time of a forward pass, and the host's time of a step."""
import argparse
import os
import time

from servers_common import (PROMPTED, ROUNDS, STEPS, TOKENS, Turns, initialize, parsed, prompts, report, results, start,
                            timed, wait_for)

WAYS = "vllm", "perseus"


# ---- one rank of one engine ----
def made(args, rank, world):
    """vLLM's engine in this process: a launcher has started the ranks, as torchrun does."""
    from vllm import LLM
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.models import registry

    # vLLM looks at its model's class in another process, which would import everything once more.
    registry._run_in_subprocess = lambda function: function()
    # Only sleep calls these, and the NCCL of torch 2.11 does not have them.
    NCCLLibrary.exported_functions = [f for f in NCCLLibrary.exported_functions
                                      if f.name not in ("ncclCommSuspend", "ncclCommResume")]
    state = {"count": 0, "rank": rank, "split": args.tensor}
    dummy_loader.initialize_single_dummy_weight = lambda tensor, *unused, **ignored: initialize(tensor, state)
    asked = {"perseus": {"norm": True} if args.norm else True} if args.way == "perseus" else {}
    return LLM(model=args.folder, skip_tokenizer_init=True, load_format="dummy", enable_expert_parallel=True,
               distributed_executor_backend="external_launcher", max_model_len=1024, max_num_batched_tokens=2048,
               max_num_seqs=max(args.sizes), gpu_memory_utilization=0.25, kv_cache_memory_bytes=1 << 30, seed=0,
               attention_backend=args.attention, enable_prefix_caching=False, async_scheduling=False,
               disable_log_stats=True, additional_config=asked,
               kernel_config={"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False,
                              "enable_jit_warmup": False},
               compilation_config={"mode": 3 if args.compile else 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                                   "cudagraph_capture_sizes": args.sizes},
               **{"tensor_parallel_size" if args.tensor else "data_parallel_size": world})


def engine(args):
    import torch
    import torch.distributed as dist
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import vllm
    from vllm import SamplingParams, TokensPrompt
    llm = made(args, rank, world)
    from vllm.distributed.parallel_state import get_world_group
    worker = llm.llm_engine.model_executor.driver_worker.worker
    spans, group = [], get_world_group().cpu_group
    turns = Turns(args.folder, args.way, WAYS, rank == 0, lambda: dist.barrier(group=group))
    timed(worker.model_runner.cudagraph_manager, "run_fullgraph", spans)
    result = {"vllm": vllm.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name(),
              "tokens": {}, "gpu_ms": {}, "host_ms": {}}

    def asked(batch, salt):
        return [TokensPrompt(prompt_token_ids=p) for p in prompts(batch, salt, 0 if args.tensor else rank)]

    def sequences(given):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3, detokenize=False)
        return [[list(o.outputs[0].token_ids), [{int(t): l.logprob for t, l in step.items()}
                                                for step in o.outputs[0].logprobs]]
                for o in llm.generate(given, params, use_tqdm=False)]

    def steps(batch):
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(asked(batch, 7)):
            llm.llm_engine.add_request(f"{batch}-{time.time()}-{i}", prompt, params)
        spans.clear()
        walls = []
        while llm.llm_engine.has_unfinished_requests():
            began = time.perf_counter()
            llm.llm_engine.step()
            walls.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        return walls[8:-2], [begin.elapsed_time(end) for begin, end in spans][8:-2]

    turns.wait(0)
    for batch in PROMPTED:
        result["tokens"][batch] = sequences(asked(batch, 0))
    result["alone"] = [s for prompt in asked(8, 0) for s in sequences([prompt])]
    torch.cuda.synchronize()
    turns.done(0, rank, result)
    for number in range(1, ROUNDS + 1):
        turns.wait(number)
        for batch in args.sizes:
            for name, times in zip(("host_ms", "gpu_ms"), steps(batch)):
                result[name].setdefault(batch, []).extend(times)
        torch.cuda.synchronize()
        turns.done(number, rank, result)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32, 128], help="of batches, of a rank")
    parser.add_argument("--tensor", action="store_true", help="tensor parallelism rather than data parallelism")
    parser.add_argument("--norm", action="store_true", help="Perseus' sums with norms, with --tensor and --compile")
    parser.add_argument("--compile", action="store_true", help="vLLM compiles the model")
    parser.add_argument("--attention", default="TRITON_ATTN", help="vLLM's back end of attention")
    args = parsed(parser, 110, engine)
    port = 29500 + os.getpid() % 999 * 2
    running = {way: [start(args.folder, way, rank, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.gpus),
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + i), VLLM_USE_V2_MODEL_RUNNER="1")
                     for rank in range(args.gpus)] for i, way in enumerate(WAYS)}
    wait_for(running, args.folder, args.seconds)
    found = {way: results(args.folder, way, args.gpus, args.seconds) for way in WAYS}
    report(args.out, found, WAYS, args.sizes, ("vllm", "torch", "device"), layers=args.layers, gpus=args.gpus)


if __name__ == "__main__":
    main()
