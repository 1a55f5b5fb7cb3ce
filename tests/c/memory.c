/* Arenas and heaps from end to end: bytes survive growth, figures add up, everything goes back. */
#include "check.h"

static void bytes_survive(granule_pool pool, granule_stream stream) {
  granule_arena_config config = {.capacity = 64 * MIB};
  granule_arena arena;
  OK(granule_arena_create(pool, &config, &arena));
  OK(granule_arena_grow(arena, 1000, stream));
  granule_arena_info before, after;
  OK(granule_arena_get_info(arena, &before));
  CHECK(before.len == 1000 && before.mapped >= 1000 && before.capacity >= 64 * MIB);
  char text[16] = "fifteen letters", back[16] = "";
  OK(granule_copy_from_host(stream, before.base + 900, text, sizeof text));
  OK(granule_arena_grow(arena, 9 * MIB, stream));
  OK(granule_arena_get_info(arena, &after));
  CHECK(after.base == before.base && after.len == 9 * MIB);
  OK(granule_copy_to_host(stream, back, after.base + 900, sizeof back));
  CHECK(memcmp(text, back, sizeof text) == 0);
  OK(granule_fill(stream, after.base + 8 * MIB, 0x5a, 4096));
  OK(granule_copy_to_host(stream, back, after.base + 8 * MIB, sizeof back));
  CHECK(back[0] == 0x5a && back[15] == 0x5a);

  FAILS(GRANULE_TOO_LARGE, granule_arena_grow(arena, 1000 * MIB, stream));
  granule_arena second;
  OK(granule_arena_create(pool, &config, &second));
  granule_arena both[2] = {arena, second};
  uint64_t to[2] = {12 * MIB, 30 * MIB};
  FAILS(GRANULE_OUT_OF_MEMORY, granule_arena_grow_all(both, to, 2, stream));
  granule_out_of_memory why;
  OK(granule_last_out_of_memory(&why));
  CHECK(why.budget == 32 * MIB && why.requested > 0 && why.missing > 0 && why.limit == GRANULE_LIMIT_BUDGET);
  OK(granule_arena_get_info(arena, &after));
  CHECK(after.len == 9 * MIB);
  to[1] = 4 * MIB;
  OK(granule_arena_grow_all(both, to, 2, 0));
  granule_arena twice[2] = {arena, arena};
  FAILS(GRANULE_INVALID_ARGUMENT, granule_arena_grow_all(twice, to, 2, 0));
  OK(granule_arena_shrink(arena, 1000));
  OK(granule_arena_truncate(arena, 10));
  OK(granule_arena_shrink_deferred(arena, 0));
  OK(granule_arena_close(arena));
  OK(granule_arena_close(second));
}

static int attempts;

static int on_shortage(void *context, uint64_t requested, uint32_t attempt, const char *message) {
  CHECK(requested == 24 * MIB && *message);
  attempts = (int)attempt;
  uint64_t *victim = context;
  if (victim[1] == 0) return 0;
  /* The callback may use the heap. */
  OK(granule_heap_free(victim[0], victim[1]));
  victim[1] = 0;
  return 1;
}

static void blocks(granule_pool pool, granule_stream stream, granule_stream other) {
  granule_heap_config config;
  OK(granule_heap_config_init(&config));
  config.granule_max = 8 * MIB;
  config.granule_min = 2 * MIB;
  config.wait_us = 0;
  granule_heap heap;
  OK(granule_heap_create(pool, &config, &heap));
  uint64_t none, small, large, aligned, usable;
  OK(granule_heap_alloc(heap, 0, 0, stream, NULL, &none));
  CHECK(none == 0);
  OK(granule_heap_free(heap, none));
  OK(granule_heap_alloc(heap, 1000, 0, stream, NULL, &small));
  OK(granule_heap_alloc(heap, 5 * MIB, 0, stream, "weights \"1\"", &large));
  OK(granule_heap_alloc(heap, 100, 65536, stream, NULL, &aligned));
  CHECK(small % 256 == 0 && large % 256 == 0 && aligned % 65536 == 0);
  OK(granule_heap_usable_size(heap, small, &usable));
  CHECK(usable >= 1000);
  char *snapshot;
  OK(granule_heap_snapshot(heap, &snapshot));
  CHECK(strstr(snapshot, "\"name\":\"weights \\\"1\\\"\",") || strstr(snapshot, "\"name\":\"weights \\\"1\\\"\"}"));
  granule_string_free(snapshot);
  granule_string_free(NULL);
  granule_heap_stats stats;
  OK(granule_heap_get_stats(heap, &stats));
  CHECK(stats.blocks == 3 && stats.held == stats.live + stats.free && stats.allocs == stats.hits + stats.misses);

  FAILS(GRANULE_STALE, granule_heap_free(heap, large + 256));
  FAILS(GRANULE_STALE, granule_heap_free(heap, 4096));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_heap_alloc(heap, 10, 3, stream, NULL, &usable));
  OK(granule_heap_record_use(heap, large, other));
  OK(granule_heap_free(heap, large));
  FAILS(GRANULE_STALE, granule_heap_free(heap, large));
  OK(granule_heap_free(heap, small));
  OK(granule_heap_free(heap, aligned));

  uint64_t victim[2] = {heap, 0}, wanted;
  OK(granule_heap_alloc(heap, 16 * MIB, 0, stream, NULL, &victim[1]));
  OK(granule_heap_set_oom_callback(heap, on_shortage, victim));
  OK(granule_heap_alloc(heap, 24 * MIB, 0, stream, NULL, &wanted));
  CHECK(attempts == 1 && victim[1] == 0);
  uint64_t more;
  FAILS(GRANULE_OUT_OF_MEMORY, granule_heap_alloc(heap, 24 * MIB, 0, stream, NULL, &more));
  OK(granule_heap_set_oom_callback(heap, NULL, NULL));
  OK(granule_heap_free(heap, wanted));
  uint64_t given_back;
  OK(granule_stream_synchronize(stream));
  OK(granule_stream_synchronize(other));
  OK(granule_heap_trim(heap, &given_back));
  CHECK(given_back > 0);
  OK(granule_heap_close(heap));
}

int main(void) {
  granule_device device;
  granule_pool pool = a_pool(&device, 32 * MIB);
  granule_device_info info;
  OK(granule_device_get_info(device, &info));
  CHECK(info.granularity > 0 && info.total_memory > 0 && info.name[0]);
  uint64_t free_bytes, total;
  OK(granule_device_memory(device, &free_bytes, &total));
  CHECK(free_bytes <= total);
  granule_stream stream, other, standard;
  OK(granule_stream_create(device, &stream));
  OK(granule_stream_create(device, &other));
  OK(granule_stream_adopt(device, NULL, &standard));
  OK(granule_stream_wait(stream, other));

  bytes_survive(pool, stream);
  blocks(pool, stream, other);

  uint64_t released;
  OK(granule_pool_trim(pool, 0, &released));
  granule_pool_stats stats;
  OK(granule_pool_get_stats(pool, &stats));
  CHECK(stats.created == 0 && stats.mapped == 0 && stats.idle == 0 && stats.peak_created > 0);
  OK(granule_pool_reset_peaks(pool));
  OK(granule_pool_get_stats(pool, &stats));
  CHECK(stats.peak_created == 0);
  OK(granule_pool_set_budget(pool, 16 * MIB));
  OK(granule_stream_close(stream));
  OK(granule_stream_close(other));
  OK(granule_stream_close(standard));
  OK(granule_pool_close(pool));
  OK(granule_device_close(device));
  puts("passed");
  return 0;
}
