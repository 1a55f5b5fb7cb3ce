// A failed allocation throws through the library to its caller, as under PyTorch, and nothing is lost by it.
#include "granule.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

extern "C" void throw_out_of_memory(const char* function, const char*, uint32_t, const char* message) {
  throw OutOfMemory(std::string(function) + ": " + message);
}

extern "C" void throw_other(const char*, const char*, uint32_t, const char* message) {
  throw std::logic_error(message);
}

static void check(bool good, const char* what) {
  if (!good) {
    std::fprintf(stderr, "%s (last error: %s)\n", what, granule_last_error());
    std::exit(1);
  }
}

int main() {
  check(granule_torch_configure("driver:host,budget:16MiB") == GRANULE_OK, "configure");
  granule_torch_set_raise(throw_out_of_memory, throw_other);
  for (int round = 0; round < 100; round++) {
    bool caught = false;
    try {
      granule_torch_alloc(64 << 20, 0, nullptr);
    } catch (const OutOfMemory& error) {
      const std::string text = error.what();
      caught = text.find("granule_torch_alloc: CUDA out of memory. granule: ") == 0 && text.find("64 MiB") != text.npos;
    }
    check(caught, "no exception for lack of memory");
    caught = false;
    try {
      granule_torch_alloc(-5, 0, nullptr);
    } catch (const std::logic_error& error) {
      caught = std::string(error.what()).find("-5") != std::string::npos;
    }
    check(caught, "no exception for a negative size");
    void* block = granule_torch_alloc(8 << 20, 0, nullptr);
    check(block != nullptr, "the allocator goes on");
    granule_torch_free(block, 8 << 20, 0, nullptr);
  }
  granule_torch_stats stats;
  check(granule_torch_get_stats(0, &stats) == GRANULE_OK && stats.requested == 0 && stats.heap.failures >= 1, "figures");
  std::puts("passed");
}
