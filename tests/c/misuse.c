/* Bad input: a status and a message each, and nothing breaks. Messages belong to their thread. */
#include "check.h"

#include <pthread.h>

static void *other_thread(void *unused) {
  (void)unused;
  CHECK(granule_last_status() == GRANULE_OK && *granule_last_error() == 0);
  FAILS(GRANULE_STALE, granule_pool_close(77));
  return NULL;
}

static void stale_handles(void) {
  granule_device device;
  granule_pool pool = a_pool(&device, 8 * MIB);
  granule_pool_stats stats;
  uint64_t address;
  OK(granule_pool_close(pool));
  FAILS(GRANULE_STALE, granule_pool_close(pool));
  FAILS(GRANULE_STALE, granule_pool_get_stats(pool, &stats));
  /* A new pool may lie where the old one was, but has another name. */
  granule_pool next;
  OK(granule_pool_create(device, NULL, &next));
  CHECK(next != pool);
  FAILS(GRANULE_STALE, granule_pool_get_stats(pool, &stats));
  /* Of another kind. */
  FAILS(GRANULE_STALE, granule_arena_close(next));
  FAILS(GRANULE_STALE, granule_heap_alloc(device, 1, 0, next, NULL, &address));
  FAILS(GRANULE_STALE, granule_stream_synchronize(0));
  FAILS(GRANULE_STALE, granule_stream_synchronize(UINT64_MAX));
  OK(granule_pool_close(next));
  /* What was made of a device lives on without it. */
  OK(granule_pool_create(device, NULL, &next));
  OK(granule_device_close(device));
  OK(granule_pool_get_stats(next, &stats));
  OK(granule_pool_close(next));
}

static void bad_arguments(void) {
  granule_device device;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_device_open("host", NULL));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_device_open("rocm", &device));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_device_open("\xff\xfe", &device));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_device_open("cuda:x", &device));
  FAILS(GRANULE_UNSUPPORTED, granule_device_open("host:1", &device));
  granule_pool pool = a_pool(&device, 8 * MIB), bad;
  granule_pool_config config;
  OK(granule_pool_config_init(&config));
  config.granule = 3;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_pool_create(device, &config, &bad));
  OK(granule_pool_config_init(&config));
  config.policy = 9;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_pool_create(device, &config, &bad));
  granule_heap heap;
  granule_heap_config settings;
  OK(granule_heap_config_init(&settings));
  settings.granule_max = 1;
  FAILS(GRANULE_INVALID_ARGUMENT, granule_heap_create(pool, &settings, &heap));
  OK(granule_heap_create(pool, NULL, &heap));
  granule_stream stream;
  OK(granule_stream_create(device, &stream));
  uint64_t address;
  FAILS(GRANULE_TOO_LARGE, granule_heap_alloc(heap, UINT64_MAX, 0, stream, NULL, &address));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_heap_alloc(heap, 8, 0, stream, "\xff", &address));
  FAILS(GRANULE_OUT_OF_MEMORY, granule_heap_alloc(heap, 9 * MIB, 0, stream, NULL, &address));
  granule_out_of_memory why;
  OK(granule_last_out_of_memory(&why));
  CHECK(why.requested == 9 * MIB && why.budget == 8 * MIB);
  FAILS(GRANULE_STALE, granule_heap_free(heap, 1));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_last_out_of_memory(&why));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_copy_from_host(stream, 0, NULL, 5));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_fill(stream, UINT64_MAX, 0, 5));
  char byte = 0;
  FAILS(GRANULE_DRIVER, granule_copy_from_host(stream, 4096, &byte, 1));
  /* Of another device. */
  granule_device second;
  granule_stream foreign;
  OK(granule_device_open("sim", &second));
  OK(granule_stream_create(second, &foreign));
  FAILS(GRANULE_INVALID_ARGUMENT, granule_heap_alloc(heap, 8, 0, foreign, NULL, &address));
  granule_clear_error();
  CHECK(granule_last_status() == GRANULE_OK && *granule_last_error() == 0);
  CHECK(strcmp(granule_status_name(GRANULE_STALE), "stale") == 0 && *granule_status_name(-5) && *granule_version());
}

int main(void) {
  FAILS(GRANULE_STALE, granule_pool_close(55));
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strstr(granule_last_error(), "0x37"));
  stale_handles();
  bad_arguments();
  /* Objects are left open: the end of the process takes them. */
  puts("passed");
  return 0;
}
