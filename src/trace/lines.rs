//! The line formats' common part, and our own line format.

use std::io::{BufRead, Read};

use super::build::Found;
use super::{Builder, LineFault, Place, ReadOptions, Trace, TraceError};

/// Lines of a text, one at a time, none longer than a limit.
pub(super) struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    limit: usize,
    bytes: u64,
    /// The number of the latest, from 1.
    pub(super) number: u64,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R, options: &ReadOptions) -> Self {
        Self {
            input,
            buffer: Vec::new(),
            limit: options.line,
            bytes: 0,
            number: 0,
        }
    }

    /// The next line without its end, or `None` behind the last.
    pub(super) fn next(&mut self) -> Result<Option<&str>, TraceError> {
        self.buffer.clear();
        // Two more, for a line end that comes right behind the limit.
        let most = self.limit as u64 + 2;
        let mut part = self.input.by_ref().take(most);
        let read = part.read_until(b'\n', &mut self.buffer);
        let read = read.map_err(|source| TraceError::Io {
            at: self.bytes,
            source,
        })?;
        if read == 0 {
            return Ok(None);
        }
        self.bytes += read as u64;
        self.number += 1;
        let line = self.buffer.strip_suffix(b"\n").unwrap_or(&self.buffer);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.len() > self.limit {
            let limit = self.limit;
            return Err(self.fault(LineFault::TooLong { limit }));
        }
        match str::from_utf8(line) {
            Ok(line) => Ok(Some(line)),
            Err(_) => Err(TraceError::Line {
                line: self.number,
                fault: LineFault::NotText,
            }),
        }
    }

    pub(super) fn fault(&self, fault: LineFault) -> TraceError {
        TraceError::Line {
            line: self.number,
            fault,
        }
    }
}

/// A number of a field.
pub(super) fn number(field: &'static str, text: &str) -> Result<u64, LineFault> {
    let text = text.trim();
    if let Ok(value) = text.parse() {
        return Ok(value);
    }
    match text.parse::<i64>() {
        Ok(value) => Err(LineFault::Negative { field, value }),
        Err(_) => Err(LineFault::Number { field }),
    }
}

/// The fields of a line, exactly so many.
pub(super) fn fields<const N: usize>(line: &str) -> Result<[&str; N], LineFault> {
    let mut all = [""; N];
    let mut found = 0;
    for field in line.split(',') {
        if let Some(place) = all.get_mut(found) {
            *place = field;
        }
        found += 1;
    }
    match found == N {
        true => Ok(all),
        false => Err(LineFault::Fields { found, expected: N }),
    }
}

/// An event of our own format.
enum Row {
    Alloc([u64; 4]),
    Free([u64; 2]),
    Mapped(u64, u64),
    Unmapped(u64, u64),
    Oom([u64; 3]),
    Nothing,
}

fn row(line: &str) -> Result<Row, LineFault> {
    let kind = line.bytes().next();
    Ok(match kind {
        None | Some(b'#') => Row::Nothing,
        Some(b'a') => {
            let [_, id, bytes, stream, time] = fields::<5>(line)?;
            Row::Alloc([
                number("id", id)?,
                number("bytes", bytes)?,
                number("stream", stream)?,
                number("time", time)?,
            ])
        }
        Some(b'f') => {
            let [_, id, time] = fields::<3>(line)?;
            Row::Free([number("id", id)?, number("time", time)?])
        }
        Some(letter @ (b'm' | b'u')) => {
            let [_, address, bytes, time] = fields::<4>(line)?;
            number("address", address)?;
            let (bytes, time) = (number("bytes", bytes)?, number("time", time)?);
            match letter {
                b'm' => Row::Mapped(bytes, time),
                _ => Row::Unmapped(bytes, time),
            }
        }
        Some(b'o') => {
            let [_, bytes, free, time] = fields::<4>(line)?;
            Row::Oom([
                number("bytes", bytes)?,
                number("free", free)?,
                number("time", time)?,
            ])
        }
        Some(_) => return Err(LineFault::Kind),
    })
}

/// Reads our own line format.
pub(super) fn read(input: impl BufRead, options: &ReadOptions) -> Result<Vec<Trace>, TraceError> {
    let mut lines = Lines::new(input, options);
    let mut builder = Builder::new(0, options);
    let mut mapped = 0u64;
    while let Some(line) = lines.next()? {
        let letters = line.split(',').next().map_or(0, str::len);
        let row = match letters > 1 && !line.starts_with('#') {
            true => Err(LineFault::Kind),
            false => row(line),
        };
        let row = row.map_err(|fault| lines.fault(fault))?;
        let place = Place::Line(lines.number);
        match row {
            Row::Nothing => {}
            Row::Alloc([id, bytes, stream, time]) => {
                if builder.is_live(id) {
                    if !options.lenient {
                        return Err(lines.fault(LineFault::LiveId { id }));
                    }
                    builder.free(id, None, time, place)?;
                    builder.notes().replaced += 1;
                }
                if !builder.alloc(id, bytes, stream, time, place)? {
                    return Err(lines.fault(LineFault::Overflow));
                }
            }
            Row::Free([id, time]) => match builder.free(id, None, time, place)? {
                Found::Block => {}
                Found::Nothing if options.lenient => builder.notes().unknown_frees += 1,
                Found::Nothing => return Err(lines.fault(LineFault::UnknownId { id })),
            },
            Row::Mapped(bytes, time) => {
                mapped = mapped.saturating_add(bytes);
                builder.reserved(mapped, time, place)?;
            }
            Row::Unmapped(bytes, time) => {
                mapped = mapped.saturating_sub(bytes);
                builder.reserved(mapped, time, place)?;
            }
            Row::Oom([bytes, free, time]) => builder.out_of_memory(bytes, free, time, place)?,
        }
    }
    match builder.finish() {
        Some(trace) => Ok(vec![trace]),
        None => Err(TraceError::NoEvents),
    }
}
