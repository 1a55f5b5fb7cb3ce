/* What PyTorch calls, called by hand: streams, uses by other streams, private pools, limits. */
#include "check.h"

static void blocks(void *stream, void *other) {
  granule_torch_stats before, stats;
  OK(granule_torch_get_stats(0, &before));
  CHECK(granule_torch_alloc(0, 0, stream) == NULL);
  granule_torch_free(NULL, 0, 0, stream);
  char *a = granule_torch_alloc(1000, 0, stream), *b = granule_torch_alloc(3 << 20, 0, other);
  CHECK(a && b && (uintptr_t)a % 256 == 0 && (uintptr_t)b % 256 == 0);
  memset(a, 1, 1000);
  memset(b, 2, 3 << 20);
  CHECK(a[999] == 1 && b[0] == 2);
  OK(granule_torch_get_stats(0, &stats));
  CHECK(stats.requested == before.requested + 1000 + (3 << 20) && stats.requested_peak >= stats.requested);
  CHECK(stats.reserved >= stats.requested && stats.reserved_peak >= stats.reserved && stats.heap.blocks == 2);
  size_t size = 1;
  CHECK(granule_torch_base_alloc(a, &size) == a && size >= 1000);
  CHECK(granule_torch_base_alloc(a + 256, &size) == a + 256 && size == 0);
  /* Freed on its own stream it comes back at once; used by another stream it does not. */
  granule_torch_free(a, 1000, 0, stream);
  CHECK(granule_torch_alloc(1000, 0, stream) == a);
  granule_torch_record_stream(b, stream);
  granule_torch_record_stream(NULL, stream);
  granule_torch_free(b, 3 << 20, 0, other);
  granule_torch_free(a, 1000, 0, stream);
  OK(granule_torch_get_stats(0, &stats));
  CHECK(stats.requested == before.requested);
  OK(granule_torch_reset_peaks(0));
  OK(granule_torch_get_stats(0, &stats));
  CHECK(stats.requested_peak == stats.requested);
  /* What is not known leaves a message and changes nothing. */
  granule_clear_error();
  granule_torch_free((void *)(uintptr_t)0x1000, 5, 0, stream);
  CHECK(granule_last_status() == GRANULE_STALE);
  granule_torch_record_stream((void *)(uintptr_t)0x1000, stream);
  CHECK(granule_last_status() == GRANULE_INVALID_ARGUMENT);
  CHECK(granule_torch_alloc(-1, 0, stream) == NULL && granule_last_status() == GRANULE_INVALID_ARGUMENT);
  CHECK(granule_torch_alloc(1, 64, stream) == NULL && granule_last_status() == GRANULE_INVALID_ARGUMENT);
}

static bool on_stream(void *wanted, void *stream) { return stream == *(void **)wanted; }
static int dropped;
static void drop(void *unused) { (void)unused, dropped++; }

static void private_pools(void *stream, void *other) {
  /* All allocations of the device between begin and end; kept when freed, and handed out again within. */
  granule_torch_begin_pool(0, 7, 8, NULL);
  char *a = granule_torch_alloc(1 << 20, 0, stream), *b = granule_torch_alloc(1 << 20, 0, stream);
  granule_torch_free(a, 1 << 20, 0, stream);
  CHECK(granule_torch_alloc(1 << 20, 0, stream) == a);
  granule_torch_free(a, 1 << 20, 0, stream);
  /* Of another stream: not the same memory, since nothing orders them. */
  char *c = granule_torch_alloc(1 << 20, 0, other);
  CHECK(c != a && c != b);
  granule_torch_end_pool(0, 7, 8);
  /* Outside nobody gets it, though it is free. */
  char *seen[8];
  for (int i = 0; i < 8; i++) {
    seen[i] = granule_torch_alloc(1 << 20, 0, stream);
    CHECK(seen[i] && seen[i] != a);
  }
  for (int i = 0; i < 8; i++) granule_torch_free(seen[i], 1 << 20, 0, stream);
  /* The same pool again. */
  granule_torch_begin_pool(0, 7, 8, NULL);
  CHECK(granule_torch_alloc((1 << 20) - 100, 0, stream) == a);
  granule_torch_end_pool(0, 7, 8);
  granule_torch_release_pool(0, 7, 8);
  granule_torch_release_pool(0, 7, 8);
  granule_torch_release_pool(0, 7, 8);
  /* Blocks that outlive their pool are freed as all others. */
  granule_torch_free(a, (1 << 20) - 100, 0, stream);
  granule_torch_free(b, 1 << 20, 0, stream);
  granule_torch_free(c, 1 << 20, 0, other);

  /* Two at a time, told apart by a filter each. */
  granule_clear_error();
  granule_torch_begin_filtered(0, 1, 0, on_stream, &stream, drop);
  granule_torch_begin_filtered(0, 2, 0, on_stream, &other, drop);
  granule_torch_begin_pool(0, 3, 0, NULL);
  CHECK(granule_last_status() == GRANULE_INVALID_ARGUMENT);
  a = granule_torch_alloc(4096, 0, stream), b = granule_torch_alloc(4096, 0, other);
  CHECK(a && b && a != b);
  granule_torch_end_pool(0, 1, 0);
  c = granule_torch_alloc(4096, 0, stream);
  CHECK(c != a);
  granule_torch_end_pool(0, 2, 0);
  CHECK(dropped == 2);
  granule_torch_free(a, 4096, 0, stream);
  granule_torch_free(b, 4096, 0, other);
  granule_torch_free(c, 4096, 0, stream);
  granule_torch_release_pool(0, 1, 0);
  granule_torch_release_pool(0, 2, 0);
  granule_torch_end_pool(0, 99, 99);
  granule_torch_release_pool(0, 99, 99);
}

int main(void) {
  FAILS(GRANULE_INVALID_ARGUMENT, granule_torch_configure("budget:64MiB,expandable_segments:True"));
  CHECK(strstr(granule_last_error(), "expandable_segments"));
  OK(granule_torch_configure("driver:host,budget:64MiB,granule_max:8MiB,granule_min:2MiB,wait_ms:200"));
  granule_device device;
  granule_pool pool;
  granule_heap heap;
  OK(granule_torch_pool(0, &pool));
  OK(granule_torch_device(0, &device));
  OK(granule_torch_heap(0, &heap));
  FAILS(GRANULE_BUSY, granule_torch_configure(""));
  granule_stream handle;
  OK(granule_torch_stream(0, NULL, &handle));
  void *stream = NULL;
  void *other = NULL;
  OK(granule_stream_raw(handle, &other));
  CHECK(other == NULL);
  /* Not a stream of this device; the host driver can tell. */
  CHECK(granule_torch_alloc(10, 0, (void *)(uintptr_t)999) == NULL && granule_last_status() == GRANULE_STALE);
  granule_arena_config config = {.capacity = 8 * MIB};
  granule_arena arena;
  OK(granule_arena_create(pool, &config, &arena));
  OK(granule_arena_grow(arena, 2 * MIB, handle));
  granule_torch_stats stats;
  OK(granule_torch_get_stats(0, &stats));
  CHECK(stats.reserved >= 2 * MIB && stats.budget == 64 * MIB);
  /* A stream that uses the tensor on it. */
  granule_arena_info info;
  OK(granule_arena_get_info(arena, &info));
  granule_clear_error();
  granule_torch_record_stream((void *)(uintptr_t)info.base, NULL);
  CHECK(granule_last_status() == GRANULE_OK);
  OK(granule_arena_close(arena));
  granule_torch_record_stream((void *)(uintptr_t)info.base, NULL);
  CHECK(granule_last_status() == GRANULE_INVALID_ARGUMENT);

  granule_stream second;
  void *made = NULL;
  OK(granule_stream_create(device, &second));
  OK(granule_stream_raw(second, &made));
  blocks(stream, made);
  private_pools(stream, made);

  /* Without a hook a lack of memory is a null pointer and a message. */
  CHECK(granule_torch_alloc(100 << 20, 0, stream) == NULL && granule_last_status() == GRANULE_OUT_OF_MEMORY);
  CHECK(strncmp(granule_last_error(), "CUDA out of memory. granule: ", 29) == 0);
  granule_out_of_memory why;
  OK(granule_last_out_of_memory(&why));
  CHECK(why.requested == 100 << 20 && why.budget == 64 * MIB);
  granule_clear_error();
  granule_torch_memory_fraction(2.0, 0);
  CHECK(granule_last_status() == GRANULE_INVALID_ARGUMENT);
  granule_clear_error();
  granule_torch_empty_cache();
  CHECK(granule_last_status() == GRANULE_OK);
  granule_heap_stats figures;
  OK(granule_heap_get_stats(heap, &figures));
  CHECK(figures.blocks == 0 && figures.live == 0);
  char *snapshot;
  OK(granule_torch_snapshot(0, &snapshot));
  CHECK(strstr(snapshot, "\"streams\":["));
  granule_string_free(snapshot);
  /* Live when the process ends. */
  CHECK(granule_torch_alloc(1 << 20, 0, stream));
  puts("passed");
  return 0;
}
