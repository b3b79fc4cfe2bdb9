# SPDX-License-Identifier: Apache-2.0
"""What vllm_server.py and sglang_server.py share: a model of Qwen3-30B-A3B's shape, engines that take turns, and the
comparison of their tokens, log-probabilities and times. WAYS of a caller: the server alone, then with Perseus."""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

VOCABULARY, PROMPTED, TOKENS, STEPS, ROUNDS = 8192, (1, 8, 32), 24, 60, 3
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "intermediate_size": 6144, "hidden_act": "silu", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06, "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_sliding_window": False,
    "use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}


def write_model(folder, layers):
    pathlib.Path(folder).mkdir(exist_ok=True)
    pathlib.Path(folder, "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": layers}))


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


def prompts(batch, salt, rank):
    """Lists of tokens for a rank's batch."""
    import torch
    generator = torch.Generator().manual_seed(1000 * batch + salt + rank)
    return [torch.randint(10, VOCABULARY, (16 + i % 5,), generator=generator).tolist() for i in range(batch)]


class Turns:
    """The ways go round by round, in their order; files say how far each is. leader: this process reads and writes
    them. barrier: of the processes of a way."""

    def __init__(self, folder, way, ways, leader=True, barrier=lambda: None):
        self.folder, self.way, self.ways, self.leader, self.barrier = folder, way, ways, leader, barrier

    def there(self, what):
        return pathlib.Path(self.folder, what).exists()

    def wait(self, number):
        if self.leader:
            pathlib.Path(self.folder, f"ready-{self.way}").touch()
            earlier = self.ways[:self.ways.index(self.way)]
            wanted = [f"ready-{way}" for way in self.ways] + [f"done-{number}-{way}" for way in earlier] + [
                f"done-{number - 1}-{way}" for way in self.ways if number]
            while not all(self.there(w) or self.there(f"ended-{w.rsplit('-', 1)[1]}") for w in wanted):
                time.sleep(0.002)
        self.barrier()

    def done(self, number, rank, result):
        pathlib.Path(self.folder, f"{self.way}-{rank}.json").write_text(json.dumps(result))
        self.barrier()
        if self.leader:
            pathlib.Path(self.folder, f"done-{number}-{self.way}").touch()


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


# ---- the script ----
def parsed(parser, seconds, engine):
    """The arguments, with those that both scripts have. In a process of a way: runs its engine, and ends."""
    parser.add_argument("out")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=seconds)
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
        os._exit(0)  # threads of NCCL and the server would keep the process
    write_model(args.folder, args.layers)
    return args


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


def rows_of(found, sizes, ways):
    rows = [{"what": f"{way} with itself in batches of one", "batch": 8,
             **compare([s for r in found[way] for s in r["tokens"]["8"]], [s for r in found[way] for s in r["alone"]])}
            for way in ways]
    for batch in map(str, PROMPTED):
        rows.append({"what": f"perseus with {ways[0]}", "batch": int(batch),
                     **compare(*([s for r in found[way] for s in r["tokens"][batch]] for way in ways))})
    for batch in (str(s) for s in sizes if all(str(s) in r["gpu_ms"] for way in ways for r in found[way])):
        row = {"what": "step", "batch": int(batch)}
        for way in ways:  # of the slower rank
            for name in ("gpu_ms", "host_ms"):
                row[f"{way}_{name}"] = round(max(statistics.median(r[name][batch]) for r in found[way]), 4)
        rows.append({**row, "ratio": round(row["perseus_gpu_ms"] / row[f"{ways[0]}_gpu_ms"], 3)})
    return rows


def start(folder, way, rank, **env):
    """The script once more, as a process of a way, whose log is in the folder."""
    with open(pathlib.Path(folder, f"{way}-{rank}.log"), "w") as log:
        return subprocess.Popen([sys.executable, sys.argv[0], *sys.argv[1:], "--way", way, "--folder", folder],
                                env=dict(os.environ, **env), stdout=log, stderr=subprocess.STDOUT,
                                start_new_session=True)


def kill(process):
    """It and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait_for(running, folder, seconds):
    """Until all processes of `running` (way: list) have ended, or for so long. A way of which one fails has ended."""
    limit = time.time() + seconds
    while any(p.poll() is None for ranks in running.values() for p in ranks) and time.time() < limit:
        for way, ranks in running.items():
            if any(p.poll() for p in ranks):  # the other ranks would wait for it
                pathlib.Path(folder, f"ended-{way}").touch()
                for p in ranks:
                    kill(p)
        time.sleep(0.1)
    for p in (p for ranks in running.values() for p in ranks):
        kill(p)


def results(folder, way, ranks, seconds):
    """What each rank has written."""
    text = pathlib.Path(folder, f"{way}-0.log").read_text()
    files = [pathlib.Path(folder, f"{way}-{rank}.json") for rank in range(ranks)]
    if not all(f.exists() for f in files):
        sys.exit(f"{way} has not ended within {seconds} s, or failed: {folder}\n{text[-3000:]}")
    for line in text.splitlines():
        if "Perseus runs" in line:
            print(line)
    return [json.loads(f.read_text()) for f in files]


def report(out, found, ways, sizes, names, **more):
    """Write and print the rows. names: of what a rank's result says of its software."""
    first, rows = found[ways[1]][0], rows_of(found, sizes, ways)
    pathlib.Path(out).write_text(json.dumps({k: first[k] for k in names} | {**more, "rows": rows}, indent=1))
    for row in rows:
        print(row)
