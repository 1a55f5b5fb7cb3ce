#!/usr/bin/env python3
"""What PyTorch needs for the requests of `examples/showdown`: fragmented memory, and then one block.

    python3 benches/rivals/torch_defrag.py [--quick] > rivals.jsonl
    cargo run --release --example showdown -- --rivals rivals.jsonl

Needs PyTorch with CUDA and a free GPU. Every allocator setting runs in a process of its own, since it
cannot be changed later. Prints one JSON object a line: contender, case, usable_us (median), runs,
extra_memory (bytes that the device had to give besides), reserved, note. Run it on the same machine,
right before or after the showdown: only ratios within one session mean anything.

For each size of a piece the allocator gets a heap of pieces, half of which are freed, every other one,
and is then asked for as many bytes as are free. Twice: with the rest of the device free, and with the
process limited to what it holds, so that it can only reclaim or fail.
"""

import json
import os
import subprocess
import sys
import time

MIB, GIB = 1 << 20, 1 << 30
SETTINGS = {
    "PyTorch, native (cudaMalloc)": None,
    "PyTorch, expandable segments": "expandable_segments:True",
}


def size(n):
    return f"{n // GIB} GiB" if n % GIB == 0 else f"{n // MIB} MiB"


def pieces_of(piece):
    """As the showdown."""
    return 16 if piece >= 4 * GIB else max(32, min(512, 4 * GIB // piece))


def line(name, case, times, extra, reserved, note):
    times = sorted(times)
    print(json.dumps({
        "contender": name, "case": case, "runs": len(times),
        "usable_us": times[len(times) // 2] * 1e6 if times else None,
        "extra_memory": extra, "reserved": reserved, "note": note,
    }), flush=True)


def measure(torch, name, piece, reps, limited):
    count = pieces_of(piece)
    want = count // 2 * piece
    free, total = torch.cuda.mem_get_info()
    if count * piece + want > free * 0.95:
        return
    case = f"{count} x {size(piece)}, 50 % live; {size(want)} wanted" + (", no more memory" if limited else "")
    times, extra, reserved, note = [], 0, 0, ""
    for _ in range(reps):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        heap = [torch.empty(piece, dtype=torch.uint8, device="cuda") for _ in range(count)]
        for i, tensor in enumerate(heap):
            if i % 2 == 0:
                tensor.fill_(i % 251)
        heap = [tensor if i % 2 == 0 else None for i, tensor in enumerate(heap)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        if limited:
            torch.cuda.set_per_process_memory_fraction(min(1.0, (before + 1) / total))
        start = time.perf_counter()
        try:
            block = torch.empty(want, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            extra = max(0, torch.cuda.memory_reserved() - before)
            reserved = torch.cuda.memory_reserved()
        except torch.cuda.OutOfMemoryError:
            note = "out of memory, although as much is free"
            torch.cuda.set_per_process_memory_fraction(1.0)
            break
        torch.cuda.set_per_process_memory_fraction(1.0)
        block.fill_(255)
        for i, tensor in enumerate(heap):
            if tensor is not None:
                assert int(tensor[0]) == i % 251 == int(tensor[-1]), "wrong bytes"
        del block, heap, tensor
    line(name, case, times, extra, reserved, note)


def child(name, quick):
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print(f"{name}: PyTorch {torch.__version__}, CUDA {torch.version.cuda}, "
          f"{torch.cuda.get_device_name()}", file=sys.stderr)
    sizes = (2, 32, 256, 1024) if quick else (2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    for piece in sizes:
        for limited in (False, True):
            measure(torch, name, piece * MIB, 3 if quick else 7, limited)


def main():
    quick = "--quick" in sys.argv
    failed = False
    for name, setting in SETTINGS.items():
        environment = dict(os.environ)
        # The second name is what newer versions read first.
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            environment.pop(variable, None)
            if setting:
                environment[variable] = setting
        command = [sys.executable, __file__, "--child", name] + (["--quick"] if quick else [])
        done = subprocess.run(command, env=environment, check=False, timeout=300)
        if done.returncode != 0:
            print(f"{name}: failed with {done.returncode}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[sys.argv.index("--child") + 1], "--quick" in sys.argv)
    else:
        sys.exit(main())
