/* A tensor of an arena through DLPack, legacy and versioned, and back. The structures are those of dlpack.h 1.1. */
#include "check.h"

typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;
typedef struct DLManagedTensorVersioned {
  struct { uint32_t major, minor; } version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

static int deleted;
static void count(DLManagedTensor *self) { deleted++; free(self); }
static void count_versioned(DLManagedTensorVersioned *self) { deleted++; free(self); }

static void exports(granule_arena arena, uint64_t base) {
  granule_tensor tensor = {.ndim = 2, .shape = {10, 25}, .start = 1024, .code = 2, .bits = 32, .lanes = 1};
  void *raw;
  OK(granule_arena_export_dlpack(arena, &tensor, 0, &raw));
  DLManagedTensor *legacy = raw;
  DLTensor *t = &legacy->dl_tensor;
  CHECK((uint64_t)(uintptr_t)t->data + t->byte_offset == base + 1024);
  CHECK(t->ndim == 2 && t->shape[0] == 10 && t->shape[1] == 25 && t->strides[0] == 25 && t->strides[1] == 1);
  CHECK(t->device.device_type == 1 && t->dtype.code == 2 && t->dtype.bits == 32 && t->dtype.lanes == 1);
  ((float *)t->data)[0] = 1.5f;
  /* Within the length it is pinned. */
  FAILS(GRANULE_BUSY, granule_arena_shrink(arena, 1000));
  legacy->deleter(legacy);
  OK(granule_arena_shrink(arena, 1024 + 4 * 250));

  tensor.strides[0] = 1, tensor.strides[1] = 10, tensor.read_only = 1;
  OK(granule_arena_export_dlpack(arena, &tensor, 1, &raw));
  DLManagedTensorVersioned *versioned = raw;
  CHECK(versioned->version.major == 1 && versioned->flags == 1 && versioned->dl_tensor.strides[1] == 10);

  /* And in again, as a consumer. */
  granule_tensor seen;
  granule_import import;
  OK(granule_import_dlpack(versioned, 1, &seen, &import));
  CHECK(seen.start == base + 1024 && seen.ndim == 2 && seen.shape[1] == 25 && seen.strides[1] == 10 && seen.read_only);
  /* The memory outlives the arena's handle. */
  OK(granule_arena_close(arena));
  CHECK(*(float *)(uintptr_t)seen.start == 1.5f);
  OK(granule_import_close(import));
  FAILS(GRANULE_STALE, granule_import_close(import));
}

static void refusals(granule_arena arena) {
  void *raw;
  granule_tensor tensor = {.ndim = 1, .shape = {1 << 30}, .code = 2, .bits = 64, .lanes = 1};
  FAILS(GRANULE_INVALID_ARGUMENT, granule_arena_export_dlpack(arena, &tensor, 0, &raw));
  tensor.shape[0] = -1;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_arena_export_dlpack(arena, &tensor, 0, &raw));
  tensor.shape[0] = 2, tensor.strides[0] = INT64_MAX;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_arena_export_dlpack(arena, &tensor, 0, &raw));
  tensor.strides[0] = 0, tensor.start = UINT64_MAX;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_arena_export_dlpack(arena, &tensor, 0, &raw));
  tensor.ndim = 99;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_arena_export_dlpack(arena, &tensor, 0, &raw));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_arena_export_dlpack(arena, NULL, 0, &raw));
}

static void imports(void) {
  static float data[6];
  static int64_t shape[2] = {2, 3};
  granule_tensor seen;
  granule_import import;
  DLManagedTensor *legacy = calloc(1, sizeof *legacy);
  legacy->dl_tensor = (DLTensor){data, {1, 0}, 2, {2, 32, 1}, shape, NULL, 4};
  legacy->deleter = count;
  OK(granule_import_dlpack(legacy, 0, &seen, &import));
  CHECK(seen.start == (uint64_t)(uintptr_t)data + 4 && seen.strides[0] == 3 && seen.strides[1] == 1);
  CHECK(deleted == 0);
  OK(granule_import_close(import));
  CHECK(deleted == 1);
  /* Of a version that nobody here can read: deleted, as a consumer has to. */
  DLManagedTensorVersioned *later = calloc(1, sizeof *later);
  later->version.major = 2;
  later->deleter = count_versioned;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_import_dlpack(later, 1, &seen, &import));
  CHECK(deleted == 2);
  FAILS(GRANULE_INVALID_ARGUMENT, granule_import_dlpack(NULL, 0, &seen, &import));
  legacy = calloc(1, sizeof *legacy);
  legacy->dl_tensor.ndim = 3;
  legacy->deleter = count;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_import_dlpack(legacy, 0, &seen, &import));
  CHECK(deleted == 3);
}

int main(void) {
  granule_device device;
  granule_pool pool = a_pool(&device, 16 * MIB);
  granule_arena_config config = {.capacity = 8 * MIB};
  granule_arena arena;
  granule_arena_info info;
  OK(granule_arena_create(pool, &config, &arena));
  OK(granule_arena_grow(arena, 4 * MIB, 0));
  OK(granule_arena_get_info(arena, &info));
  refusals(arena);
  exports(arena, info.base);
  imports();
  OK(granule_pool_close(pool));
  puts("passed");
  return 0;
}
