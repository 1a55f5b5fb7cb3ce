//! Many copies in one launch.

use super::context::{Bound, Core, done, length, stream_handle};
use crate::driver::{Call, CopyPart, DriverCode, DriverError, DriverResult, StreamId};
use crate::units::{Va, VaRange, round_up};

/// Parts of one launch: as many as fit into the 4 KiB that every device takes as kernel parameters.
const PARTS: usize = 119;

/// What one block of threads copies at a time. `granule_copy_batch` has the same number.
const CHUNK: u64 = 64 << 10;

/// Bytes that one thread moves at a time; what is not a multiple of it is not for the kernel.
const VECTOR: u64 = 16;

const THREADS: u32 = 256;

/// The kernel's one parameter, as it stands in kernels.ptx.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Arguments {
    parts: u64,
    chunks: u64,
    /// Target, source, length and first chunk of each part, and one more that ends the search.
    list: [[u64; 4]; PARTS + 1],
}

/// The size of [`Arguments`] in the text.
#[cfg(test)]
pub(super) const ARGUMENT_BYTES: usize = size_of::<Arguments>();

impl Arguments {
    /// At most [`PARTS`] parts.
    fn new(parts: &[CopyPart]) -> Self {
        let mut list = [[0, 0, 0, u64::MAX]; PARTS + 1];
        let mut chunks = 0u64;
        for (entry, part) in list.iter_mut().zip(parts) {
            let len = part.src.len();
            *entry = [part.dst.get(), part.src.start().get(), len, chunks];
            chunks += len.div_ceil(CHUNK);
        }
        Self {
            parts: parts.len() as u64,
            chunks,
            list,
        }
    }
}

fn is_for_the_kernel(part: &CopyPart) -> bool {
    let [dst, src] = [part.dst, part.src.start()];
    dst.is_aligned(VECTOR)
        && src.is_aligned(VECTOR)
        && round_up(part.src.len(), VECTOR) == Some(part.src.len())
}

/// The range from the first to the last byte that is read or written.
fn hull(parts: &[CopyPart]) -> Option<VaRange> {
    let some = parts.iter().filter(|part| !part.src.is_empty());
    let ranges = some.flat_map(|part| [Some(part.src), part.target()]);
    let (mut start, mut end) = (Va::new(u64::MAX), Va::new(0));
    for range in ranges {
        let range = range?;
        (start, end) = (start.min(range.start()), end.max(range.end()));
    }
    VaRange::new(start, end.checked_offset_from(start)?)
}

impl Core {
    /// Queues the parts on a stream that is known: by the kernel, and what is not aligned by the
    /// copies of libcuda.
    pub(super) fn copy_batch(
        &self,
        bound: &Bound<'_>,
        parts: &[CopyPart],
        stream: StreamId,
    ) -> DriverResult<()> {
        let call = Call::CopyBatch;
        CopyPart::check(parts)?;
        // Mostly all of them are in one reservation.
        let at_once = hull(parts).is_some_and(|all| self.known.check_ours(all).is_ok());
        let some = parts.iter().filter(|part| !at_once && !part.src.is_empty());
        for part in some {
            let target = part.target().ok_or(DriverCode::INVALID_VALUE);
            let ours = target.and_then(|target| {
                self.known.check_ours(target)?;
                self.known.check_ours(part.src)
            });
            self.known(call, ours)
                .map_err(|e: DriverError| e.about(part.dst.get(), part.src.len()))?;
        }
        let (aligned, others): (Vec<CopyPart>, Vec<CopyPart>) = parts
            .iter()
            .filter(|part| !part.src.is_empty())
            .partition(|part| is_for_the_kernel(part));
        for group in aligned.chunks(PARTS) {
            let arguments = Arguments::new(group);
            let most = self.multiprocessors.saturating_mul(8);
            let blocks = u32::try_from(arguments.chunks).map_or(most, |n| n.clamp(1, most));
            self.launch_copies(bound, (blocks, THREADS), &arguments, stream)?;
        }
        for part in others {
            // SAFETY: the stream was looked up; both ranges are device memory, or nothing, which
            // libcuda refuses.
            let code = unsafe {
                (bound.table.cuMemcpyDtoDAsync_v2)(
                    part.dst.get(),
                    part.src.start().get(),
                    length(part.src.len()),
                    stream_handle(stream),
                )
            };
            done(call, code).map_err(|e| e.about(part.dst.get(), part.src.len()))?;
        }
        Ok(())
    }

    fn launch_copies(
        &self,
        bound: &Bound<'_>,
        grid: (u32, u32),
        arguments: &Arguments,
        stream: StreamId,
    ) -> DriverResult<()> {
        let call = Call::CopyBatch;
        let kernels = self.kernels(bound, call)?;
        let mut pointers = [std::ptr::from_ref(arguments).cast_mut().cast()];
        // SAFETY: the kernel's one parameter is a block of bytes laid out as `Arguments`; libcuda
        // copies it before it returns. The addresses in it were checked to be device memory.
        unsafe {
            self.start_with(
                bound,
                call,
                kernels.copy_batch(),
                grid,
                &mut pointers,
                stream,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(dst: u64, src: u64, len: u64) -> CopyPart {
        CopyPart {
            dst: Va::new(dst),
            src: VaRange::new(Va::new(src), len).unwrap(),
        }
    }

    #[test]
    fn the_hull_has_every_byte_of_every_part() {
        let all = hull(&[part(500, 100, 50), part(300, 900, 16), part(1, 2, 0)]);
        assert_eq!(all, VaRange::new(Va::new(100), 816));
        assert_eq!(hull(&[part(1, 2, 0)]), None);
        assert_eq!(hull(&[part(u64::MAX, 100, 16)]), None);
        assert_eq!(hull(&[]), None);
    }

    #[test]
    fn chunks_are_numbered_through_all_parts() {
        let parts = [
            part(0, 1 << 30, CHUNK + 16),
            part(1 << 20, 1 << 31, 16),
            part(1 << 21, 1 << 32, 3 * CHUNK),
        ];
        let arguments = Arguments::new(&parts);
        assert_eq!((arguments.parts, arguments.chunks), (3, 6));
        let firsts: Vec<u64> = arguments.list[..4].iter().map(|entry| entry[3]).collect();
        assert_eq!(firsts, [0, 2, 3, u64::MAX]);
    }

    #[test]
    fn a_full_list_still_ends() {
        let many: Vec<CopyPart> = (0..PARTS as u64)
            .map(|i| part(i << 20, 1 << 40, 16))
            .collect();
        assert_eq!(Arguments::new(&many).list[PARTS][3], u64::MAX);
        assert!(size_of::<Arguments>() <= 4096);
    }

    #[test]
    fn what_is_not_aligned_is_not_for_the_kernel() {
        assert!(is_for_the_kernel(&part(16, 32, 48)));
        assert!(!is_for_the_kernel(&part(8, 32, 48)));
        assert!(!is_for_the_kernel(&part(16, 33, 48)));
        assert!(!is_for_the_kernel(&part(16, 32, 50)));
    }
}
