/* The C ABI of granule. Generated from the documentation of the functions; do not edit.
 *
 * Functions answer GRANULE_OK or another status, and granule_last_error() then says what went wrong on this thread.
 * Handles are numbers; a closed one is GRANULE_STALE and never something else's. Addresses are those of the device.
 * Sizes are bytes. All functions may be called from any thread.
 */

#ifndef GRANULE_H
#define GRANULE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Done.
#define GRANULE_OK 0

// No memory within a limit or on the device; `granule_last_out_of_memory` has the figures.
#define GRANULE_OUT_OF_MEMORY 1

// An argument makes no sense: a null pointer, a setting, a size, text that is not UTF-8.
#define GRANULE_INVALID_ARGUMENT 2

// A handle or address that names nothing (any more), or something of another kind.
#define GRANULE_STALE 3

// The driver refused a call; the message names it and its code.
#define GRANULE_DRIVER 4

// There is no such driver, device or ability here.
#define GRANULE_UNSUPPORTED 5

// More than there are addresses for, or than can be expressed.
#define GRANULE_TOO_LARGE 6

// Something is in use: pins, memory above a new budget, work that took too long.
#define GRANULE_BUSY 7

// The books are wrong, or a thread could not be started.
#define GRANULE_INTERNAL 8

// A panic was caught. The object it happened in may not be usable any more; nothing else is concerned.
#define GRANULE_PANIC 9

// `granule_out_of_memory.limit`: the pool's budget.
#define GRANULE_LIMIT_BUDGET 0

// `granule_out_of_memory.limit`: the heap's own limit.
#define GRANULE_LIMIT_HEAP 1

// `granule_out_of_memory.limit`: the device, or other processes on it.
#define GRANULE_LIMIT_DEVICE 2

// `granule_device_info.driver`.
#define GRANULE_DRIVER_CUDA 1

// `granule_device_info.driver`.
#define GRANULE_DRIVER_HOST 2

// `granule_device_info.driver`.
#define GRANULE_DRIVER_SIM 3

// `granule_pool_config.policy`: by need, the rest kept idle up to the watermark; `base` bytes are static.
#define GRANULE_POLICY_HYBRID 0

// `granule_pool_config.policy`: all created up front, never returned.
#define GRANULE_POLICY_STATIC 1

// `granule_pool_config.policy`: returned as soon as it is idle.
#define GRANULE_POLICY_DYNAMIC 2

// `granule_heap_config.rounding`: sizes are rounded to 256 bytes only.
#define GRANULE_ROUNDING_EXACT 0

// `granule_heap_config.rounding`: to powers of two. Any other power of two `n`: to `n` equal steps between two powers.
#define GRANULE_ROUNDING_POWER_OF_TWO 1

// The most dimensions of a tensor here.
#define GRANULE_DIMS 16

// What a function answers: `GRANULE_OK` or one of the other codes.
typedef int32_t granule_status;

// The figures of the last lack of memory of a thread, in bytes.
typedef struct granule_out_of_memory {
  // Asked for.
  uint64_t requested;
  // Of that, still missing when no more could be had.
  uint64_t missing;
  // The pool's budget.
  uint64_t budget;
  // Created by the pool.
  uint64_t created;
  // Created and mapped.
  uint64_t mapped;
  // Created and idle in the pool.
  uint64_t idle;
  // Held back by work that has not finished.
  uint64_t pending;
  // In live blocks of the heap; 0 without a heap.
  uint64_t heap_live;
  // Free in the heap; 0 without a heap.
  uint64_t heap_free;
  // One of `GRANULE_LIMIT_...`.
  uint32_t limit;
} granule_out_of_memory;

// A device; 0 is none. Close it with `granule_device_close`; what was made of it lives on.
typedef uint64_t granule_device;

// Facts about a device. Sizes in bytes.
typedef struct granule_device_info {
  // Name, ended by a zero, cut if it is longer.
  char name[64];
  // All of its memory.
  uint64_t total_memory;
  // Smallest granule.
  uint64_t granularity;
  // One of `GRANULE_DRIVER_...`.
  uint32_t driver;
  // Number of the device.
  uint32_t ordinal;
} granule_device_info;

// A stream; 0 is none.
typedef uint64_t granule_stream;

// Settings of a pool. Start from `granule_pool_config_init`. Sizes in bytes.
typedef struct granule_pool_config {
  // The most that may be created at a time; 0 for all of the device's memory.
  uint64_t budget;
  // The granule.
  uint64_t granule;
  // The largest granule; at least `granule`.
  uint64_t largest_granule;
  // Static bytes of the hybrid policy.
  uint64_t base;
  // Idle bytes kept; `UINT64_MAX` for the policy's default.
  uint64_t watermark;
  // Idle bytes created ahead of need by a thread.
  uint64_t spare;
  // Microseconds that an allocation may wait for work to end.
  uint64_t wait_us;
  // One of `GRANULE_POLICY_...`.
  uint32_t policy;
  // Not 0: zero memory of one owner before another gets it.
  uint32_t zero_on_handover;
  // Created beyond the highest `mapped` and so much more, in 1/10,000, memory takes the place of idle granules;
  // `UINT32_MAX` for never.
  uint32_t slack;
} granule_pool_config;

// A pool; 0 is none.
typedef uint64_t granule_pool;

// Figures of a pool. Sizes in bytes. `created == mapped + idle + in_flight` at every moment.
typedef struct granule_pool_stats {
  uint64_t budget;
  uint64_t created;
  uint64_t mapped;
  uint64_t idle;
  uint64_t in_flight;
  uint64_t pending;
  uint64_t peak_created;
  uint64_t peak_mapped;
  uint64_t creates;
  uint64_t releases;
  uint64_t recycled;
} granule_pool_stats;

// Settings of an arena. Sizes in bytes.
typedef struct granule_arena_config {
  // Addresses to reserve: the most it can ever hold. Addresses cost no memory.
  uint64_t capacity;
  // Smaller reservations are tried down to this; 0 for none but `capacity`.
  uint64_t min_capacity;
  // Kept mapped ahead of the length by the pool's thread; 0 for nothing.
  uint64_t look_ahead;
  // Largest granule and growth step; 0 for the pool's.
  uint64_t granule;
} granule_arena_config;

// An arena: one range of addresses whose length changes in place; 0 is none.
typedef uint64_t granule_arena;

// Figures of an arena. Sizes in bytes.
typedef struct granule_arena_info {
  // Address of the first byte; never changes.
  uint64_t base;
  // In use.
  uint64_t len;
  // Addresses reserved.
  uint64_t capacity;
  // With memory behind them.
  uint64_t mapped;
} granule_arena_info;

// Settings of a heap. Start from `granule_heap_config_init`. Sizes in bytes.
typedef struct granule_heap_config {
  // Blocks up to this size share granules of 2 MiB.
  uint64_t small;
  // Largest granule, a multiple of 2 MiB.
  uint64_t granule_max;
  // Growth takes at least this much where the footprint allows it.
  uint64_t granule_min;
  // Addresses for each stream; 0 for four times the budget.
  uint64_t addresses;
  // Most bytes this heap may hold; 0 for the pool's budget.
  uint64_t limit;
  // Microseconds that an allocation may wait for work to end.
  uint64_t wait_us;
  // Granules that may be mapped twice at a time for each stream; 0 unmaps at once.
  uint64_t aliases;
  // Footprint aimed at over the live peak, in 1/10,000.
  uint32_t slack;
  // `GRANULE_ROUNDING_...`.
  uint32_t rounding;
} granule_heap_config;

// A heap: blocks of any size in stream order; 0 is none.
typedef uint64_t granule_heap;

// Figures of a heap over all its streams. Sizes in bytes. `held == live + free` and `allocs == hits + misses`. Blocks in
// `limbo`, freed while other streams use them, count as live; `scoped` is what captures keep, or private pools of PyTorch.
typedef struct granule_heap_stats {
  uint64_t live;
  uint64_t live_peak;
  uint64_t blocks;
  uint64_t held;
  uint64_t held_peak;
  uint64_t granules;
  uint64_t free;
  uint64_t largest_free;
  uint64_t idle;
  uint64_t limbo;
  uint64_t aliases;
  uint64_t allocs;
  uint64_t hits;
  uint64_t misses;
  uint64_t remaps;
  uint64_t creates;
  uint64_t host_waits;
  uint64_t device_waits;
  uint64_t failures;
  uint64_t broken;
  uint64_t scoped;
} granule_heap_stats;

// Called when an allocation is about to fail: `requested` bytes, for the `attempt`-th time (1 at first), and why. Not 0 to
// try again. It may call any function of this library, and must not unwind.
typedef int (*granule_oom_callback)(void *context, uint64_t requested, uint32_t attempt, const char *message);

// A tensor as DLPack describes it. Strides are in elements.
typedef struct granule_tensor {
  // Of each dimension, the outermost first.
  int64_t shape[GRANULE_DIMS];
  // Of each dimension. On export, all zero for a dense row-major tensor.
  int64_t strides[GRANULE_DIMS];
  // Address of the first element; on export, bytes from the start of the arena.
  uint64_t start;
  // How many dimensions.
  uint32_t ndim;
  // `DLDeviceType`: 1 host, 2 CUDA. Ignored on export.
  int32_t device_type;
  // Number of the device. Ignored on export.
  int32_t device_id;
  // `DLDataTypeCode`: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool.
  uint8_t code;
  // Bits of an element.
  uint8_t bits;
  // Lanes; 1 for a scalar.
  uint16_t lanes;
  // Not 0 if it must not be written to.
  uint32_t read_only;
} granule_tensor;

// An imported DLPack tensor; 0 is none.
typedef uint64_t granule_import;

// Throws a C++ exception with that message: function, file, line, message. `c10::detail::torchCheckFail` is one.
typedef void (*granule_raise)(const char*, const char*, uint32_t, const char*);

// Whether an allocation on `stream` belongs to a private pool.
typedef bool (*granule_filter)(void *context, void *stream);

// Ends a filter.
typedef void (*granule_drop)(void *context);

// Memory under PyTorch on one device. Sizes in bytes.
typedef struct granule_torch_stats {
  // Asked for and not freed.
  uint64_t requested;
  // The most of that since the last reset.
  uint64_t requested_peak;
  // Physical memory of the device's pool, with what arenas hold.
  uint64_t reserved;
  // The most of that since the last reset.
  uint64_t reserved_peak;
  // The budget.
  uint64_t budget;
  // The heap's figures.
  struct granule_heap_stats heap;
} granule_torch_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The message of this thread's last failure, in UTF-8 and ended by a zero; empty if there was none. Valid until
// the next function of this library fails on this thread. Never null.
const char *granule_last_error(void);

// The status of this thread's last failure; `GRANULE_OK` if there was none.
granule_status granule_last_status(void);

// Forgets this thread's last failure.
void granule_clear_error(void);

// The figures of this thread's last failure. `GRANULE_INVALID_ARGUMENT` if it was no lack of memory, or the driver
// said so by itself.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_last_out_of_memory(struct granule_out_of_memory *out);

// A name of a status, ended by a zero; never freed.
const char *granule_status_name(granule_status status);

// Version of the library, ended by a zero; never freed.
const char *granule_version(void);

// Opens a device: `cuda`, `cuda:N`, `host` (host memory under CUDA's rules) or `sim`; null for the one that
// `GRANULE_DRIVER` names, else the first CUDA device, else `host`.
//
// # Safety
//
// `name` is null or a string; `out` is null or valid for a write.
granule_status granule_device_open(const char *name, granule_device *out);

// Closes the handle. Pools, heaps and arenas of the device live on.
granule_status granule_device_close(granule_device device);

// Facts about a device.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_device_get_info(granule_device device, struct granule_device_info *out);

// Free and total bytes now, as the driver counts them.
//
// # Safety
//
// `free` and `total` are null or valid for a write.
granule_status granule_device_memory(granule_device device, uint64_t *free, uint64_t *total);

// Makes a stream without implicit order against others.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_stream_create(granule_device device, granule_stream *out);

// Takes a stream of another library: on CUDA a `CUstream` or `cudaStream_t` of the device's primary context; null is
// the default stream. It is not destroyed when the handle is closed.
//
// # Safety
//
// `out` is null or valid for a write. `raw` is such a stream, until the handle is closed and whatever used it is gone.
granule_status granule_stream_adopt(granule_device device,
                                    void *raw,
                                    granule_stream *out);

// The driver's handle of a stream: on CUDA a `CUstream`.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_stream_raw(granule_stream stream, void **out);

// Closes the handle. A stream made here is destroyed when nothing uses it any more; its work finishes.
granule_status granule_stream_close(granule_stream stream);

// Waits until all work queued on the stream is done.
granule_status granule_stream_synchronize(granule_stream stream);

// Makes later work of `stream` wait, on the device, for what is queued on `other` so far.
granule_status granule_stream_wait(granule_stream stream, granule_stream other);

// Queues a fill of `len` bytes at `addr`.
granule_status granule_fill(granule_stream stream, uint64_t addr, uint8_t byte, size_t len);

// Copies from the host to the device in stream order; returns when `from` may change again.
//
// # Safety
//
// `from` is valid for reads of `len` bytes, or `len` is 0.
granule_status granule_copy_from_host(granule_stream stream, uint64_t to, const void *from, size_t len);

// Copies from the device to the host, behind what is queued on the stream; returns when the bytes are there.
//
// # Safety
//
// `to` is valid for writes of `len` bytes, which have been written before, or `len` is 0.
granule_status granule_copy_to_host(granule_stream stream, void *to, uint64_t from, size_t len);

// The default settings.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_pool_config_init(struct granule_pool_config *out);

// A pool of the device's memory; null settings are the default ones.
//
// # Safety
//
// `config` is null or points to settings; `out` is null or valid for a write.
granule_status granule_pool_create(granule_device device,
                                   const struct granule_pool_config *config,
                                   granule_pool *out);

// Closes the handle. Arenas and heaps of the pool keep it alive. Its thread, if memory is made or mapped ahead, ends the call
// it is in first; nobody waits for that.
granule_status granule_pool_close(granule_pool pool);

// Changes the budget, in bytes. `GRANULE_BUSY` if more is in use.
granule_status granule_pool_set_budget(granule_pool pool, uint64_t bytes);

// Returns idle memory to the device until at most `keep` idle bytes are left; `released` (may be null) gets the bytes.
//
// # Safety
//
// `released` is null or valid for a write.
granule_status granule_pool_trim(granule_pool pool,
                                 uint64_t keep,
                                 uint64_t *released);

// Figures of this moment.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_pool_get_stats(granule_pool pool, struct granule_pool_stats *out);

// Sets the peaks of a pool to what there is now.
granule_status granule_pool_reset_peaks(granule_pool pool);

// Recounts what the pool has and compares it with its figures: `GRANULE_INTERNAL` if they differ. For tests: exact only
// while no other thread is inside a call that concerns the pool.
granule_status granule_pool_audit(granule_pool pool);

// How many handles of all kinds are open in this process. For tests that look for lost ones.
uint64_t granule_open_handles(void);

// Makes an empty arena: addresses and no memory.
//
// # Safety
//
// `config` points to settings; `out` is null or valid for a write.
granule_status granule_arena_create(granule_pool pool,
                                    const struct granule_arena_config *config,
                                    granule_arena *out);

// Gives the memory back and closes the handle. Waits for the work of the streams that used it. Memory that DLPack
// tensors point into stays until they are deleted.
granule_status granule_arena_close(granule_arena arena);

// Address, length and what is mapped.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_arena_get_info(granule_arena arena, struct granule_arena_info *out);

// Grows to at least `to` bytes in place. `stream` is the one that uses the new memory first: it waits where the host
// would have to; 0 for none, and the host waits.
granule_status granule_arena_grow(granule_arena arena,
                                  uint64_t to,
                                  granule_stream stream);

// Grows each of `count` arenas of one pool to at least its length, or none; `stream` as for `granule_arena_grow`.
//
// # Safety
//
// `arenas` and `to` point to `count` values each.
granule_status granule_arena_grow_all(const granule_arena *arenas,
                                      const uint64_t *to,
                                      size_t count,
                                      granule_stream stream);

// Shrinks to `to` bytes and gives whole granules past it back to the pool. Waits for the work of the streams that use
// it. `GRANULE_BUSY` if pins, such as DLPack tensors, reach past `to`.
granule_status granule_arena_shrink(granule_arena arena,
                                    uint64_t to);

// As `granule_arena_shrink`, without a wait: the memory goes back once the work queued so far is done.
granule_status granule_arena_shrink_deferred(granule_arena arena, uint64_t to);

// Sets a smaller length and keeps the memory.
granule_status granule_arena_truncate(granule_arena arena, uint64_t to);

// Says that work on `stream` uses this memory, from now until the arena goes.
granule_status granule_arena_record_use(granule_arena arena, granule_stream stream);

// The default settings.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_heap_config_init(struct granule_heap_config *out);

// A heap on a pool; null settings are the default ones.
//
// # Safety
//
// `config` is null or points to settings; `out` is null or valid for a write.
granule_status granule_heap_create(granule_pool pool,
                                   const struct granule_heap_config *config,
                                   granule_heap *out);

// Closes the handle. Memory goes back once the streams' work is done. Blocks that were not freed are lost with it.
granule_status granule_heap_close(granule_heap heap);

// A block of at least `size` bytes for use on `stream` at once, at a multiple of `align` (a power of two; 0 for 256).
// No bytes have address 0. `name` (may be null) shows in snapshots and errors.
//
// # Safety
//
// `name` is null or a string; `out` is null or valid for a write.
granule_status granule_heap_alloc(granule_heap heap,
                                  uint64_t size,
                                  uint64_t align,
                                  granule_stream stream,
                                  const char *name,
                                  uint64_t *out);

// Frees a block behind the work of its own stream, and of those whose use was recorded. Address 0 does nothing.
granule_status granule_heap_free(granule_heap heap,
                                 uint64_t addr);

// Says that work queued on `stream` uses the block, now or until it is freed.
granule_status granule_heap_record_use(granule_heap heap, uint64_t addr, granule_stream stream);

// Bytes that the block at an address may use.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_heap_usable_size(granule_heap heap, uint64_t addr, uint64_t *out);

// Gives granules without a live byte back to the pool; `given_back` (may be null) gets the bytes.
//
// # Safety
//
// `given_back` is null or valid for a write.
granule_status granule_heap_trim(granule_heap heap, uint64_t *given_back);

// Figures of this moment.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_heap_get_stats(granule_heap heap, struct granule_heap_stats *out);

// Recounts what the heap has and compares it with its figures: `GRANULE_INTERNAL` if they differ. For tests: exact only
// while no other thread is inside a call that concerns the heap.
granule_status granule_heap_audit(granule_heap heap);

// All that the heap holds, as JSON: `stats`, and for each of `streams` its `granules`, `blocks`, `free` runs and
// `aliases`, addresses and bytes as numbers. Free the text with `granule_string_free`.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_heap_snapshot(granule_heap heap,
                                     char **out);

// Frees a text that this library made. Null does nothing.
//
// # Safety
//
// `text` is null, or such a text that was not freed yet.
void granule_string_free(char *text);

// Sets what is called when an allocation of the heap is about to fail; null takes it away. It runs on the thread that
// allocates, and no lock is held.
//
// # Safety
//
// `callback` with `context` can be called from any thread until it is replaced and no call is under way.
granule_status granule_heap_set_oom_callback(granule_heap heap,
                                             granule_oom_callback callback,
                                             void *context);

// Exports part of an arena as a DLPack tensor, a `DLManagedTensor`, or a `DLManagedTensorVersioned` if `versioned` is not 0.
// The consumer calls its deleter; until then the memory stays, also when the arena is closed.
//
// The tensor may reach past the arena's length, up to its capacity: a tensor that is to grow in place is exported once at
// its largest. Then only elements below the length may be touched, and nothing keeps the arena from shrinking below them.
// A tensor within the length is pinned.
//
// # Safety
//
// `tensor` points to a description; `out` is null or valid for a write.
granule_status granule_arena_export_dlpack(granule_arena arena,
                                           const struct granule_tensor *tensor,
                                           uint32_t versioned,
                                           void **out);

// Takes over a DLPack tensor (`versioned` as for the export) and describes it. It is deleted when the handle is closed.
// After a failure it has been deleted, unless an argument was null.
//
// # Safety
//
// `managed` is null or such a tensor that nobody else consumes; `tensor` and `out` are null or valid for a write.
granule_status granule_import_dlpack(void *managed,
                                     uint32_t versioned,
                                     struct granule_tensor *tensor,
                                     granule_import *out);

// Deletes an imported tensor.
granule_status granule_import_close(granule_import import);

// Sets what a failed allocation calls: `out_of_memory` for lack of memory, `other` for the rest. Null is none, and the
// allocation answers null then.
//
// # Safety
//
// Both are null or functions of that type which throw a C++ exception, and may be called from any thread.
void granule_torch_set_raise(granule_raise out_of_memory,
                             granule_raise other);

// Reads settings (`GRANULE_CONF`) for devices that have not been used yet. Unknown keys are refused; `GRANULE_BUSY` once
// memory was allocated.
//
// # Safety
//
// `conf` is null or a string.
granule_status granule_torch_configure(const char *conf);

// `malloc_fn` of PyTorch: `size` bytes for use on `stream` at once; null for no bytes. Without memory it throws, see
// `granule_torch_set_raise`.
//
// # Safety
//
// `stream` is a stream of the device's primary context that is never destroyed, or null.
void *granule_torch_alloc(ptrdiff_t size,
                          int device,
                          void *stream);

// `free_fn` of PyTorch. An address that is not known leaves a message for the thread and changes nothing.
//
// # Safety
//
// Work that uses the block is queued on the stream it was allocated on, or was recorded.
void granule_torch_free(void *ptr, ptrdiff_t size, int device, void *_stream);

// `record_stream_fn` of PyTorch: work on `stream` uses the block, or the arena if it is the start of a growable tensor.
//
// # Safety
//
// `stream` is a stream of the block's device that is never destroyed, or null.
void granule_torch_record_stream(void *ptr,
                                 void *stream);

// `base_alloc_fn` of PyTorch: the start and size of the allocation at `ptr`. An address that is not the start of a block
// is answered as it is, with size 0.
//
// # Safety
//
// `size` is null or valid for a write.
void *granule_torch_base_alloc(void *ptr,
                               size_t *size);

// `memory_fraction_fn` of PyTorch: the budget as a part of the device's memory. A part below what is in use changes
// nothing and leaves a message.
void granule_torch_memory_fraction(double fraction,
                                   int device);

// `reset_fn` of PyTorch, behind `torch.cuda.empty_cache`: gives idle memory back to the device.
void granule_torch_empty_cache(void);

// `begin_allocate_to_pool_fn` of PyTorch, whose last argument, a C++ object, is not looked at: all allocations of the
// device go to the pool until the end. Only one pool at a time; `granule_torch_begin_filtered` can do more.
//
// # Safety
//
// None of its own: it is unsafe for being called with C++'s arguments.
void granule_torch_begin_pool(int device,
                              uint64_t id_0,
                              uint64_t id_1,
                              const void *_filter);

// As `granule_torch_begin_pool`, for allocations on streams that pass the filter. `drop` (may be null) ends it.
//
// # Safety
//
// `filter` with `context` can be called from any thread until `drop` is called with it, and does not unwind.
void granule_torch_begin_filtered(int device,
                                  uint64_t id_0,
                                  uint64_t id_1,
                                  granule_filter filter,
                                  void *context,
                                  granule_drop drop);

// `end_allocate_to_pool_fn` of PyTorch: allocations go to the heap again.
void granule_torch_end_pool(int device, uint64_t id_0, uint64_t id_1);

// `release_pool_fn` of PyTorch: nothing will replay what the pool's memory was captured for. It goes back to the heap
// once the streams that PyTorch allocated on have done what is queued on them now.
void granule_torch_release_pool(int device,
                                uint64_t id_0,
                                uint64_t id_1);

// Figures of a device.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_torch_get_stats(int device, struct granule_torch_stats *out);

// What serving PyTorch on a device has cost so far, as JSON: calls and nanoseconds of `allocs` and `frees`, driver calls
// included, and calls, failures and nanoseconds of each call of the `driver`. `GRANULE_UNSUPPORTED` unless the settings say
// `timing:True`. Free the text with `granule_string_free`.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_torch_costs(int device,
                                   char **out);

// Sets the peaks of a device to what there is now.
granule_status granule_torch_reset_peaks(int device);

// A handle of the pool that serves a device, for arenas under the same budget. Close it as any other.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_torch_pool(int device, granule_pool *out);

// A handle of a device as PyTorch's memory is on it. Close it as any other.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_torch_device(int device, granule_device *out);

// A handle of the heap that serves a device. Close it as any other.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_torch_heap(int device, granule_heap *out);

// A handle of a stream of PyTorch on a device, to grow arenas with. Close it as any other.
//
// # Safety
//
// `raw` as for `granule_torch_alloc`; `out` is null or valid for a write.
granule_status granule_torch_stream(int device, void *raw, granule_stream *out);

// A snapshot of the heap that serves a device, as `granule_heap_snapshot`.
//
// # Safety
//
// `out` is null or valid for a write.
granule_status granule_torch_snapshot(int device, char **out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GRANULE_H */
