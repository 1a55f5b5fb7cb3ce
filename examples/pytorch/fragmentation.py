"""A job that dies of fragmentation under PyTorch's native allocator and completes under granule, with the same memory.

    python3 examples/pytorch/fragmentation.py [--job llama_lora_ckpt] [--over 1.04] [--json FILE]

The budget is the job's peak of requested bytes times `--over`: enough for what the job asks for, and little more.
"""

import argparse
import json
import sys

from matrix import GIB, JOBS, say, show
from worker import Worker


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, default="llama_lora_ckpt")
    parser.add_argument("--over", type=float, default=1.04)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--json")
    args = parser.parse_args()
    workers = {name: Worker(name) for name in ("granule", "native", "expandable")}
    free = workers["granule"].ask(job=args.job, steps=args.steps)
    say(f"{args.job} without a limit on granule: {show(free)}")
    if not free.get("completed"):
        return 1
    budget = int(free["requested_peak"] * args.over)
    print(f"{args.job} needs {free['requested_peak'] / GIB:.3f} GiB at its peak and gets {budget / GIB:.3f} GiB")
    out = {"job": args.job, "budget": budget, "requested_peak": free["requested_peak"]}
    for name, worker in workers.items():
        out[name] = run = worker.ask(job=args.job, steps=args.steps, budget=budget)
        worker.close()
        print(f"{name:<12}{show(run)}")
        if run.get("message"):
            print(f"            {run['message']}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file)
    same = out["granule"].get("results") == free["results"]
    print(f"granule's losses equal those without a limit: {same}")
    return 0 if out["granule"].get("completed") and not out["native"].get("completed") else 1


if __name__ == "__main__":
    sys.exit(main())
