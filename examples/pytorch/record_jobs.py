"""Records what a job allocates, as lines that `examples/replay` reads.

    python3 examples/pytorch/record_jobs.py serving serving.csv.gz
    cargo run --release --example replay -- serving.csv.gz

The job runs on PyTorch's native allocator with its usual number of steps; sizes and order do not depend on the allocator. A free counts
when the memory may be used again.
"""

import gzip
import sys

import torch

import jobs


def main():
    name, path = sys.argv[1:3]
    jobs.deterministic()
    torch.ones(1, device="cuda")
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)
    for _ in jobs.JOBS[name](jobs.STEPS[name], torch.device("cuda"), "big"):
        torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    start = events[0]["time_us"] if events else 0
    live, streams, count = {}, {}, 0
    with gzip.open(path, "wt") as out:
        out.write(f"# {name}: PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {jobs.STEPS[name]} steps\n")
        for event in events:
            at = event["time_us"] - start
            if event["action"] == "alloc":
                stream = streams.setdefault(event["stream"], len(streams))
                live[event["addr"]] = count
                out.write(f"a,{count},{event['size']},{stream},{at}\n")
                count += 1
            elif event["action"] == "free_completed" and event["addr"] in live:
                out.write(f"f,{live.pop(event['addr'])},{at}\n")
    print(f"{name}: {count} allocations, {torch.cuda.memory_stats()['requested_bytes.all.peak'] / (1 << 30):.3f} GiB requested at most")


if __name__ == "__main__":
    main()
