/* What the programs share: a check that says where it failed, and what the library says. */
#ifndef CHECK_H
#define CHECK_H

#include "granule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((uint64_t)1 << 20)

#define CHECK(condition)                                                                                       \
  do {                                                                                                         \
    if (!(condition)) {                                                                                        \
      fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, granule_last_error());   \
      exit(1);                                                                                                 \
    }                                                                                                          \
  } while (0)

#define OK(call) CHECK((call) == GRANULE_OK)
#define FAILS(status, call) CHECK((call) == (status) && granule_last_status() == (status) && *granule_last_error())

/* A device and a pool of small granules. */
static inline granule_pool a_pool(granule_device *device, uint64_t budget) {
  const char *name = getenv("GRANULE_TEST_DEVICE");
  OK(granule_device_open(name ? name : "host", device));
  granule_pool_config config;
  OK(granule_pool_config_init(&config));
  config.budget = budget;
  config.granule = 2 * MIB;
  config.largest_granule = 8 * MIB;
  granule_pool pool;
  OK(granule_pool_create(*device, &config, &pool));
  return pool;
}

#endif
