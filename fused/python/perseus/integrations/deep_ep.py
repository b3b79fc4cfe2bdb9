# SPDX-License-Identifier: Apache-2.0
"""DeepEP's Buffer (version 1 of its interface) over the MoE ops of this package, for programs that are written for it.

    perseus.integrations.deep_ep.install()   # from now on `import deep_ep` is this module
    buffer = deep_ep.Buffer(group, max_tokens=4096)
    received, chosen, weights, per_expert, handle, event = buffer.dispatch(x, topk_idx=..., topk_weights=..., ...)

Arguments, results and their meaning are DeepEP's. What differs: operations run on the current stream, in its order, so
events and hooks have nothing to wait for; sizes of buffers and numbers of SMs are taken and not used; plans are opened
at the first call with new sizes, which is collective. Each operation copies its rows once more than the ops of
perseus.moe do: new programs should call those.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._dispatch import _call
from .._registry import find
from ..moe import BLOCK, MoePlan, moe_dispatch, moe_plan
from ..moe_scaled import moe_scaled_dispatch

_bf16, _e4m3, _u8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
_UNUSED = {"num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank", "allow_mnnvl", "use_fabric",
           "allow_nvlink_for_low_latency_mode", "explicitly_destroy"}
Tensors = Any  # torch.bfloat16, or (torch.float8_e4m3fn, scales)


class EventOverlap:
    """An event that has passed: what follows on the stream comes after the operation."""
    event = None

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


class Config:
    """DeepEP's tuning, which is not used."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class _Handle(NamedTuple):
    """The way that tokens took. rows: the matrix of combine(); received: how many of them the caller has."""
    plan: MoePlan
    origins: torch.Tensor
    maps: torch.Tensor
    ones: torch.Tensor  # router weights of what was sent
    hidden: int
    received: int = 0
    places: Any = None  # low latency: a _Places


class _Places(NamedTuple):
    """Where rows of a plan and rows of a caller's [experts * slots] lie in one another: of the one that has fewer, the
    row of the other, or one beyond its end."""
    index: torch.Tensor
    of_slots: bool  # index[slot]: the plan's row; else index[row]: the slot
    rows: int
    slots: int

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """The plan's rows in their slots. Others hold anything."""
        return _taken(rows, self.index) if self.of_slots else _given(rows, self.index, self.slots)

    def collected(self, slots: torch.Tensor) -> torch.Tensor:
        return _given(slots, self.index, self.rows) if self.of_slots else _taken(slots, self.index)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """As 8 bytes each, if rows have so many: torch's kernels look up an address for every element."""
    return rows.contiguous().view(torch.int64 if rows.shape[1] * rows.element_size() % 8 == 0 else torch.int32)


def _taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index]; an index beyond the end takes any row."""
    return _wide(rows).index_select(0, index.clamp(max=len(rows) - 1)).view(rows.dtype)


def _given(rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """`count` rows, of which those at index are rows."""
    out = rows.new_empty(count + 1, rows.shape[1])
    _wide(out).index_copy_(0, index, _wide(rows))
    return out[:-1]


def _places(expert_rows: torch.Tensor, rows: int, slots: int) -> _Places:
    """slots: of an expert."""
    first, count = expert_rows[:, :1], expert_rows[:, 1:]
    local, device = len(expert_rows), expert_rows.device
    if local * slots <= rows:
        slot = torch.arange(slots, device=device)
        return _Places(torch.where(slot < count, first + slot, rows).view(-1), True, rows, local * slots)
    row = torch.arange(rows, dtype=torch.int32, device=device)
    expert = (torch.searchsorted(first[:, 0].contiguous(), row, right=True) - 1).clamp(min=0)
    within = row - first[expert, 0]
    return _Places(torch.where(within < count[expert, 0], expert * slots + within, local * slots), False, rows,
                   local * slots)


def _nothing() -> None:
    """A hook: the data has come, in the order of the stream."""


def _combined(rows: torch.Tensor, h: _Handle) -> torch.Tensor:
    return _call.moe_combine(rows, h.ones, h.origins, h.maps, None, False, h.plan.sizes, h.plan.group_name)


class Buffer:
    """group: a process group. max_tokens: the most that a rank sends in one dispatch(), the same on all ranks; memory
    for received rows is the worst case, so give it what is needed. All else is DeepEP's, and not used."""
    num_sms = 20

    def __init__(self, group: Any, *sizes: int, max_tokens: int = 4096, **unused: Any) -> None:
        if not unused.keys() <= _UNUSED:
            raise TypeError(f"perseus.integrations.deep_ep.Buffer: {', '.join(sorted(unused.keys() - _UNUSED))}: not "
                            "known, or not there yet")
        self.perseus = find(group)
        self.group, self.rank, self.group_size, self.max_tokens = (group, self.perseus.rank, self.perseus.world,
                                                                   max_tokens)

    # ---- what DeepEP has for its own memory and streams ----

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int,
                                       num_experts: int) -> int:
        return 0

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        pass

    def destroy(self) -> None:
        """Memory stays with the group, which other buffers share: perseus.find(group).close() gives it back."""

    # ---- normal: a token goes once to each rank that has one of its experts ----

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, previous_event: Any = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False) -> tuple:
        experts = torch.arange(num_experts, device=topk_idx.device)
        of_experts = (topk_idx[:, :, None] == experts).sum((0, 1), dtype=torch.int32)
        in_rank = torch.arange(self.group_size, device=topk_idx.device) == (
            topk_idx.div(num_experts // self.group_size, rounding_mode="floor"))[:, :, None]
        in_rank = in_rank.any(1)
        return in_rank.sum(0, dtype=torch.int32), None, of_experts, in_rank, EventOverlap()

    def dispatch(self, x: Tensors, handle: Any = None, num_tokens_per_rank: Any = None,
                 num_tokens_per_rdma_rank: Any = None, is_token_in_rank: torch.Tensor | None = None,
                 num_tokens_per_expert: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None,
                 topk_weights: torch.Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
                 config: Any = None, previous_event: Any = None, async_finish: bool = False,
                 allocate_on_comm_stream: bool = False) -> tuple:
        if handle is not None:
            return self._again(x, handle), None, None, None, None, EventOverlap()
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise ValueError("perseus.integrations.deep_ep.Buffer.dispatch: without a handle it needs topk_idx, "
                             "topk_weights and num_tokens_per_expert")
        experts, k = num_tokens_per_expert.shape[0], topk_idx.shape[1]
        local = experts // self.group_size
        d, hidden = self._sent(x, topk_idx, topk_weights, is_token_in_rank, experts)
        beside = d.rows.narrow(1, hidden, d.rows.shape[1] - hidden).contiguous().view(_u8)
        chosen = beside[:, :2 * k].contiguous().view(torch.int16).long() - self.rank * local
        weights = beside[:, 2 * k:6 * k].contiguous().view(torch.float32)
        there = torch.arange(len(beside), device=beside.device)[:, None] < d.expert_rows[0, 1]
        chosen = torch.where(there & (chosen >= 0) & (chosen < local), chosen, -1)
        weights = torch.where(chosen >= 0, weights, 0)
        per_expert, count = [], num_worst_tokens
        if not num_worst_tokens:
            counts = (chosen[:, :, None] == torch.arange(local, device=chosen.device)).sum((0, 1), dtype=torch.int32)
            count, *per_expert = torch.cat([d.expert_rows[0, 1:], counts]).tolist()  # the host waits here
            per_expert = [-(-n // expert_alignment) * expert_alignment for n in per_expert]
        received = d.rows[:count, :hidden].contiguous()
        if d.scales is not None:
            received = received, d.scales[:count, :-1].contiguous()
        made = _Handle(d.plan, d.origins, d.maps, d.router_weights, hidden, count)
        return received, chosen[:count], weights[:count], per_expert, made, EventOverlap()

    def _sent(self, x: Tensors, topk_idx: torch.Tensor, topk_weights: torch.Tensor, in_rank: torch.Tensor | None,
              experts: int) -> tuple:
        """Tokens go to ranks as to experts, one on each, with their choices and weights after them in the row."""
        numbers, scales = x if isinstance(x, tuple) else (x, None)
        count, hidden = numbers.shape
        if in_rank is None:
            in_rank = self.get_dispatch_layout(topk_idx, experts)[3]
        most = min(topk_idx.shape[1], self.group_size)
        ranks = torch.where(in_rank, torch.arange(self.group_size, device=in_rank.device), -1).topk(most).values
        beside = [topk_idx.to(torch.int16).view(_u8), topk_weights.float().contiguous().view(_u8)]
        width = sum(t.shape[1] for t in beside)
        beside.append(numbers.new_zeros(count, 128 - width if scales is not None else -width % 16, dtype=_u8))
        row = torch.cat([numbers.contiguous().view(_u8), *beside], 1).view(numbers.dtype)
        plan = moe_plan(max_tokens=self.max_tokens, hidden=row.shape[1], experts=self.group_size, top_k=most,
                        capacity=-(-self.group_size * self.max_tokens // BLOCK) * BLOCK, dtype=numbers.dtype,
                        group=self.perseus)
        ones = torch.ones(ranks.shape, device=ranks.device)
        if scales is None:
            return moe_dispatch(row, ranks.contiguous(), ones, plan), hidden
        scales = torch.cat([scales, scales.new_ones(count, 1)], 1)
        return moe_scaled_dispatch(row, ranks.contiguous(), ones, plan, token_scales=scales), hidden

    def _again(self, x: Tensors, h: _Handle) -> torch.Tensor:
        if isinstance(x, tuple) or h.plan.sizes[-1]:
            raise NotImplementedError("perseus.integrations.deep_ep.Buffer.dispatch: along a handle tokens are "
                                      "torch.bfloat16, and those before them were")
        row = torch.cat([x, x.new_zeros(len(x), h.plan.sizes[1] - h.hidden)], 1)
        rows, _ = _call.moe_dispatch_again(row, h.maps, None, False, h.plan.capacity, h.plan.sizes, h.plan.group_name)
        return rows[:h.received, :h.hidden].contiguous()

    def combine(self, x: torch.Tensor, handle: _Handle, topk_weights: torch.Tensor | None = None, config: Any = None,
                previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False) -> tuple:
        h = handle
        if x.shape != (h.received, h.hidden):
            raise ValueError(f"perseus.integrations.deep_ep.Buffer.combine: x is {tuple(x.shape)}, and the handle's "
                             f"dispatch gave {(h.received, h.hidden)}")
        rows = x.new_empty(h.plan.capacity, h.plan.sizes[1])
        rows[:h.received, :h.hidden] = x
        k = 0 if topk_weights is None else topk_weights.shape[1]
        if topk_weights is not None:  # in three numbers of bf16, which are exact, as one rank alone has a value
            rest = topk_weights.float()
            for i in range(3):
                part = rest.to(_bf16)
                rows[:h.received, h.hidden + i * k:h.hidden + (i + 1) * k] = part
                rest = rest - part.float()
        y = _combined(rows, h)
        weights = y[:, h.hidden:h.hidden + 3 * k].float().view(len(y), 3, k).sum(1) if k else None
        return y[:, :h.hidden].contiguous(), weights, EventOverlap()

    # ---- low latency: a token goes to each of its experts, and each expert has room for all ----

    def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int,
                             num_experts: int, cumulative_local_expert_recv_stats: torch.Tensor | None = None,
                             use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False,
                             async_finish: bool = False, return_recv_hook: bool = False) -> tuple:
        if round_scale or use_ue8m0:
            raise NotImplementedError("perseus.integrations.deep_ep.Buffer.low_latency_dispatch: scales are fp32, "
                                      "without round_scale and use_ue8m0")
        most, local, k = num_max_dispatch_tokens_per_rank, num_experts // self.group_size, topk_idx.shape[1]
        slots = most * self.group_size
        plan = moe_plan(max_tokens=most * k, hidden=x.shape[1], experts=num_experts, top_k=1,
                        capacity=-(-slots * min(k, local) // BLOCK) * BLOCK + local * BLOCK,
                        dtype=_e4m3 if use_fp8 else _bf16, group=self.perseus)
        send = moe_scaled_dispatch if use_fp8 else moe_dispatch
        d = send(x.repeat_interleave(k, 0), topk_idx.reshape(-1, 1).contiguous(),
                 torch.ones(topk_idx.numel(), 1, device=x.device), plan)
        places, count = _places(d.expert_rows, plan.capacity, slots), d.expert_rows[:, 1]

        def placed(rows: torch.Tensor) -> torch.Tensor:
            return places.spread(rows).view(local, slots, -1)
        received: Any = placed(d.rows.view(_u8)).view(_e4m3) if use_fp8 else placed(d.rows)
        if use_fp8:
            received = received, placed(d.scales).transpose(1, 2).contiguous().transpose(1, 2)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += count
        made = _Handle(plan, d.origins, d.maps, d.router_weights, x.shape[1], slots, places)
        return received, count.contiguous(), made, EventOverlap(), _nothing

    def get_next_low_latency_combine_buffer(self, handle: _Handle) -> torch.Tensor:
        """Where a caller of low_latency_combine(zero_copy=True) puts its rows. They are copied all the same."""
        local = handle.plan.sizes[3] // self.group_size
        return torch.empty(local, handle.received, handle.hidden, dtype=_bf16, device=handle.maps.device)

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle,
                            use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
                            return_recv_hook: bool = False, out: torch.Tensor | None = None,
                            ) -> tuple[torch.Tensor, EventOverlap, Callable]:
        if use_logfmt:
            raise NotImplementedError("perseus.integrations.deep_ep.Buffer.low_latency_combine: no use_logfmt")
        y = _combined(handle.places.collected(x.reshape(-1, handle.hidden)), handle)
        y = torch.bmm(topk_weights.float()[:, None], y.view(*topk_idx.shape, -1).float())[:, 0].to(x.dtype)
        if out is not None:
            y = out.copy_(y)
        return y, EventOverlap(), _nothing


def install() -> None:
    """Makes `import deep_ep` give this module, also where vLLM or SGLang asks whether it is there. Before them."""
    known = sys.modules.setdefault("deep_ep", sys.modules[__name__])
    if known is not sys.modules[__name__]:
        raise RuntimeError(f"perseus.integrations.deep_ep.install: deep_ep is imported already, from {known.__file__}: "
                           "call install() first")


__all__ = ["Buffer", "Config", "EventOverlap", "install"]
