//! GPU memory on CUDA's virtual memory calls: contiguous memory that grows and shrinks in place, at a
//! fixed address and without copying. A pool of physical granules serves all of it, so that what one
//! tensor gives back another gets by remapping.
//!
//! ```
//! use granule::{Device, Pool, PoolConfig, Tensor, units::MIB};
//!
//! // `Device::auto()` takes a GPU if there is one; here it is host memory under CUDA's rules.
//! let device = Device::by_name("host")?;
//! let pool = Pool::new(&device, PoolConfig::with_budget(64 * MIB))?;
//! let stream = device.create_stream()?;
//!
//! // Room for a million rows of 1,024 floats; addresses cost nothing, so no memory is taken yet.
//! let mut tensor = Tensor::<f32>::new(&pool, &[1024], 1_000_000)?;
//! let address = tensor.ptr();
//! tensor.grow_on(100, &stream)?;
//! tensor.copy_from_host(99, &[1.5; 1024], &stream)?;
//!
//! tensor.grow_on(10_000, &stream)?;
//! let mut row = [0.0; 1024];
//! tensor.copy_to_host(99, &mut row, &stream)?;
//! assert_eq!((tensor.ptr(), row), (address, [1.5; 1024]));
//!
//! // The memory goes back to the pool once the stream is done with it, and to the next tensor.
//! tensor.shrink(100)?;
//! let other = Tensor::<u8>::new(&pool, &[], 32 * MIB)?;
//! other.grow_on(32 * MIB, &stream)?;
//! assert!(pool.stats().created <= 64 * MIB);
//! # Ok::<(), granule::Error>(())
//! ```
//!
//! # From CUDA's words to ours
//!
//! | CUDA | here | |
//! |------|------|-|
//! | `cuMemAddressReserve` | reservation | addresses with nothing behind them; what an [`Arena`] starts as |
//! | `cuMemCreate` | granule | physical memory, mapped and moved whole or not at all |
//! | `cuMemMap`, `cuMemSetAccess` | mapping | one granule in one place of a reservation |
//! | `cuMemUnmap`, `cuMemRelease` | shrinking, [`Pool::trim`] | to the pool first, to the device when idle beyond the watermark |
//! | `cudaMemPool_t` | [`Pool`] | a budget, a policy, idle granules and statistics |
//! | `cudaMalloc` and never enough of it | [`Arena`] | contiguous memory whose length changes and whose address does not |
//! | `cudaMalloc`, copy, `cudaFree`; `torch.cat` | [`Arena::grow`], [`Tensor::grow`] | no copy, no second buffer |
//! | `cudaMallocAsync`, `cudaFreeAsync` | [`Heap`], [`Block`] | blocks of any size, reused in stream order |
//! | `cudaStream_t` | [`Stream`] | known by a key that is never reused |
//! | `cudaEvent_t` | [`Fence`] | the point after which others may touch memory used before it |
//! | `cudaMemGetInfo` | [`Device::memory_info`], [`Pool::stats`] | the device's figures, the pool's |
//! | `cuMemGetAddressRange` | [`Arena::ranges`] | all granules, not the one an address lies in |
//! | `cudaErrorMemoryAllocation` | [`OutOfMemory`] | what was asked, what is there, what holds it, which [`Limit`] was hit |
//!
//! # Contents
//!
//! * Hold memory: [`Tensor`] (elements and a shape), [`Arena`] (bytes), several at once:
//!   [`Arena::grow_all`]; blocks of any size: [`Heap`], [`StreamHeap`], [`Block`]. See what a
//!   heap holds: [`HeapSnapshot`], [`HeapStats`]; make room for it: [`Heap::set_oom_callback`]. Keep it from going: [`TensorView`], [`SharedView`], [`Pin`].
//! * See what happened: [`History`]; read and write traces of it: [`trace`].
//! * Make free memory contiguous: [`defrag`], with blocks that may move.
//! * Divide memory: [`Pool`], [`PoolConfig`], [`Policy`], [`PoolStats`].
//! * Order work: [`Stream`], [`Fence`], [`Arena::record_use`].
//! * Reach a device: [`Device`], and in [`driver`] the trait with its contract,
//!   [`cuda`](driver::cuda), `host`, [`sim`](driver::sim), the wrappers
//!   [`fault`](driver::fault) and [`record`](driver::record), and the
//!   [`conformance`](driver::conformance) suite.
//! * Share memory with other libraries: [`dlpack`], [`Device::adopt_stream`], and behind features `capi` and
//!   `cudarc`; see [`_documentation::clients`].
//! * Sizes and addresses: [`units`]. What goes wrong: [`Error`].
//! * How it works and why: [`_documentation`].
//!
//! # Features
//!
//! None is on by default, and everything works without.
//!
//! | feature | what for | adds at build time | adds at run time |
//! |---------|----------|--------------------|------------------|
//! | (none) | libcuda is opened when a CUDA device is first asked for, so that one program runs with and without a GPU | a few small crates; no CUDA, no libclang | nothing |
//! | `bindgen` | regenerates the bindings from an installed `cuda.h` | bindgen, libclang | nothing |
//! | `capi` | `libgranule.so` exports the functions of `src/capi/granule.h`, for C, Python and PyTorch | slotmap | nothing |
//! | `cbindgen` | regenerates that header | cbindgen | nothing |
//! | `cudarc` | module `cudarc`: views pass as its device pointers; the application chooses cudarc's CUDA version | cudarc | nothing |
//! | `linked` | links libcuda through `cuda-driver-sys`; has an effect with `--cfg link_libcuda` only | a libcuda to link with | the program no longer starts without libcuda |
//!
//! # Threads and blocking
//!
//! Everything is `Send` and `Sync`, and methods may be called from any thread. No lock that growth
//! within mapped memory takes is ever held across a driver call.
//!
//! | call | waits for |
//! |------|-----------|
//! | [`Arena::grow`] within what is mapped | nothing: a bounds check |
//! | [`Arena::grow`] beyond | the driver calls, some 45 us a granule on an H200; never for the device, unless it grows into the tail of a deferred shrink or memory is short |
//! | the same with [look-ahead](ArenaConfig::look_ahead) | nothing, as long as the worker keeps up |
//! | [`Arena::grow_on`] | as `grow`; the stream waits on the device where `grow` would wait here |
//! | [`Arena::shrink`], [`Arena::close`], dropping | the work queued on the arena's streams, then the driver calls |
//! | [`Arena::shrink_deferred`] | nothing but driver calls for what is idle already |
//! | [`Pool::trim`], [`Pool::set_budget`] | the driver calls |
//! | [`Heap::alloc`] from mapped memory, freeing a [`Block`] | nothing: bookkeeping |
//! | a heap that is short | work that keeps memory, up to [`HeapConfig::wait`]; then its [callback](Heap::set_oom_callback) |
//! | a pool that is short | fences of deferred shrinks, up to [`PoolConfig::wait`]; 0 turns it off |

mod arena;
#[cfg(feature = "capi")]
pub mod capi;
pub mod defrag;
mod device;
pub mod driver;
mod error;
mod heap;
mod history;
mod interop;
mod pool;
mod space;
mod stream;
mod sync;
mod tensor;
pub mod trace;
pub mod units;

pub use arena::{Arena, ArenaConfig, Extent, Pin};
pub use device::{DEFAULT_ADDRESS_BOUND, DRIVER_VARIABLE, Device};
pub use error::{Error, HeapShortage, Limit, OutOfMemory, Result};
pub use heap::{
    Block, BlockName, BlockSnapshot, BlockState, CaptureScope, DEFAULT_ALIGN, GranuleSnapshot,
    Heap, HeapConfig, HeapSnapshot, HeapStats, OomAnswer, OomEvent, Rounding, Span, StreamHeap,
    StreamSnapshot,
};
pub use history::{History, HistoryConfig, HistoryEvent, HistoryEvents, HistoryKind};
#[cfg(feature = "cudarc")]
pub use interop::cudarc;
pub use interop::dlpack;
pub use pool::{DEFAULT_GRANULE, DEFAULT_LARGEST_GRANULE, Policy, Pool, PoolConfig, PoolStats};
pub use stream::{Fence, Stream};
pub use tensor::{SharedView, Tensor, TensorView};

/// Pages about the crate as a whole. No code.
pub mod _documentation {
    #[doc = include_str!("docs/design.md")]
    pub mod design {}
    #[doc = include_str!("docs/defrag.md")]
    pub mod defrag {}
    #[doc = include_str!("docs/safety.md")]
    pub mod safety {}
    #[doc = include_str!("docs/porting.md")]
    pub mod porting {}
    #[doc = include_str!("docs/clients.md")]
    pub mod clients {}
    #[doc = include_str!("docs/replay.md")]
    pub mod replay {}
}

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
