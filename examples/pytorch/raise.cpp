// What needs C++: PyTorch's exceptions, and its filter for private pools. Compiled by granule_torch.py.
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <utility>

struct CUstream_st;
using Stream = CUstream_st*;
using Filter = std::function<bool(Stream)>;
// c10::cuda::MempoolId_t
using PoolId = std::pair<unsigned long long, unsigned long long>;
using Begin = void (*)(int, uint64_t, uint64_t, bool (*)(void*, void*), void*, void (*)(void*));

static Begin begin_filtered = nullptr;

extern "C" void granule_raise_out_of_memory(const char* function, const char* file, uint32_t line, const char* message) {
  throw c10::OutOfMemoryError(c10::SourceLocation{function, file, line}, message);
}

extern "C" void granule_raise_error(const char* function, const char* file, uint32_t line, const char* message) {
  throw c10::Error(c10::SourceLocation{function, file, line}, message);
}

extern "C" void granule_shim_bind(void* begin) {
  begin_filtered = reinterpret_cast<Begin>(begin);
}

// begin_allocate_to_pool of CUDAPluggableAllocator.
extern "C" void granule_shim_begin(int device, PoolId id, Filter filter) {
  auto* kept = new Filter(std::move(filter));
  begin_filtered(
      device, id.first, id.second,
      [](void* context, void* stream) { return (*static_cast<Filter*>(context))(static_cast<Stream>(stream)); },
      kept, [](void* context) { delete static_cast<Filter*>(context); });
}
