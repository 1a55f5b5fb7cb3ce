//! Fills, copies and kernels move the right bytes.

use super::rig::{MAIN, Rig, check, sub};
use super::{Failure, Outcome};
use crate::driver::{CopyPart, DriverCode, Kernel, SharedDriver, pattern_word};
use crate::units::{Va, VaRange};

/// Bytes that repeat late and differ by seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let words = (0..).map(|i| pattern_word(seed, i).to_le_bytes());
    words.flatten().take(len).collect()
}

fn same(what: &str, expected: &[u8], found: &[u8]) -> Outcome {
    let wrong = expected.iter().zip(found).position(|(e, f)| e != f);
    match wrong {
        None => Ok(()),
        Some(at) => Err(Failure::new(format!(
            "{what}: at byte {at} of {} expected {:#04x}, found {:#04x}",
            expected.len(),
            expected[at],
            found[at]
        ))),
    }
}

fn add(at: Va, bytes: u64) -> Outcome<Va> {
    at.checked_add(bytes)
        .ok_or_else(|| Failure::new(format!("{bytes} bytes after {at} wrap around")))
}

pub(super) fn reading_is_refused_without_data(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let read = rig.bytes(sub(all, 0, 64)?, MAIN)?;
        let says = rig.d.info().capabilities.data;
        ensure!(
            read.is_some() == says,
            "capabilities.data is {says}, reading worked: {}",
            read.is_some()
        );
        Ok(())
    })
}

pub(super) fn fills_span_mappings(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.pieces(3)?;
        let unit = rig.unit;
        let inner = sub(all, unit - 100, unit + 200)?;
        rig.d.fill(inner, 0x44, MAIN)?;
        rig.filled("across two borders", inner, 0x44, MAIN)?;
        rig.filled("before it", sub(all, 0, unit - 100)?, 0, MAIN)?;
        rig.filled("after it", sub(all, 2 * unit + 100, unit - 100)?, 0, MAIN)
    })
}

pub(super) fn copies_span_mappings(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let from = rig.pieces(3)?;
        let to = rig.pieces(3)?;
        let unit = rig.unit;
        for i in 0..3 {
            rig.d.fill(rig.part(from, i, 1)?, 0x50 + i as u8, MAIN)?;
        }
        let part = sub(from, unit - 1000, unit + 2000)?;
        rig.d.copy(add(to.start(), unit / 2)?, part, MAIN)?;
        let at = |offset, len| sub(to, unit / 2 + offset, len);
        rig.filled("before the copy", sub(to, 0, unit / 2)?, 0, MAIN)?;
        rig.filled("from the first granule", at(0, 1000)?, 0x50, MAIN)?;
        rig.filled("from the second granule", at(1000, unit)?, 0x51, MAIN)?;
        rig.filled("from the third", at(1000 + unit, 1000)?, 0x52, MAIN)?;
        rig.filled("after the copy", at(2000 + unit, 1000)?, 0, MAIN)
    })
}

pub(super) fn odd_offsets_and_lengths_copy_exactly(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (from, _) = rig.memory(1)?;
        let (to, _) = rig.memory(1)?;
        let bytes = noise(1, 300);
        rig.d.copy_from_host(add(from.start(), 3)?, &bytes, MAIN)?;
        for (offset, len) in [(1, 1), (7, 3), (5, 64), (250, 33)] {
            let part = sub(from, 3 + offset, len)?;
            rig.d.fill(sub(to, 0, 512)?, 0xCC, MAIN)?;
            rig.d.copy(add(to.start(), 101)?, part, MAIN)?;
            let Some(found) = rig.bytes(sub(to, 0, 512)?, MAIN)? else {
                continue;
            };
            let mut expected = vec![0xCC; 512];
            let (first, len) = (offset as usize, len as usize);
            expected[101..101 + len].copy_from_slice(&bytes[first..first + len]);
            let what = format!("{len} bytes from offset {}", 3 + offset);
            same(&what, &expected, &found)?;
        }
        Ok(())
    })
}

pub(super) fn batches_copy_every_part_exactly(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let from = rig.pieces(2)?;
        let to = rig.pieces(2)?;
        let len = usize::try_from(rig.unit).map_err(|_| Failure::new("a granule too long"))?;
        let noise = noise(5, 2 * len);
        rig.d.copy_from_host(from.start(), &noise, MAIN)?;
        rig.d.fill(to, 0xCC, MAIN)?;
        let mut expected = vec![0xCC; 2 * len];
        let mut parts = Vec::new();
        // More parts than one launch takes, back to front; some odd, some empty, one across both
        // granules and longer than what one block of threads copies.
        let mut at = 16;
        for i in 0..300u64 {
            let odd = if i % 7 == 3 { 5 } else { 0 };
            let part = sub(
                from,
                2 * rig.unit - 4096 - i * 512 + odd,
                16 * (i % 20) + odd,
            )?;
            parts.push(CopyPart {
                dst: add(to.start(), at + odd)?,
                src: part,
            });
            at += 512;
        }
        parts.push(CopyPart {
            dst: add(to.start(), 200_000)?,
            src: sub(from, 0, rig.unit + 70_000)?,
        });
        for part in &parts {
            let offset = |va: Va, base: Va| va.checked_offset_from(base).unwrap_or(0) as usize;
            let (dst, src) = (
                offset(part.dst, to.start()),
                offset(part.src.start(), from.start()),
            );
            let n = part.src.len() as usize;
            expected[dst..dst + n].copy_from_slice(&noise[src..src + n]);
        }
        rig.d.copy_batch(&parts, MAIN)?;
        rig.d.copy_batch(&[], MAIN)?;
        if let Some(found) = rig.bytes(to, MAIN)? {
            same("a batch", &expected, &found)?;
        }
        let both = |dst, src, n| -> Outcome<CopyPart> {
            Ok(CopyPart {
                dst: add(to.start(), dst)?,
                src: sub(to, src, n)?,
            })
        };
        let clash = [both(0, 4096, 64)?, both(8192, 32, 64)?];
        rig.d.sync_stream(MAIN)?;
        let refused = rig.d.copy_batch(&clash, MAIN);
        ensure!(
            refused.is_err_and(|e| e.code == DriverCode::INVALID_VALUE),
            "a part that reads what another writes was taken"
        );
        Ok(())
    })
}

pub(super) fn host_copies_round_trip(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.pieces(2)?;
        let stream = rig.stream()?;
        for (seed, len) in [(1, 1), (2, 4096), (3, 70_001)] {
            let bytes = noise(seed, len);
            // Across the border between the two granules where it is long enough.
            let offset = rig.unit - (len as u64 / 2).min(rig.unit);
            let place = sub(all, offset, len as u64)?;
            rig.d.copy_from_host(place.start(), &bytes, stream)?;
            if let Some(found) = rig.bytes(place, stream)? {
                same(&format!("{len} bytes there and back"), &bytes, &found)?;
            }
        }
        Ok(())
    })
}

pub(super) fn a_host_slice_may_change_after_the_copy(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let stream = rig.stream()?;
        let len = rig.unit as usize / 2;
        let mut bytes = vec![0x5A; len];
        rig.d.fill(all, 0x01, stream)?;
        rig.d.copy_from_host(all.start(), &bytes, stream)?;
        bytes.fill(0xA5);
        let place = sub(all, 0, len as u64)?;
        rig.filled("a slice that changed later", place, 0x5A, stream)?;
        let rest = sub(all, len as u64, len as u64)?;
        rig.filled("the fill before it", rest, 0x01, stream)?;
        drop(bytes);
        Ok(())
    })
}

/// The number of words in `range` that differ from the pattern, by kernel.
fn mismatches(rig: &Rig<'_>, range: VaRange, seed: u64, at: Va) -> Outcome<Option<u64>> {
    let word = VaRange::new(at, 8).ok_or_else(|| Failure::new("address wraps"))?;
    rig.d.fill(word, 0, MAIN)?;
    let kernel = Kernel::CheckPattern {
        range,
        seed,
        mismatches: at,
    };
    rig.d.launch(kernel, MAIN)?;
    rig.word(at, MAIN)
}

fn expect(what: &str, found: Option<u64>, expected: u64) -> Outcome {
    ensure!(
        found.is_none_or(|found| found == expected),
        "{what}: expected {expected}, found {found:?}"
    );
    Ok(())
}

pub(super) fn a_written_pattern_checks_out(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let all = rig.pieces(2)?;
        let (out, _) = rig.memory(1)?;
        let seed = 0x1234_5678_9ABC_DEF0;
        let range = sub(all, 40, 2 * rig.unit - 48)?;
        let words = range.len() / 8;
        rig.d.launch(Kernel::WritePattern { range, seed }, MAIN)?;
        if let Some(bytes) = rig.bytes(range, MAIN)? {
            same("the pattern", &noise(seed, bytes.len()), &bytes)?;
        }
        rig.filled("before it", sub(all, 0, 40)?, 0, MAIN)?;
        rig.filled("after it", sub(all, 2 * rig.unit - 8, 8)?, 0, MAIN)?;
        let none = mismatches(rig, range, seed, out.start())?;
        expect("mismatches of the pattern", none, 0)?;
        let all_wrong = mismatches(rig, range, seed + 1, out.start())?;
        expect("mismatches of another seed", all_wrong, words)
    })
}

pub(super) fn one_corrupt_byte_is_one_mismatch(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let (out, _) = rig.memory(1)?;
        let (seed, at) = (77, add(out.start(), 16)?);
        rig.d
            .launch(Kernel::WritePattern { range: all, seed }, MAIN)?;
        let last = rig.unit - 1;
        for (round, offset) in [0, 8 * 1000 + 5, last].into_iter().enumerate() {
            let word = pattern_word(seed, offset / 8).to_le_bytes();
            let wrong = word[offset as usize % 8] ^ 0x80;
            rig.d
                .copy_from_host(add(all.start(), offset)?, &[wrong], MAIN)?;
            let found = mismatches(rig, all, seed, at)?;
            let what = format!("mismatches after corrupting {} bytes", round + 1);
            expect(&what, found, round as u64 + 1)?;
        }
        let again = Kernel::CheckPattern {
            range: all,
            seed,
            mismatches: at,
        };
        rig.d.launch(again, MAIN)?;
        expect("mismatches added up", rig.word(at, MAIN)?, 6)
    })
}

pub(super) fn read_sum_adds_up_the_words(d: &SharedDriver) -> Outcome {
    check(d, |rig| {
        let (all, _) = rig.memory(1)?;
        let (out, _) = rig.memory(1)?;
        let (seed, passes, sink) = (5, 3, out.start());
        rig.d
            .launch(Kernel::WritePattern { range: all, seed }, MAIN)?;
        let range = sub(all, 8, rig.unit - 8)?;
        rig.d.fill(sub(out, 0, 8)?, 1, MAIN)?;
        rig.d.launch(
            Kernel::ReadSum {
                range,
                passes,
                sink,
            },
            MAIN,
        )?;
        let words = (1..rig.unit / 8).map(|i| pattern_word(seed, i));
        let once = words.fold(0, u64::wrapping_add);
        let start = u64::from_le_bytes([1; 8]);
        let expected = start.wrapping_add(once.wrapping_mul(passes.into()));
        expect("the sum", rig.word(sink, MAIN)?, expected)
    })
}
