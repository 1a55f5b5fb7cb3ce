"""The hot path and churn of PyTorch's C++ allocator, without Python in the loop: the cases of `benches/heap.rs`.

    python3 benches/rivals/torch_hot.py             # native and expandable segments
    PYTORCH_CUDA_ALLOC_CONF=... torch_hot.py one    # one configuration

Needs PyTorch with CUDA and a C++ compiler. Prints a table: nanoseconds an allocation and free, best of seven runs.
"""

import os
import subprocess
import sys

SOURCE = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <algorithm>
#include <chrono>
#include <vector>
namespace C = c10::cuda::CUDACachingAllocator;
static double ns() { return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double pair(int64_t size, int64_t n) {
  C::raw_delete(C::raw_alloc(size));
  double best = 1e30;
  for (int run = 0; run < 7; run++) {
    double t = ns();
    for (int64_t i = 0; i < n; i++) C::raw_delete(C::raw_alloc(size));
    best = std::min(best, (ns() - t) / n);
  }
  return best;
}
struct Random {
  uint64_t x = 0x9E3779B97F4A7C15ull;
  uint64_t next() { x ^= x << 13; x ^= x >> 7; x ^= x << 17; return x; }
  size_t size(int low, int high) { return (size_t)1 << (low + next() % (high - low)); }
};
double churn(int64_t live, int64_t low, int64_t high, int64_t n) {
  Random g;
  std::vector<void*> v(live);
  for (auto& x : v) x = C::raw_alloc(g.size(low, high));
  auto step = [&](int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      auto& x = v[g.next() % live];
      size_t size = g.size(low, high);
      C::raw_delete(x);
      x = C::raw_alloc(size);
    }
  };
  step(std::max<int64_t>(live, 20000));
  double best = 1e30;
  for (int run = 0; run < 7; run++) {
    double t = ns();
    step(n);
    best = std::min(best, (ns() - t) / n);
  }
  for (auto x : v) C::raw_delete(x);
  C::emptyCache();
  return best;
}
"""


def one():
    import torch
    from torch.utils.cpp_extension import load_inline

    build = load_inline("granule_rival_hot", cpp_sources=[SOURCE], functions=["pair", "churn"], with_cuda=True, extra_cflags=["-O2"])
    torch.zeros(1, device="cuda")
    name = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "native"
    for size, label in ((512, "512 B"), (64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")):
        print(f"| torch {name}: hot, {label} | {build.pair(size, 100_000):.1f} |", flush=True)
    print(f"| torch {name}: churn, 10000 live, 512 B to 16 MiB | {build.churn(10_000, 9, 25, 50_000):.1f} |", flush=True)
    for live in (1_000, 10_000, 100_000, 1_000_000):
        print(f"| torch {name}: churn, {live} live, 256 B to 64 KiB | {build.churn(live, 8, 17, 50_000):.1f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["one"]:
        one()
    else:
        for conf in ("", "expandable_segments:True"):
            subprocess.run([sys.executable, __file__, "one"], env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf}, check=True)
