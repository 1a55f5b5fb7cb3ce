//! GPU memory on CUDA's virtual memory calls.

mod arena;
mod device;
pub mod driver;
mod error;
mod heap;
mod pool;
mod space;
mod stream;
mod sync;
mod tensor;
pub mod units;

pub use arena::{Arena, ArenaConfig, Extent, Pin};
pub use device::{DEFAULT_ADDRESS_BOUND, DRIVER_VARIABLE, Device};
pub use error::{Error, Limit, OutOfMemory, Result};
pub use heap::{Block, DEFAULT_ALIGN, Heap, HeapConfig, HeapStats, Rounding, StreamHeap};
pub use pool::{DEFAULT_GRANULE, DEFAULT_LARGEST_GRANULE, Policy, Pool, PoolConfig, PoolStats};
pub use stream::{Fence, Stream};
pub use tensor::{SharedView, Tensor, TensorView};
