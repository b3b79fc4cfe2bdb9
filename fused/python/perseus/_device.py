# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a launch lie: on a CUDA device, or in ordinary memory when the library is the emulator of Hopper
GPUs."""
from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from ._library import Library, PerseusError


class Cuda:
    """read() and write() give the address of a tensor that a launch reads or writes; done() ends the launch."""

    kind = "cuda"

    def __init__(self, library: Library, index: int) -> None:
        self.index, self.torch = index, torch.device("cuda", index)
        self.read = self.write = torch.Tensor.data_ptr
        self._last: tuple[int, torch.cuda.Stream | None] = (-1, None)  # the stream of the last launch

    def stream(self) -> int:
        """The current stream. The launches of a group share memory, so one on another stream than the last waits for
        the last."""
        # what torch.cuda.current_stream().cuda_stream is, without its objects
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if stream != self._last[0] and not self.capturing():
            current, before = torch.cuda.current_stream(self.index), self._last[1]
            if before is not None:
                current.wait_stream(before)
            self._last = (stream, current)
        return stream

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def done(self) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def free_cache(self) -> None:
        """Gives back to CUDA what torch holds and nothing uses."""
        torch.cuda.synchronize(self.index)
        torch.cuda.empty_cache()


class Emulated:
    """Tensors in ordinary memory. Each launch gets copies in the memory of an emulated GPU, whose bounds and owner the
    emulator checks, and has ended when done() returns. Emulated GPUs belong to one process: ranks are its threads, or
    processes that are nodes of their own."""

    kind = "cpu"
    _ready = threading.Lock()

    def __init__(self, library: Library, index: int | None = None) -> None:
        """index: None: the GPU of this thread. On another rank's, launches may run that wait for this rank."""
        self.dll, self.torch = library.dll, torch.device("cpu")
        self._copies: list[tuple[int, torch.Tensor | None]] = []
        with self._ready:
            self.dll.hopper_setup(0, 0, ctypes.c_uint64(0))
        device = ctypes.c_int()
        self.dll.cudaGetDevice(ctypes.byref(device))
        self.index = device.value if index is None else index
        self._call("cudaSetDevice", self.index)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.dll, name)(*arguments)
        if status != 0:
            raise PerseusError(f"the emulated GPU {self.index}: {name} returned {status}")

    def _copy(self, tensor: torch.Tensor, back: bool) -> int:
        count, address = tensor.numel() * tensor.element_size(), ctypes.c_void_p()
        if count == 0 or tensor.untyped_storage().nbytes() == 0:  # freed memory: the library gets no address
            return 0
        self._call("cudaSetDevice", self.index)  # autograd's threads begin on device 0
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(count))
        self._copies.append((address.value or 0, tensor if back else None))
        if not back:
            self._call("cudaMemcpy", address, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(count), 1)
        return address.value or 0

    def read(self, tensor: torch.Tensor) -> int:
        """The address of a copy that has the tensor's strides, as a product's second operand may be a transposed
        view."""
        return self._copy(tensor if tensor.is_contiguous() else tensor.t(), False)

    def write(self, tensor: torch.Tensor) -> int:
        return self._copy(tensor, True)

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def done(self) -> None:
        self.synchronize()
        for address, tensor in self._copies:
            if tensor is not None:
                self._call("cudaMemcpy", ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(address),
                           ctypes.c_size_t(tensor.numel() * tensor.element_size()), 2)
            self._call("cudaFree", ctypes.c_void_p(address))
        self._copies.clear()

    def free_cache(self) -> None:
        pass

    def synchronize(self) -> None:
        self._call("cudaSetDevice", self.index)
        self._call("cudaDeviceSynchronize")
