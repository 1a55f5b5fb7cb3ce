// The hot path and churn of RMM's pool and arena resources and of cudaMallocAsync through RMM: the cases of `benches/heap.rs`.
//
//     nvcc -O2 -std=c++20 -x cu benches/rivals/rmm_hot.cpp -I$RMM/include -I$RMM/include/rapids -I$LOGGER/include \
//          -L$RMM/lib64 -L$LOGGER/lib64 -lrmm -lrapids_logger -o rmm_hot && ./rmm_hot
//
// where RMM and LOGGER are the folders of the wheels librmm-cu13 and rapids-logger. Nanoseconds, best of seven runs.
#include <cuda_runtime.h>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

static double ns() { return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Random {
  uint64_t x = 0x9E3779B97F4A7C15ull;
  uint64_t next() { x ^= x << 13; x ^= x >> 7; x ^= x << 17; return x; }
  size_t size(int low, int high) { return (size_t)1 << (low + next() % (high - low)); }
};

template <class Resource>
void pairs(const char* name, Resource& resource, cuda::stream_ref stream) {
  struct { size_t size; const char* label; } cases[] = {{512, "512 B"}, {64 << 10, "64 KiB"}, {1 << 20, "1 MiB"}, {64 << 20, "64 MiB"}};
  for (auto [size, label] : cases) {
    auto once = [&] { resource.deallocate(stream, resource.allocate(stream, size, 256), size, 256); };
    once();
    double best = 1e30;
    const int n = 20000;
    for (int run = 0; run < 7; run++) {
      double t = ns();
      for (int i = 0; i < n; i++) once();
      best = std::min(best, (ns() - t) / n);
    }
    printf("| %s: hot, %s | %.1f |\n", name, label, best);
    fflush(stdout);
  }
}

template <class Resource>
void churn(const char* name, Resource& resource, cuda::stream_ref stream, int live, int low, int high, const char* label, int n) {
  Random g;
  std::vector<std::pair<void*, size_t>> v(live);
  for (auto& [at, size] : v) { size = g.size(low, high); at = resource.allocate(stream, size, 256); }
  auto step = [&](int n) {
    for (int i = 0; i < n; i++) {
      auto& [at, size] = v[g.next() % live];
      resource.deallocate(stream, at, size, 256);
      size = g.size(low, high);
      at = resource.allocate(stream, size, 256);
    }
  };
  step(n);
  double best = 1e30;
  for (int run = 0; run < 7; run++) {
    double t = ns();
    step(n);
    best = std::min(best, (ns() - t) / n);
  }
  printf("| %s: churn, %d live, %s | %.1f |\n", name, live, label, best);
  fflush(stdout);
  for (auto& [at, size] : v) resource.deallocate(stream, at, size, 256);
  cudaStreamSynchronize(stream.get());
}

template <class Resource>
void all(const char* name, Resource& resource, int most) {
  cudaStream_t raw;
  cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking);
  cuda::stream_ref stream{raw};
  pairs(name, resource, stream);
  churn(name, resource, stream, 10000, 9, 25, "512 B to 16 MiB", 5000);
  for (int live = 1000; live <= most; live *= 10) churn(name, resource, stream, live, 8, 17, "256 B to 64 KiB", 5000);
}

int main() {
  cudaFree(0);
  rmm::mr::cuda_memory_resource upstream;
  { rmm::mr::cuda_async_memory_resource m{60ull << 30}; all("cudaMallocAsync (RMM)", m, 1000000); }
  { rmm::mr::pool_memory_resource m{upstream, 60ull << 30}; all("RMM pool", m, 1000000); }
  { rmm::mr::arena_memory_resource m{upstream, 60ull << 30}; all("RMM arena", m, 10000); }
}
