#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test/gpu/sglang_server.py OUT.json: SGLang's offline engine decodes with a model of Qwen3-30B-A3B's shape (random
weights, fewer layers) on all GPUs, with data-parallel attention and expert parallelism, with Perseus and without. Both
engines are there at once and take turns. First greedy tokens with log-probabilities, of each way with the other's, and
of each with itself in batches of one; then steps of decoding in CUDA graphs: the GPU's time of a replay (gpu_ms), and
the time from one replay to the next (host_ms). Logs are in --folder."""
import argparse
import json
import os
import pathlib
import time

from servers_common import (PROMPTED, ROUNDS, STEPS, TOKENS, Turns, initialize, parsed, prompts, report, results, start,
                            wait_for)

WAYS = "sglang", "perseus"
# Programs that use NVLink multicast can hang GPUs that others share. SGLang has it in its own all-reduce, in NCCL, and
# in torch's symmetric memory.
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
         "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
         "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


# ---- one rank of one engine ----
class Steps:
    """Writes down each replay of a graph of decoding, when the GPU has done it: the batch of the graph, of this rank,
    the time since the replay before, when, and the GPU's time."""

    def __init__(self, path):
        self.file, self.open, self.last = open(path, "w", buffering=1), [], 0.0

    def around(self, inner):
        import torch

        def replay(runner, shape_key, static_forward_batch, **more):
            now, begin, end = time.perf_counter(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = inner(runner, shape_key, static_forward_batch, **more)
            end.record()
            self.open.append((shape_key.size, static_forward_batch.batch_size, (now - self.last) * 1e3, time.time(),
                              begin, end))
            self.last = now
            while self.open and self.open[0][-1].query():
                *before, first, then = self.open.pop(0)
                self.file.write(json.dumps([*before, first.elapsed_time(then)]) + "\n")
            return result
        return replay


def scheduler(server_args, port_args, gpu_id, tp_rank, *more, **options):
    """What SGLang runs for each rank, in a process of its own."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_loader import loader
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    state = {"count": 0, "rank": tp_rank, "split": False}
    loader.initialize_dummy_weights = lambda model: [initialize(tensor, state)
                                                     for tensor in model.state_dict().values()]
    steps = Steps(os.environ["PERSEUS_STEPS"] + f"-{tp_rank}.jsonl")
    FullCudaGraphBackend.replay = steps.around(FullCudaGraphBackend.replay)
    print(f"rank {tp_rank}: starts on GPU {gpu_id}", flush=True)
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *more, **options)


def options_of(args):
    most = max(args.sizes)
    options = {
        "model_path": args.folder, "skip_tokenizer_init": True, "load_format": "dummy", "random_seed": 0,
        "context_length": 1024, "max_total_tokens": 65536, "mem_fraction_static": 0.3,
        "tp_size": args.gpus, "ep_size": args.gpus, "dp_size": args.gpus, "enable_dp_attention": True,
        "enable_dp_lm_head": True, "load_balance_method": "round_robin", "max_running_requests": most * args.gpus,
        "chunked_prefill_size": 2048 * args.gpus, "attention_backend": args.attention, "sampling_backend": "pytorch",
        "grammar_backend": "none", "disable_radix_cache": True, "disable_custom_all_reduce": True,
        "disable_overlap_schedule": args.no_overlap, "cuda_graph_bs_decode": sorted({1, *args.sizes}),
        "disable_prefill_cuda_graph": True, "disable_flashinfer_autotune": True, "log_level": "info",
        "watchdog_timeout": 120, "port": args.port + 500 * WAYS.index(args.way), "moe_runner_backend": args.experts}
    if args.way == "perseus":
        options.update(moe_a2a_backend="deepep", moe_runner_backend="perseus")
    return {**options, **json.loads(args.options)}


def made(args):
    """SGLang's engine: this process takes requests, others are the ranks."""
    import sglang_server  # as a module that the ranks' processes can import
    from sglang.srt.entrypoints.engine import Engine

    class Ours(Engine):
        run_scheduler_process_func = staticmethod(sglang_server.scheduler)
    return Ours(**options_of(args))


def steps_of(args, rank, since):
    """{batch: ([ms of the GPU], [ms from replay to replay])} of full batches."""
    found = {}
    for line in pathlib.Path(args.folder, f"steps-{args.way}-{rank}.jsonl").read_text().splitlines():
        size, batch, between, when, gpu = json.loads(line)
        if size == batch and when > since:
            for times, value in zip(found.setdefault(batch, ([], [])), (gpu, between)):
                times.append(value)
    return found


def engine(args):
    os.environ["PERSEUS_STEPS"] = str(pathlib.Path(args.folder, f"steps-{args.way}"))
    began = time.time()
    llm = made(args)
    import sglang
    import torch
    print(f"{args.way}: the engine is there after {time.time() - began:.0f} s", flush=True)
    ranks = range(args.gpus)
    found = [{"sglang": sglang.__version__, "torch": torch.__version__,
              "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "tokens": {},
              "gpu_ms": {}, "host_ms": {}} for _ in ranks]
    turns = Turns(args.folder, args.way, WAYS)

    def generate(given, tokens, **more):
        return llm.generate(input_ids=given, sampling_params={"temperature": 0, "max_new_tokens": tokens,
                                                              "ignore_eos": True}, **more)

    def sequences(given, **more):
        return [[list(o["output_ids"]), [{int(t): p for p, t, *_ in step}
                                         for step in o["meta_info"]["output_top_logprobs"]]]
                for o in generate(given, TOKENS, return_logprob=True, top_logprobs_num=3, **more)]

    def of_all_ranks(batch, salt):
        """In the order in which requests go round the ranks."""
        return [p for row in zip(*(prompts(batch, salt, rank) for rank in ranks)) for p in row]

    def done(number):
        for rank in ranks:
            turns.done(number, rank, found[rank])
        print(f"{args.way}: round {number} is done after {time.time() - began:.0f} s", flush=True)

    turns.wait(0)
    for batch in PROMPTED:
        written = sequences(of_all_ranks(batch, 0))
        for rank in ranks:
            found[rank]["tokens"][batch] = written[rank::args.gpus]
    for rank in ranks:
        found[rank]["alone"] = [s for p in prompts(8, 0, rank) for s in sequences([p], routed_dp_rank=rank)]
    done(0)
    for number in range(1, ROUNDS + 1):
        turns.wait(number)
        since = time.time()
        for batch in args.sizes:
            generate(of_all_ranks(batch, 7), STEPS)
        generate(of_all_ranks(1, 7), 16)  # after these the last steps of the others are written
        for rank in ranks:
            for batch, times in steps_of(args, rank, since).items():
                for name, values in zip(("gpu_ms", "host_ms"), times):
                    if batch in args.sizes:
                        found[rank][name].setdefault(batch, []).extend(values[8:-2])
        done(number)
    llm.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128], help="of batches, of a rank")
    parser.add_argument("--attention", default="triton", help="SGLang's back end of attention")
    parser.add_argument("--experts", default="triton", help="SGLang's runner of experts, without Perseus")
    parser.add_argument("--no-overlap", action="store_true", help="SGLang's scheduler waits for each step")
    parser.add_argument("--options", default="{}", help="more of SGLang's options, as JSON; they win over ours")
    parser.add_argument("--port", type=int, default=31000)
    args = parsed(parser, 240, engine)
    here = str(pathlib.Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    running = {way: [start(args.folder, way, 0, PYTHONPATH=path, **QUIET)] for way in WAYS}
    wait_for(running, args.folder, args.seconds)
    found = {way: results(args.folder, way, args.gpus, args.seconds) for way in WAYS}
    report(args.out, found, WAYS, args.sizes, ("sglang", "torch", "device"), layers=args.layers, gpus=args.gpus)


if __name__ == "__main__":
    main()
