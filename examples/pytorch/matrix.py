"""Real jobs on four allocators: time per step, equal losses, peak of reserved memory, least budget that completes.

    python3 examples/pytorch/matrix.py --json matrix.json            # six minutes on one H200
    python3 examples/pytorch/matrix.py --jobs serving --allocators native,granule --phases time

In parts, each within a few minutes: `--phases time,arena --json a.json`, then `--phases budget,demo --resume a.json --json b.json`.

Phases: `time` (one allocator after the other), `arena` (with `time`: serving with caches that grow in place beside
those that are concatenated), `budget` (bisection between the peak of requested bytes and the peak of reserved ones, several processes at a time;
cudaMallocAsync alone at the end), `exact` (a few steps with kernels that give the same bits every time, so that equal losses mean equal data),
`demo` (a budget at which the native allocator dies of fragmentation and granule completes).
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from worker import ALLOCATORS, Worker

JOBS = ("llama_varlen", "llama_lora_ckpt", "segmentation_multires", "serving")
GIB = 1 << 30
START = time.time()


def say(text):
    print(f"[{time.time() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def show(run):
    if "error" in run:
        return run["error"]
    done = "completed" if run["completed"] else f"out of memory in step {run['steps_done'] + 1}"
    return (f"{done}, {1e3 * statistics.median(run['times'] or [0]):.1f} ms a step, requested {run['requested_peak'] / GIB:.3f} GiB, "
            f"reserved {run['reserved_peak'] / GIB:.3f} GiB, left {run['reserved_after'] / GIB:.3f} GiB")


def timed(runs):
    """What counts of two runs of a job: times of the second one, where everything has been seen once."""
    first, second = runs
    if "error" in first or "error" in second:
        return {"error": first.get("error") or second.get("error")}
    times = second["times"]
    # The first step makes the model.
    later = times[1:]
    return {
        "step_ms_median": 1e3 * statistics.median(later), "step_ms_mean": 1e3 * statistics.mean(later),
        "cold_step_ms_mean": 1e3 * statistics.mean(first["times"][1:] or [0]), "total_s": sum(times), "cold_total_s": sum(first["times"]),
        "requested_peak": second["requested_peak"], "reserved_peak": second["reserved_peak"],
        "cold_reserved_peak": first["reserved_peak"], "results": second["results"], "cold_results": first["results"],
        "completed": second["completed"] and first["completed"], "heap": second.get("heap"), "reserved_after": second["reserved_after"]}


def phase_time(args, out):
    workers = {name: Worker(name, args.size) for name in args.allocators}
    for name, worker in workers.items():
        out["machine"][name] = worker.ask(hello=True, patience=240)
        say(f"{name}: {out['machine'][name]}")
    for name, worker in workers.items():
        for job in args.jobs:
            runs = []
            for _ in range(2):
                runs.append(worker.ask(job=job, steps=args.steps))
                say(f"{job} on {name}: {show(runs[-1])}")
            out["time"].setdefault(job, {})[name] = timed(runs)
    return workers


def phase_arena(args, out, workers):
    """Tokens a second and peaks of serving: caches by cat on each allocator, and in arenas on granule."""
    if "serving" not in args.jobs:
        return
    runs = {f"cat on {name}": out["time"]["serving"].get(name) for name in workers}
    if "granule" in workers:
        pair = []
        for _ in range(2):
            pair.append(workers["granule"].ask(job="serving", cache="arena", steps=args.steps))
            say(f"serving in arenas on granule: {show(pair[-1])}")
        runs["arenas on granule"] = timed(pair)
    for name, run in runs.items():
        if not run or "error" in run:
            out["serving"][name] = run
            continue
        tokens = sum(result[0] for result in run["results"])
        out["serving"][name] = {
            "tokens_a_second": tokens / run["total_s"], "reserved_peak": run["reserved_peak"], "checks": run["results"],
            "requested_peak": run["requested_peak"]}


def least(args, worker, job, low, high, tolerance):
    """The least budget that completes, by bisection; the trials too. `high` is tried first and raised until it completes."""
    trials = []

    def completes(budget):
        run = worker.ask(job=job, steps=args.steps, budget=budget, patience=180)
        good = run.get("completed")
        trials.append({"budget": budget, "completed": good, "message": run.get("message") or run.get("error"),
                       "steps_done": run.get("steps_done")})
        say(f"{job} on {worker.allocator} in {budget / GIB:.3f} GiB: {'completed' if good else trials[-1]['message'] or run}"[:230])
        return good

    unit = 2 << 20
    while not completes(high):
        if "error" in (trials[-1]["message"] or "") and worker.process.poll() is not None or len(trials) > 4:
            return None, trials
        low, high = high, int(high * 1.03)
    while high - low > max(unit, int(tolerance * low)) and time.time() - START < args.deadline:
        middle = (low + high) // 2 // unit * unit
        if middle <= low:
            break
        if completes(middle):
            high = middle
        else:
            low = middle
        if worker.process.poll() is not None:
            return None, trials
    return high, trials


def requested(out, job):
    """Peak of requested bytes, from an allocator that counts them."""
    for name in ("granule", "native", "expandable"):
        run = out["time"].get(job, {}).get(name)
        if run and run.get("requested_peak"):
            return run["requested_peak"]
    return None


def phase_budget(args, out):
    def one(job, name):
        base = requested(out, job)
        run = out["time"].get(job, {}).get(name, {})
        if base is None or "error" in run or not run:
            return job, name, {"error": "no run without a limit"}
        worker = Worker(name, args.size, quiet=True)
        try:
            # A run without a limit: what it loads lazily must not look like the job's.
            warm = worker.ask(job=job, steps=2, patience=240)
            if "error" in warm:
                return job, name, warm
            high = max(run["reserved_peak"], run["cold_reserved_peak"], base) + (2 << 20)
            budget, trials = least(args, worker, job, int(base), int(high), args.tolerance * (3 if name == "async" else 1))
            return job, name, {"least_budget": budget, "trials": trials}
        finally:
            worker.close()

    pairs = [(job, name) for job in args.jobs for name in args.allocators]
    together = [pair for pair in pairs if pair[1] != "async"]
    with ThreadPoolExecutor(args.parallel) as pool:
        for job, name, answer in pool.map(lambda pair: one(*pair), together):
            out["budget"].setdefault(job, {})[name] = answer
    for job, name in pairs:
        if name == "async":
            out["budget"].setdefault(job, {})[name] = one(job, name)[2]


def phase_demo(args, out):
    """For each job a budget half-way between what granule needs and what the native allocator needs; both, in fresh processes."""
    for job in args.jobs:
        needs = {name: answer.get("least_budget") for name, answer in out["budget"].get(job, {}).items()}
        if not needs.get("granule") or not needs.get("native") or needs["granule"] * 1.01 >= needs["native"]:
            continue
        budget = (needs["granule"] + needs["native"]) // 2
        out["demo"][job] = {"budget": budget}
        for name in ("native", "granule"):
            worker = Worker(name, args.size)
            out["demo"][job][name] = run = worker.ask(job=job, steps=args.steps, budget=budget)
            worker.close()
            say(f"demonstration: {job} on {name} in {budget / GIB:.3f} GiB: {show(run)}\n    {run.get('message', '')}")
        return


def phase_exact(args, out):
    """A few steps of each job with kernels that give the same bits every time, twice on native and once on granule."""
    def one(name):
        worker = Worker(name, args.size, quiet=True, exact=True)
        runs = {}
        for job in args.jobs:
            runs[job] = [worker.ask(job=job, steps=6) for _ in range(2 if name == "native" else 1)]
        worker.close()
        return runs

    with ThreadPoolExecutor(2) as pool:
        native, granule = pool.map(one, ("native", "granule"))
    for job in args.jobs:
        runs = native[job] + granule[job]
        errors = [run["error"] for run in runs if "error" in run]
        out["exact"][job] = {"error": errors[0]} if errors else {"results": [run["results"] for run in runs]}
        say(f"exact: {job}: {out['exact'][job]}"[:400])


def same(a, b):
    """How far two lists of results are apart."""
    if len(a) != len(b):
        return float("inf")
    flat = lambda rows: [x for row in rows for x in (row if isinstance(row, list) else [row])]
    return max((abs(x - y) for x, y in zip(flat(a), flat(b))), default=0.0)


def table(out):
    lines = []
    for job, runs in out["time"].items():
        base = requested(out, job)
        if base is None:
            continue
        lines.append(f"\n{job} (peak of requested bytes {base / GIB:.3f} GiB)")
        lines.append(f"  {'allocator':<12}{'ms a step':>10}{'mean':>9}{'total s':>9}{'reserved':>10}{'ratio':>8}{'least':>9}{'ratio':>8}  results")
        native = runs.get("native", {})
        for name, run in runs.items():
            if "error" in run:
                lines.append(f"  {name:<12}{run['error']}")
                continue
            need = out["budget"].get(job, {}).get(name, {}).get("least_budget")
            budget = f"{need / GIB:>9.3f}{need / base:>8.3f}" if need else f"{'-':>9}{'-':>8}"
            far = same(run["results"], native["results"]) if native.get("results") else float("nan")
            again = same(run["results"], run["cold_results"])
            words = "equal to native" if far == 0 else f"differ from native by {far:g}"
            words += "" if again == 0 else f" (two runs differ by {again:g})"
            lines.append(f"  {name:<12}{run['step_ms_median']:>10.2f}{run['step_ms_mean']:>9.2f}{run['total_s']:>9.2f}"
                         f"{run['reserved_peak'] / GIB:>10.3f}{run['reserved_peak'] / base:>8.3f}{budget}  {words}")
    if out["serving"]:
        lines.append("\nserving, KV caches by cat and in arenas")
        for name, run in out["serving"].items():
            if run and "error" not in run:
                lines.append(f"  {name:<20}{run['tokens_a_second']:>10.0f} tokens/s  {run['reserved_peak'] / GIB:>8.3f} GiB reserved")
            else:
                lines.append(f"  {name:<20}{run}")
        checks = [run["checks"] for run in out["serving"].values() if run and "checks" in run]
        lines.append(f"  tokens and check sums equal: {all(check == checks[0] for check in checks)}")
    for job, exact in out["exact"].items():
        if "error" in exact:
            lines.append(f"\n{job}, kernels that give the same bits: {exact['error']}")
            continue
        first, again, ours = exact["results"]
        lines.append(f"\n{job}, kernels that give the same bits: granule differs from native by {same(first, ours):g}, "
                     f"two runs of native by {same(first, again):g}")
    for job, demo in out["demo"].items():
        lines.append(f"\n{job} in {demo['budget'] / GIB:.3f} GiB:")
        for name in ("native", "granule"):
            lines.append(f"  {name:<12}{show(demo[name])}\n      {demo[name].get('message', '')}")
    return "\n".join(lines)


def main():
    listed = lambda text: tuple(text.split(","))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all figures there, after each phase")
    parser.add_argument("--jobs", type=listed, default=JOBS)
    parser.add_argument("--allocators", type=listed, default=ALLOCATORS)
    parser.add_argument("--phases", type=listed, default=("time", "arena", "budget", "demo", "exact"))
    parser.add_argument("--resume", help="go on with the figures of that file, for phases other than time")
    parser.add_argument("--deadline", type=float, default=500, help="seconds after which bisections end where they are")
    parser.add_argument("--steps", type=int, default=None, help="steps of a job; its own number by default")
    parser.add_argument("--size", choices=("big", "small"), default="big")
    parser.add_argument("--parallel", type=int, default=5, help="processes of the bisection at a time")
    parser.add_argument("--tolerance", type=float, default=0.003, help="of the least budget, as a part of it")
    args = parser.parse_args()
    out = {"machine": {}, "time": {}, "serving": {}, "budget": {}, "demo": {}, "exact": {}}
    if args.resume:
        with open(args.resume, encoding="utf-8") as file:
            out.update(json.load(file))
    elif "time" not in args.phases and args.phases != ("exact",):
        parser.error("without the phase time, --resume names a file of an earlier run")

    def save():
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(out, file)

    if "time" in args.phases:
        workers = phase_time(args, out)
        save()
        if "arena" in args.phases:
            phase_arena(args, out, workers)
            save()
        for worker in workers.values():
            worker.close()
    if "budget" in args.phases:
        phase_budget(args, out)
        save()
    if "demo" in args.phases:
        phase_demo(args, out)
        save()
    if "exact" in args.phases:
        phase_exact(args, out)
        save()
    print(table(out))


if __name__ == "__main__":
    main()
