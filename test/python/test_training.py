# SPDX-License-Identifier: Apache-2.0
"""Layers in a training program of torch: ranks are processes with gloo, each on an emulated node of its own. DTensors,
distributed checkpoints, clipping, optimizers, meta device, FSDP2, DDP, torch's parallel styles. run.py runs it on the
software NIC."""
import copy
import io
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ranks import random
from torch import nn
from torch._inductor.codecache import FxGraphHashDetails
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import post_grad
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               parallelize_module)
from torch.fx.experimental.proxy_tensor import make_fx

import perseus

HIDDEN, INNER = 64, 96


class Mlp(nn.Module):
    def __init__(self, group=None, **options):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16, device=options.get("device"))
        self.up = perseus.nn.ColumnParallelLinear(HIDDEN, INNER, group, bias=True, **options)
        self.down = perseus.nn.RowParallelLinear(INNER, HIDDEN, group, bias=True, **options)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def made(mesh, seed=0):
    torch.manual_seed(seed)
    return perseus.nn.replicate(Mlp(mesh), mesh)


def step(model, optimizer, group, rows=16):
    x = random(group.rank, rows, HIDDEN)
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    perseus.nn.sum_replicated_gradients(model, group)
    optimizer.step()


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def part(t):
    return t.to_local() if isinstance(t, DTensor) else t


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(whole(a[key]), whole(b[key])) for key in a)


def saved(model):
    """A model as torch.save() and torch.load() give it again."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Own(nn.Linear):
    """A class of the program's own."""


# ---- what the ranks do; each returns what failed, by name ----

def parameters(mesh, folder):
    group, model = perseus.init(mesh), made(mesh)
    wanted = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "down.bias": Replicate(),
              "norm.weight": Replicate(), "norm.bias": Replicate()}
    yield "placements", {key: p.placements[0] for key, p in model.named_parameters()} == wanted
    yield "init(mesh) is one group", perseus.init(mesh) is group and perseus.find(mesh) is group and group.mesh is mesh
    torch.manual_seed(0)
    again = made(mesh)
    yield "a seed gives the same shards", same(dict(model.named_parameters()), dict(again.named_parameters()))
    shards = [torch.empty_like(model.up.weight.to_local()) for _ in range(group.world)]
    dist.all_gather(shards, model.up.weight.to_local())
    yield "shards differ", group.world == 1 or not torch.equal(shards[0], shards[1])
    with torch.device("meta"):
        empty = perseus.nn.replicate(Mlp(mesh, device="meta"), mesh)
    yield "meta", all(p.is_meta and isinstance(p, DTensor) for p in empty.parameters())
    empty = empty.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in empty.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    yield "reset_parameters after to_empty", torch.equal(whole(empty.up.weight), whole(model.up.weight))
    yield "kept by to_empty", {key: p.placements[0] for key, p in empty.named_parameters()} == wanted
    assigned = made(mesh, seed=1)
    assigned.load_state_dict(model.state_dict(), assign=True)
    for name, m in (("the model", model), ("a copy", copy.deepcopy(model)), ("assigned", assigned),
                    ("from meta", empty), ("saved whole", saved(model))):
        m.zero_grad()
        m(random(group.rank, 16, HIDDEN)).float().sum().backward()
        parts = {key: p.grad.placements[0] for key, p in m.named_parameters()}
        yield (f"{name}: gradients are parts",
               all((parts[key] == Partial()) == (wanted[key] == Replicate()) for key in parts))
        expected = {key: whole(p.grad) for key, p in m.named_parameters() if wanted[key] == Replicate()}
        perseus.nn.sum_replicated_gradients(m.parameters(), group)
        yield (f"{name}: gradients are summed",
               all(p.grad.placements[0] == wanted[key] for key, p in m.named_parameters()))
        yield (f"{name}: sums are right",
               all(torch.allclose(whole(p.grad).float(), expected[key].float(), rtol=0.02, atol=0.05)
                   for key, p in m.named_parameters() if key in expected))
    own, x = Own(HIDDEN, INNER, dtype=torch.bfloat16), random(0, 16, HIDDEN)
    linear = parallelize_module(own, mesh, perseus.parallel.ColwiseParallel())
    again = saved(linear)
    yield "a layer of a class of one's own, saved", torch.equal(again(x), linear(x)) and isinstance(again, Own)
    yield "copies are of one class", type(copy.deepcopy(model).norm) is type(model.norm)


def clipping(mesh, folder):
    group, model = perseus.init(mesh), made(mesh)
    model(random(group.rank, 16, HIDDEN)).float().sum().backward()
    perseus.nn.sum_replicated_gradients(model, group)
    full = torch.stack([whole(p.grad).float().norm() for p in model.parameters()]).norm()
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)).float()
    norms = [torch.empty_like(norm) for _ in range(group.world)]
    dist.all_gather(norms, norm)
    yield "equal on all ranks", all(torch.equal(n, norm) for n in norms)
    yield "the norm of the whole", bool((norm - full).abs() < 0.02 * full)
    clipped = torch.stack([whole(p.grad).float().norm() for p in model.parameters()]).norm()
    yield "clipped", bool((clipped - 0.5).abs() < 0.02)
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        step(model, optimizer, group)
        yield f"AdamW, fused={fused}", all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())


def write(mesh, folder):
    group, model = perseus.init(mesh), made(mesh, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        step(model, optimizer, group)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    moments = get_optimizer_state_dict(model, optimizer,
                                       options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if group.rank == 0:
        torch.save({"model": full, "moments": {key: {name: whole(t) for name, t in each.items()}
                                               for key, each in moments["state"].items()}},
                   os.path.join(folder, "whole.pt"))
    other = made(mesh, seed=6)
    read = {"model": other.state_dict()}
    yield "another seed is another model", not same(model.state_dict(), read["model"])
    dcp.load(read, checkpoint_id=folder)
    other.load_state_dict(read["model"])
    yield ("every rank has its own shard again",
           all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters())))


def read(mesh, folder):
    """By another number of ranks."""
    group, model = perseus.init(mesh), made(mesh, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, group)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    written = torch.load(os.path.join(folder, "whole.pt"))
    yield "the model", same(dict(model.named_parameters()), written["model"])
    names = dict(model.named_parameters())
    yield ("the optimizer", all(torch.equal(whole(optimizer.state[names[key]][name]), each[name])
                                for key, each in written["moments"].items() for name in ("exp_avg", "exp_avg_sq")))


def fsdp(mesh, folder):
    two = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    dp, tp = two["dp"], two["tp"]
    group = perseus.init(tp)
    plain, model = made(tp), made(tp)
    fully_shard(model, mesh=dp)
    x = random(group.rank, 16, HIDDEN)
    for m in (plain, model):
        m(x).float().square().mean().backward()
        perseus.nn.sum_replicated_gradients(m, group)
    yield "gradients", all(torch.allclose(whole(p.grad).float(), whole(q.grad).float(), rtol=0.02, atol=1e-3)
                           for p, q in zip(model.parameters(), plain.parameters()))
    torch.manual_seed(11)
    model.up.reset_parameters()
    torch.manual_seed(11)
    plain.up.reset_parameters()
    yield "reset_parameters of what is sharded twice", torch.equal(whole(model.up.weight), whole(plain.up.weight))
    marked = nn.Sequential(perseus.nn.mark_replicated(nn.LayerNorm(HIDDEN)))
    fully_shard(marked, mesh=dp)
    for p in marked.parameters():
        p.grad = torch.full_like(p, group.rank + 1.0)
    perseus.nn.sum_replicated_gradients(marked, group)
    yield ("marks", all(whole(p.grad).unique().tolist() == [group.world * (group.world + 1) / 2]
                        for p in marked.parameters()))


def ddp(mesh, folder):
    """Over a world that contains the ranks of the layers: shards stay what they were, or it is refused."""
    whole_model = made(mesh)
    for name, model in (("all of a model", whole_model), ("what is split by rows", whole_model.up),
                        ("a copy of a part", copy.deepcopy(whole_model.down))):
        before = [p.to_local().clone() for p in model.parameters()]
        try:
            torch.nn.parallel.DistributedDataParallel(model)
        except Exception as e:
            print(f"DDP, {name}: {type(e).__name__}: {e}", file=sys.stderr)
        yield (f"shards are as before: {name}",
               all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before)))


class Block(nn.Module):
    """A Llama-like block of plain modules. [batch, sequence, hidden]."""

    def __init__(self, heads=4, bias=True):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=bias, dtype=torch.bfloat16))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False, dtype=torch.bfloat16)
                                         for sizes in ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)))

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, HIDDEN // self.heads)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def styles(mesh, folder):
    group = perseus.init(mesh)
    for dim, sequence in (("sequence", 1), ("none", None)):
        into = Replicate() if sequence is None else Shard(sequence)
        ours = {"column": perseus.parallel.ColwiseParallel(sequence_dim=sequence),
                "row": perseus.parallel.RowwiseParallel(sequence_dim=sequence)}
        theirs = {"column": ColwiseParallel(input_layouts=into), "row": RowwiseParallel(output_layouts=into)}
        found = []
        for style in (ours, theirs):
            torch.manual_seed(2)
            model = Block()
            plan = {name: style["row" if name in ("wo", "down") else "column"]
                    for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")}
            if sequence is not None:
                plan.update({name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "mlp_norm")})
            parallelize_module(model, mesh, plan)
            if sequence is None:
                perseus.nn.replicate(model, mesh, sequence_parallel=False)
            optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
            for number in range(4):
                x, target = (random(0, 2, 8, HIDDEN, seed=s + number) for s in (20, 40))
                if sequence is not None:
                    x, target = (t.chunk(group.world, 1)[group.rank] for t in (x, target))
                loss = (model(x).float() - target.float()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                if number == 0:
                    grads = {key: whole(p.grad).float() for key, p in model.named_parameters()}
                perseus.nn.sum_replicated_gradients(model, group)
                optimizer.step()
                losses.append(loss.detach())
            found.append((grads, torch.stack(losses),
                          {key: p.placements for key, p in model.named_parameters()}, model))
        (grads, losses, placements, model), (wanted, wanted_losses, wanted_placements, _) = found
        yield f"{dim}: placements are torch's", placements == wanted_placements
        yield (f"{dim}: losses {losses.tolist()}, torch's {wanted_losses.tolist()}",
               bool((losses - wanted_losses).abs().max() < 0.01 * losses[0]))
        # softmax does not see a bias of keys: its gradient is noise
        least = 0.05 * max(g.square().mean().sqrt() for g in wanted.values())
        for key in grads:
            error = (grads[key] - wanted[key]).abs().max() / wanted[key].square().mean().sqrt().clamp_min(least)
            yield f"{dim}: gradient of {key}: {error:g}", bool(error < 0.2)
        yield (f"{dim}: every product is ours",
               all(type(m).__name__ == "_Split" for m in model.modules() if isinstance(m, nn.Linear)))
    x = DTensor.from_local(random(group.rank, 2, 4, HIDDEN), mesh, [Shard(1)])
    linear = parallelize_module(nn.Linear(HIDDEN, INNER, dtype=torch.bfloat16), mesh,
                                perseus.parallel.ColwiseParallel(sequence_dim=1, use_local_output=False))
    y = linear(x)
    yield "DTensors in and out", y.placements == (Shard(2),) and tuple(y.shape) == (2, 4 * group.world, INNER)
    try:
        parallelize_module(nn.Linear(HIDDEN, 2 * group.world + 1), mesh, perseus.parallel.ColwiseParallel())
        yield "features that the ranks do not divide", group.world == 1
    except ValueError as e:
        yield "features that the ranks do not divide", "must divide" in str(e)


class Shared(nn.Module):
    """Products that share an input, which something else reads too. `odd` has columns that ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down, self.odd = (nn.Linear(*sizes, dtype=torch.bfloat16) for sizes in (
            (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, 7)))

    def forward(self, x, factor):
        """factor: multiplies the input of up; 1: up and gate have the same input."""
        y = self.down(F.silu(self.gate(x)) * self.up(x if factor.numel() == 1 else x * factor))
        return y * part(x.mean((1, 2), keepdim=True)), self.odd(x)


class Branch(nn.Module):
    """Does not call all of its products."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.up, self.gate = (nn.Linear(HIDDEN, INNER, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        return self.up(1 // 0 if self.fails else x)


def plans(mesh, folder):
    """Plans of torch's styles that fused() has changed give the same."""
    group = perseus.init(mesh)
    for local in (True, False):
        plan = {"0": PrepareModuleInput(input_layouts=(Shard(1), Replicate()),
                                        desired_input_layouts=(Replicate(), Replicate()), use_local_output=local),
                "0.up": ColwiseParallel(), "0.gate": ColwiseParallel(), "0.odd": ColwiseParallel(),
                "0.down": RowwiseParallel(output_layouts=Shard(1))}
        changed = perseus.parallel.fused(plan)
        yield f"the styles of {changed}", isinstance(changed["0"], perseus.parallel.GatheredInput)
        for factor in (torch.ones(1), random(0, 2, 4 * group.world, HIDDEN)):
            found = []
            for p in (plan, changed):
                torch.manual_seed(3)
                model = nn.ModuleList([Shared()])
                parallelize_module(model, mesh, p)
                x = random(group.rank, 2, 4, HIDDEN).requires_grad_()
                y, odd = model[0](x, factor)
                (whole(y).float().square().mean() + whole(odd).float().square().mean()).backward()
                found.append([whole(y).detach(), whole(odd).detach(), x.grad,
                              *(whole(q.grad) for q in model.parameters())])
            for i, (a, b) in enumerate(zip(*found)):
                error = (a.float() - b.float()).abs().max() / b.float().square().mean().sqrt().clamp_min(1e-6)
                yield f"local {local}, factor {factor.numel()}, {i}: {error:g}", bool(error < 0.2)
        kinds = [type(getattr(model[0], name)).__name__ for name in ("up", "gate", "down", "odd")]
        yield f"kinds {kinds}", kinds == ["_Split"] * 3 + (["Linear"] if 7 % group.world else ["_Split"])
    for fails in (False, True):
        one = Branch(fails)
        parallelize_module(one, mesh, {"": perseus.parallel.GatheredInput("up", "gate"),
                                       "up": perseus.parallel.ColwiseParallel(),
                                       "gate": perseus.parallel.ColwiseParallel()})
        try:
            one(random(group.rank, 2, 4, HIDDEN))
        except ZeroDivisionError:
            pass
        yield (f"no result stays, fails {fails}", one.gate.perseus_given is None and one.up.perseus_given is None
               and torch.equal(whole(copy.deepcopy(one).up.weight), whole(one.up.weight)))
    try:
        parallelize_module(Shared(), mesh, perseus.parallel.GatheredInput("up"))(x=x)
        yield "no positional input", False
    except TypeError as e:
        yield "no positional input", "positional input" in str(e)


def async_tp(mesh, folder):
    """torch's pass for asynchronous tensor parallelism with our ops, on graphs of an MLP as DTensors make it."""
    group, name = perseus.init(mesh), mesh.get_group().group_name

    def mlp(x, w1, w2, w3, dim):
        whole_x = funcol.all_gather_tensor(x, dim, name)
        return funcol.reduce_scatter_tensor((F.silu(whole_x @ w1) * (whole_x @ w2)) @ w3, "sum", dim, name)
    def key():  # as far as passes are concerned
        details = FxGraphHashDetails(torch.fx.GraphModule({}, torch.fx.Graph()), [], {}, [])
        return str(details.post_grad_custom_post_pass)
    without, came = key(), []
    own = type("Pass", (CustomGraphPass,), {"__call__": lambda self, graph: came.append(graph), "uuid": lambda self: 7})
    torch._inductor.config.post_grad_custom_post_pass = own()
    alone = key()
    perseus.enable_inductor()
    perseus.enable_inductor()
    fuse, found = torch._inductor.config.post_grad_custom_post_pass, key()
    with mock.patch.dict(perseus._registry._groups, {"another": None}):
        yield "Inductor's cache has other graphs", len({without, alone, found, key()}) == 4
    for batch, dim, dtype, wanted in ((8, 0, torch.bfloat16, 2), (8, 1, torch.bfloat16, 2), (1, 1, torch.bfloat16, 2),
                                      (8, 0, torch.float32, 0)):
        arguments = [random(group.rank, *shape, seed=s, dtype=dtype) for s, shape in enumerate(
            ((batch, 4, HIDDEN), (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)))]
        traced = make_fx(lambda *tensors: funcol.wait_tensor(mlp(*tensors, dim)), tracing_mode="fake",
                         decomposition_table={torch.ops.aten._unsafe_view.default: torch.Tensor.view})(*arguments)
        before = traced(*arguments)
        post_grad.view_to_reshape(traced)
        fuse(traced.graph)
        for node in traced.graph.nodes:
            if "force_stride_order" in str(node.target):  # Inductor's own, which nothing runs eagerly
                node.replace_all_uses_with(node.args[0])
        traced.graph.eliminate_dead_code()
        traced.recompile()
        ours = sum("perseus" in str(node.target) for node in traced.graph.nodes)
        yield "a pass of the program's own comes first", came.pop() is traced.graph and not came
        yield f"batch {batch}, dim {dim}, {dtype}: {ours} ops of ours in {traced.graph}", ours == wanted
        if wanted:
            after = traced(*arguments)
            error = (after.float() - before.float()).abs().max() / before.float().square().mean().sqrt()
            yield f"batch {batch}, dim {dim}: {error:g}", bool(error < 0.1)


def page(mesh, folder):
    """The program of doc/training.md."""
    made = {}
    exec(ranks.page("A loop of your own", "python", [
        ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""), ('dist.init_process_group("nccl")\n', ""),
        ('"cuda"', '"cpu"'), ("4096", "64"), ("14336", "96")]), made)
    found = made["loss"].item()
    yield f"the loss {found}", 0 < found < 10
    yield "the feed-forward shares a gather", type(made["model"].ffn.gate).__name__ == "_Split"


BODIES = {body.__name__: body for body in (parameters, clipping, write, read, fsdp, ddp, styles, plans, async_tp, page)}


def rank_main(names, folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    perseus.init(mesh, device=0, timeout_ms=ranks.LIMIT_S * 1000)
    os._exit(min(100, sum(ranks.judge(name, BODIES[name](mesh, folder)) for name in names)))


class Training(unittest.TestCase):
    def run_ranks(self, world, *names, folder=""):
        self.assertEqual(ranks.processes(rank_main, world, names, folder), [0] * world)

    def test_parameters_know_their_part(self):
        self.run_ranks(2, "parameters", "clipping")

    def test_a_checkpoint_is_read_by_any_number_of_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_ranks(2, "write", folder=folder)
            self.assertTrue(any(pathlib.Path(folder).iterdir()))
            for world in (1, 2):
                self.run_ranks(world, "read", folder=folder)

    def test_fsdp_and_ddp(self):
        self.run_ranks(2, "fsdp", "ddp")

    def test_torchs_parallel_styles_give_the_same(self):
        self.run_ranks(2, "styles", "plans", "async_tp", "page")


if __name__ == "__main__":
    ranks.main()
