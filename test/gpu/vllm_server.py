#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test/gpu/vllm_server.py OUT.json: vLLM's engine decodes with a model of Qwen3-30B-A3B's shape (random weights, fewer
layers) on all GPUs, with Perseus and without. Both engines are there at once and take turns. First greedy tokens with
log-probabilities, of each way with the other's, and of each with itself in batches of one; then steps of decoding in
CUDA graphs: the GPU's time of a forward pass, and the host's time of a step."""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

WAYS, VOCABULARY, PROMPTED, TOKENS, STEPS, ROUNDS = ("vllm", "perseus"), 8192, (1, 8, 32), 24, 60, 3
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "intermediate_size": 6144, "hidden_act": "silu", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06, "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_sliding_window": False,
    "use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}


# ---- one rank of one engine ----
def initialize(tensor, state):
    """A weight of about the size that a trained one has. Both ways have the same; each rank has experts of its own."""
    import torch
    if not torch.is_floating_point(tensor) or tensor.dim() == 0:  # scales stay 1
        return
    state["count"] += 1
    if tensor.dim() == 1:
        tensor.data.fill_(1)
        return
    experts, router = tensor.dim() == 3, tensor.shape[0] == MODEL["num_experts"]
    seed = 2 * state["count"] + (state["rank"] if experts or state["split"] and not router else 0)
    # A peaked router, as trained ones are: with a flat one the last bit of a token decides between experts that count.
    deviation = 1 if state["count"] == 1 else tensor.shape[-1] ** -0.5 * (1.6 if experts else 4 if router else 1)
    tensor.data.normal_(0, deviation, generator=torch.Generator(device=tensor.device).manual_seed(seed))


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


class Turns:
    """The ways go round by round, in their order; files say how far each is."""

    def __init__(self, args, rank, group):
        self.args, self.rank, self.group = args, rank, group

    def there(self, what):
        return pathlib.Path(self.args.folder, what).exists()

    def wait(self, number):
        import torch.distributed as dist
        if self.rank == 0:
            pathlib.Path(self.args.folder, f"ready-{self.args.way}").touch()
            earlier = WAYS[:WAYS.index(self.args.way)]
            wanted = [f"ready-{way}" for way in WAYS] + [f"done-{number}-{way}" for way in earlier] + [
                f"done-{number - 1}-{way}" for way in WAYS if number]
            while not all(self.there(w) or self.there(f"ended-{w.rsplit('-', 1)[1]}") for w in wanted):
                time.sleep(0.002)
        dist.barrier(group=self.group)

    def done(self, number, result):
        import torch
        import torch.distributed as dist
        torch.cuda.synchronize()
        pathlib.Path(self.args.folder, f"{self.args.way}-{self.rank}.json").write_text(json.dumps(result))
        dist.barrier(group=self.group)
        if self.rank == 0:
            pathlib.Path(self.args.folder, f"done-{number}-{self.args.way}").touch()


def timed(owner, method, spans):
    """From now on the GPU's time of each call is written down."""
    import torch
    inner = getattr(owner, method)

    def call(*args, **kwargs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = inner(*args, **kwargs)
        end.record()
        spans.append((begin, end))
        return result
    setattr(owner, method, call)


def engine(args):
    import torch
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import vllm
    from vllm import SamplingParams, TokensPrompt
    llm = made(args, rank, world)
    from vllm.distributed.parallel_state import get_world_group
    worker = llm.llm_engine.model_executor.driver_worker.worker
    spans, turns = [], Turns(args, rank, get_world_group().cpu_group)
    timed(worker.model_runner.cudagraph_manager, "run_fullgraph", spans)
    result = {"vllm": vllm.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name(),
              "tokens": {}, "gpu_ms": {}, "host_ms": {}}

    def prompts(batch, salt):
        generator = torch.Generator().manual_seed(1000 * batch + salt + (0 if args.tensor else rank))
        return [TokensPrompt(prompt_token_ids=torch.randint(10, VOCABULARY, (16 + i % 5,),
                                                            generator=generator).tolist()) for i in range(batch)]

    def sequences(given):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3, detokenize=False)
        return [[list(o.outputs[0].token_ids), [{int(t): l.logprob for t, l in step.items()}
                                                for step in o.outputs[0].logprobs]]
                for o in llm.generate(given, params, use_tqdm=False)]

    def steps(batch):
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts(batch, 7)):
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
        result["tokens"][batch] = sequences(prompts(batch, 0))
    result["alone"] = [s for prompt in prompts(8, 0) for s in sequences([prompt])]
    turns.done(0, result)
    for number in range(1, ROUNDS + 1):
        turns.wait(number)
        for batch in args.sizes:
            for name, times in zip(("host_ms", "gpu_ms"), steps(batch)):
                result[name].setdefault(batch, []).extend(times)
        turns.done(number, result)


# ---- all of them ----
def compare(a, b):
    """Sequences of tokens with the log-probabilities of each step, compared as long as the tokens before are equal."""
    equal, differences = 0, []
    for (tokens, logs), (others, other_logs) in zip(a, b):
        equal += tokens == others
        for step in range(len(tokens)):
            if tokens[:step] != others[:step]:
                break
            differences += [abs(logs[step][t] - other_logs[step][t]) for t in set(logs[step]) & set(other_logs[step])]
    return {"sequences": len(a), "equal": equal, "compared": len(differences),
            "logprob_median": round(statistics.median(differences), 5), "logprob_most": round(max(differences), 5)}


def rows_of(found, sizes):
    rows = [{"what": f"{way} with itself in batches of one", "batch": 8,
             **compare([s for r in found[way] for s in r["tokens"]["8"]], [s for r in found[way] for s in r["alone"]])}
            for way in WAYS]
    for batch in map(str, PROMPTED):
        rows.append({"what": "perseus with vllm", "batch": int(batch),
                     **compare(*([s for r in found[way] for s in r["tokens"][batch]] for way in WAYS))})
    for batch in (str(s) for s in sizes if all(str(s) in r["gpu_ms"] for way in WAYS for r in found[way])):
        row = {"what": "step", "batch": int(batch)}
        for way in WAYS:  # of the slower rank
            for name in ("gpu_ms", "host_ms"):
                row[f"{way}_{name}"] = round(max(statistics.median(r[name][batch]) for r in found[way]), 4)
        rows.append({**row, "ratio": round(row["perseus_gpu_ms"] / row["vllm_gpu_ms"], 3)})
    return rows


def start(args, way, port):
    began = []
    for rank in range(args.gpus):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.gpus), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port), VLLM_USE_V2_MODEL_RUNNER="1")
        with open(pathlib.Path(args.folder, f"{way}-{rank}.log"), "w") as log:
            began.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--way", way, "--folder",
                                           args.folder], env=env, stdout=log, stderr=subprocess.STDOUT))
    return began


def results(args, way):
    """What each rank has written."""
    text = pathlib.Path(args.folder, f"{way}-0.log").read_text()
    files = [pathlib.Path(args.folder, f"{way}-{rank}.json") for rank in range(args.gpus)]
    if not all(f.exists() for f in files):
        sys.exit(f"{way} has not ended within {args.seconds} s, or failed: {args.folder}\n{text[-3000:]}")
    for line in text.splitlines():
        if "Perseus runs" in line:
            print(line)
    return [json.loads(f.read_text()) for f in files]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32, 128], help="of batches, of a rank")
    parser.add_argument("--tensor", action="store_true", help="tensor parallelism rather than data parallelism")
    parser.add_argument("--norm", action="store_true", help="Perseus' sums with norms, with --tensor and --compile")
    parser.add_argument("--compile", action="store_true", help="vLLM compiles the model")
    parser.add_argument("--attention", default="TRITON_ATTN", help="vLLM's back end of attention")
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="for logs; each run wants a new one")
    args = parser.parse_args()
    args.folder = args.folder or tempfile.mkdtemp()
    if args.way:
        try:
            engine(args)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)  # threads of NCCL and vLLM would keep the process
    limit = time.time() + args.seconds
    pathlib.Path(args.folder).mkdir(exist_ok=True)
    pathlib.Path(args.folder, "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": args.layers}))
    running = {way: start(args, way, 29500 + os.getpid() % 999 * 2 + i) for i, way in enumerate(WAYS)}
    while any(p.poll() is None for ranks in running.values() for p in ranks) and time.time() < limit:
        for way, ranks in running.items():
            if any(p.poll() for p in ranks):  # the other ranks would wait for it
                pathlib.Path(args.folder, f"ended-{way}").touch()
                for p in ranks:
                    p.kill()
        time.sleep(0.1)
    for p in (p for ranks in running.values() for p in ranks):
        p.kill()
    found = {way: results(args, way) for way in WAYS}
    first = found["perseus"][0]
    rows = rows_of(found, args.sizes)
    pathlib.Path(args.out).write_text(json.dumps({k: first[k] for k in ("vllm", "torch", "device")} | {
        "layers": args.layers, "gpus": args.gpus, "rows": rows}, indent=1))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
