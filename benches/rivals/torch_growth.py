#!/usr/bin/env python3
"""PyTorch on the cases of `benches/growth.rs`, as rows of the same table.

    python3 benches/rivals/torch_growth.py

Needs PyTorch with CUDA and a free GPU. Every allocator setting runs in a process of its own, since
it cannot be changed later. Run it on the same machine, right before or after the bench: only ratios
within one session mean anything.
"""

import os
import subprocess
import sys
import time

MIB, GIB = 1 << 20, 1 << 30
STEP, MOST = 64 * MIB, 8 * GIB
COLD = (64 * MIB, 256 * MIB, GIB, 4 * GIB)
SETTINGS = {
    "PyTorch, native": None,
    "PyTorch, expandable segments": "expandable_segments:True",
    "PyTorch, cudaMallocAsync": "backend:cudaMallocAsync",
}


def show(seconds):
    for limit, scale, unit in ((1e-5, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.0f} ns" if unit == "ns" else f"{seconds * scale:.2f} {unit}"
    return f"{seconds:.2f} s"


def size(n):
    return f"{n // GIB} GiB" if n % GIB == 0 else f"{n // MIB} MiB"


def at(times, share):
    """The value that `share` of the times do not exceed; as the bench computes it."""
    rank = -(-len(times) * share // 1)
    return sorted(times)[max(0, min(len(times) - 1, int(rank) - 1))]


def row(case, name, times, note):
    print(f"| {case} | {name} | {len(times)} | {show(at(times, 0.5))} | {show(at(times, 0.99))} "
          f"| {show(max(times))} | {note} |", flush=True)


def cold(torch, name):
    from torch.cuda.memory import caching_allocator_alloc as alloc
    from torch.cuda.memory import caching_allocator_delete as free

    for n in COLD:
        opening, closing = [], []
        for _ in range(21):
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # some 10 ms, as the bench: released memory is scrubbed meanwhile
            torch.cuda.synchronize()
            start = time.perf_counter()
            block = alloc(n)
            opening.append(time.perf_counter() - start)
            start = time.perf_counter()
            free(block)
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            closing.append(time.perf_counter() - start)
        row(f"cold {size(n)}", name, opening, "")
        row(f"return {size(n)}", name, closing, "")


def untouched(torch, name):
    """Memory that nobody released before, call after call; to be measured first."""
    from torch.cuda.memory import caching_allocator_alloc as alloc
    from torch.cuda.memory import caching_allocator_delete as free

    kept = []
    for n in COLD:
        times = []
        for _ in range(max(2, min(16, 4 * MOST // n))):
            start = time.perf_counter()
            kept.append(alloc(n))
            times.append(time.perf_counter() - start)
        row(f"cold {size(n)}, memory never used", name, times, "")
    for block in kept:
        free(block)
    torch.cuda.empty_cache()


def grow(torch, name):
    times, peak = [], 0
    for _ in range(3):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        more = torch.full((STEP,), 1, dtype=torch.uint8, device="cuda")
        tensor = more.clone()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(MOST // STEP - 1):
            tensor = torch.cat([tensor, more])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        peak = max(peak, torch.cuda.max_memory_reserved())
        assert tensor.numel() == MOST, tensor.numel()
        # In pieces: a sum of bytes in 64 bits would need eight times the memory.
        assert all(bool((part == 1).all()) for part in tensor.split(STEP)), "wrong bytes"
        del tensor, more
    row(f"grow to {size(MOST)} by {size(STEP)}, each step written", f"{name}, torch.cat", times,
        f"{peak / GIB:.1f} GiB reserved at most")


def child(name):
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print(f"{name}: PyTorch {torch.__version__}, CUDA {torch.version.cuda}, "
          f"{torch.cuda.get_device_name()}", file=sys.stderr)
    untouched(torch, name)
    cold(torch, name)
    grow(torch, name)


def main():
    print("| case | contender | runs | p50 | p99 | most | note |")
    print("|------|-----------|-----:|----:|----:|-----:|------|", flush=True)
    failed = False
    for name, setting in SETTINGS.items():
        environment = dict(os.environ)
        # The second name is what newer versions read first.
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            environment.pop(variable, None)
        if setting:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = setting
        done = subprocess.run([sys.executable, __file__, name], env=environment, check=False)
        if done.returncode != 0:
            print(f"{name}: failed with {done.returncode}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        child(sys.argv[1])
    else:
        sys.exit(main())
