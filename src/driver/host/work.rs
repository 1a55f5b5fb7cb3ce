//! What a stream's worker does to memory: in pieces, so that a change of mappings waits for one
//! piece at most, and each piece checked when its turn comes.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::memory::Space;
use super::table::Fault;
use crate::driver::{Access, DriverCode, Kernel, pattern_word};
use crate::units::{MIB, Va, VaRange};

/// Bytes done under one lock of the table. A multiple of 8.
const PIECE: u64 = MIB;

/// Longest sleep of a spin before it looks whether it should end.
const NAP: Duration = Duration::from_millis(5);

/// Queued work on memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Fill { range: VaRange, byte: u8 },
    Copy { dst: Va, src: VaRange },
    Kernel(Kernel),
}

impl Work {
    /// Refuses what is wrong whatever is mapped when the work runs.
    pub(super) fn validate(&self) -> Result<(), DriverCode> {
        let sound = match *self {
            Self::Fill { .. } | Self::Kernel(Kernel::Spin { .. }) => true,
            Self::Copy { dst, src } => VaRange::new(dst, src.len())
                .is_some_and(|target| src.is_empty() || !target.overlaps(src)),
            Self::Kernel(Kernel::WritePattern { range, .. }) => are_words(range),
            Self::Kernel(Kernel::CheckPattern {
                range, mismatches, ..
            }) => are_words(range) && is_word(mismatches),
            Self::Kernel(Kernel::ReadSum { range, sink, .. }) => are_words(range) && is_word(sink),
        };
        if sound {
            Ok(())
        } else {
            Err(DriverCode::INVALID_VALUE)
        }
    }

    /// Does the work, or as much as is done when `stop` says so.
    pub(super) fn run(self, space: &Space, stop: impl Fn() -> bool) -> Result<(), Fault> {
        match self {
            Self::Fill { range, byte } => {
                each_piece(range, stop, |_, piece| space.fill(piece, byte))
            }
            Self::Copy { dst, src } => each_piece(src, stop, |offset, piece| {
                space.copy(at(dst, offset), piece)
            }),
            Self::Kernel(Kernel::WritePattern { range, seed }) => {
                each_piece(range, stop, |offset, piece| {
                    space.words(piece, Access::ReadWrite, |words| {
                        for (i, word) in (offset / 8..).zip(words) {
                            word.store(pattern_word(seed, i), Relaxed);
                        }
                    })
                })
            }
            Self::Kernel(Kernel::CheckPattern {
                range,
                seed,
                mismatches,
            }) => {
                let mut wrong = 0_u64;
                each_piece(range, stop, |offset, piece| {
                    space.words(piece, Access::Read, |words| {
                        for (i, word) in (offset / 8..).zip(words) {
                            wrong += u64::from(word.load(Relaxed) != pattern_word(seed, i));
                        }
                    })
                })?;
                add(space, mismatches, wrong)
            }
            Self::Kernel(Kernel::ReadSum {
                range,
                passes,
                sink,
            }) => {
                let mut sum = 0_u64;
                for _ in 0..passes {
                    each_piece(range, &stop, |_, piece| {
                        space.words(piece, Access::Read, |words| {
                            for word in words {
                                sum = sum.wrapping_add(word.load(Relaxed));
                            }
                        })
                    })?;
                    if stop() {
                        break;
                    }
                }
                add(space, sink, sum)
            }
            Self::Kernel(Kernel::Spin { nanos }) => {
                let start = Instant::now();
                let length = Duration::from_nanos(nanos);
                while let Some(left) = length.checked_sub(start.elapsed())
                    && !left.is_zero()
                    && !stop()
                {
                    std::thread::sleep(left.min(NAP));
                }
                Ok(())
            }
        }
    }
}

/// Copies host bytes to `dst`, in pieces.
pub(super) fn store(
    space: &Space,
    dst: Va,
    src: &[u8],
    stop: impl Fn() -> bool,
) -> Result<(), Fault> {
    let mut to = dst;
    for piece in src.chunks(PIECE as usize) {
        if stop() {
            break;
        }
        space.store(to, piece)?;
        to = at(to, piece.len() as u64);
    }
    Ok(())
}

/// Copies device bytes from `src` on to the host, in pieces.
pub(super) fn load(
    space: &Space,
    dst: &mut [u8],
    src: Va,
    stop: impl Fn() -> bool,
) -> Result<(), Fault> {
    let mut from = src;
    for piece in dst.chunks_mut(PIECE as usize) {
        if stop() {
            break;
        }
        space.load(piece, from)?;
        from = at(from, piece.len() as u64);
    }
    Ok(())
}

/// Calls `work` with the offset and the range of each piece of `range`.
fn each_piece(
    range: VaRange,
    stop: impl Fn() -> bool,
    mut work: impl FnMut(u64, VaRange) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut offset = 0;
    while let Some(piece) = range.sub(offset, PIECE.min(range.len() - offset))
        && !piece.is_empty()
        && !stop()
    {
        work(offset, piece)?;
        offset += piece.len();
    }
    Ok(())
}

fn add(space: &Space, to: Va, value: u64) -> Result<(), Fault> {
    let word = VaRange::new(to, 8).ok_or(Fault(to.get()))?;
    space.words(word, Access::ReadWrite, |words| {
        for word in words {
            word.fetch_add(value, Relaxed);
        }
    })
}

/// `base + offset`, for offsets inside of a range that does not wrap.
const fn at(base: Va, offset: u64) -> Va {
    Va::new(base.get().saturating_add(offset))
}

const fn are_words(range: VaRange) -> bool {
    range.start().is_aligned(8) && range.len().is_multiple_of(8)
}

const fn is_word(at: Va) -> bool {
    at.is_aligned(8) && VaRange::new(at, 8).is_some()
}
