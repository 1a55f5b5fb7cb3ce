"""Replays recorded traces through PyTorch's own allocator: the cases of `cargo bench --bench heap -- --traces DIR`.

    python3 benches/rivals/torch_traces.py TRACE.csv.gz...            # native and expandable segments, side by side
    PYTORCH_CUDA_ALLOC_CONF=... torch_traces.py --one TRACE.csv.gz...  # one configuration

For each trace: memory reserved with no limit and the least budget under which the trace completes (bisection to 0.2 %), both over
the peak of what was requested; microseconds an event, the first time (memory is taken from the driver) and when warm.
"""

import gzip
import os
import subprocess
import sys
import time

PRECISION = 0.002


def load(path):
    events, live, now, peak = [], {}, 0, 0
    for line in gzip.open(path, "rt"):
        if line[0] == "#":
            continue
        field = line.rstrip().split(",")
        if field[0] == "a":
            size = int(field[2])
            events.append((int(field[1]), size))
            live[int(field[1])] = size
            now += size
            peak = max(peak, now)
        else:
            events.append((int(field[1]), -1))
            now -= live.pop(int(field[1]))
    return events, peak


def one(paths):
    import torch
    from torch.cuda.memory import caching_allocator_alloc as alloc
    from torch.cuda.memory import caching_allocator_delete as free

    torch.cuda.init()
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "native"
    total = torch.cuda.mem_get_info()[1]

    def run(events, budget=None):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total) if budget else 1.0)
        at, done, started = {}, True, time.perf_counter()
        try:
            for name, size in events:
                if size < 0:
                    address = at.pop(name)
                    if address:
                        free(address)
                else:
                    at[name] = alloc(size) if size else 0
        except torch.OutOfMemoryError:
            done = False
        took = time.perf_counter() - started
        reserved = torch.cuda.max_memory_reserved()
        for address in at.values():
            if address:
                free(address)
        torch.cuda.set_per_process_memory_fraction(1.0)
        return done, reserved, took

    for path in paths:
        events, peak = load(path)
        _, reserved, first = run(events)
        _, _, warm = run(events)
        low, high = peak, int(reserved * 1.02) + (64 << 20)
        while (high - low) / peak > PRECISION:
            middle = (low + high) // 2
            if run(events, middle)[0]:
                high = middle
            else:
                low = middle
        _, _, tight = run(events, high)
        each = [f"{t / len(events) * 1e6:.2f}" for t in (first, warm, tight)]
        name = os.path.basename(path).removesuffix(".csv.gz")
        print(f"| {name} | {conf} | {peak / 2**30:.2f} GiB | {reserved / peak:.3f} | {high / peak:.3f} | {' | '.join(each)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2:])
    else:
        print("| trace | allocator | peak requested | reserved / peak | least budget / peak | us an event, first | warm | at least budget |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        runs = [
            subprocess.Popen([sys.executable, __file__, "--one", *sys.argv[1:]], env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf})
            for conf in ("", "expandable_segments:True")
        ]
        sys.exit(max(run.wait() for run in runs))
