//! The CSV log of RMM's logging resource adaptor.

use std::io::BufRead;

use super::build::Found;
use super::lines::{Lines, fields, number};
use super::{Builder, LineFault, Place, ReadOptions, Trace, TraceError};

/// A row: `Thread,Time,Action,Pointer,Size,Stream`.
struct Row {
    time_us: u64,
    action: Action,
    pointer: u64,
    size: u64,
    stream: u64,
}

enum Action {
    Allocate,
    Failure,
    Free,
}

/// Reads a log. Sizes are bytes, as requested; the time starts anew at midnight.
pub(super) fn read(input: impl BufRead, options: &ReadOptions) -> Result<Vec<Trace>, TraceError> {
    let mut lines = Lines::new(input, options);
    let header = lines.next()?.map(fields::<6>);
    if !matches!(
        header,
        Some(Ok([
            "Thread", "Time", "Action", "Pointer", "Size", "Stream"
        ]))
    ) {
        return Err(lines.fault(LineFault::Kind));
    }
    let mut builder = Builder::new(0, options);
    while let Some(line) = lines.next()? {
        if line.is_empty() {
            continue;
        }
        let row = row(line).map_err(|fault| lines.fault(fault))?;
        let place = Place::Line(lines.number);
        let (id, time) = (row.pointer, row.time_us);
        match row.action {
            // No bytes have no pointer of their own.
            _ if row.pointer == 0 && row.size == 0 => {}
            Action::Allocate => {
                if builder.is_live(id) {
                    if !options.lenient {
                        return Err(lines.fault(LineFault::LiveId { id }));
                    }
                    builder.free(id, None, time, place)?;
                    builder.notes().replaced += 1;
                }
                if !builder.alloc(id, row.size, row.stream, time, place)? {
                    return Err(lines.fault(LineFault::Overflow));
                }
            }
            Action::Free => match builder.free(id, Some(row.stream), time, place)? {
                Found::Block => {}
                Found::Nothing if options.lenient => builder.notes().unknown_frees += 1,
                Found::Nothing => return Err(lines.fault(LineFault::UnknownId { id })),
            },
            Action::Failure => builder.out_of_memory(row.size, 0, time, place)?,
        }
    }
    match builder.finish() {
        Some(trace) => Ok(vec![trace]),
        None => Err(TraceError::NoEvents),
    }
}

fn row(line: &str) -> Result<Row, LineFault> {
    let [_, time, action, pointer, size, stream] = fields::<6>(line)?;
    Ok(Row {
        time_us: time_us(time)?,
        action: match action {
            "allocate" => Action::Allocate,
            "allocate failure" => Action::Failure,
            "free" => Action::Free,
            _ => return Err(LineFault::Action),
        },
        pointer: pointer_of("pointer", pointer)?,
        size: number("size", size)?,
        stream: pointer_of("stream", stream)?,
    })
}

/// `HH:MM:SS.micros`, with a colon before the fraction in older versions; or seconds since 1970.
fn time_us(text: &str) -> Result<u64, LineFault> {
    let wrong = LineFault::Number { field: "time" };
    let mut parts = text.split([':', '.']);
    let whole = |part: Option<&str>| part.and_then(|p| p.parse::<u64>().ok());
    let fraction = |part: Option<&str>| match part {
        None => Some(0),
        // Cut or filled to six digits.
        Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
            format!("{digits:0<6.6}").parse::<u64>().ok()
        }
        Some(_) => None,
    };
    let found = match text.contains(':') {
        true => {
            let (hours, minutes, seconds) = (
                whole(parts.next()),
                whole(parts.next()),
                whole(parts.next()),
            );
            let seconds = hours.zip(minutes).zip(seconds).and_then(|((h, m), s)| {
                h.checked_mul(60)?
                    .checked_add(m)?
                    .checked_mul(60)?
                    .checked_add(s)
            });
            seconds.zip(fraction(parts.next()))
        }
        false => whole(parts.next()).zip(fraction(parts.next())),
    };
    found
        .filter(|_| parts.next().is_none())
        .and_then(|(s, us)| s.checked_mul(1_000_000)?.checked_add(us))
        .ok_or(wrong)
}

/// A pointer: hexadecimal, decimal or `(nil)`.
fn pointer_of(field: &'static str, text: &str) -> Result<u64, LineFault> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).map_err(|_| LineFault::Number { field }),
        None if text == "(nil)" => Ok(0),
        None => number(field, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_every_version() {
        assert_eq!(time_us("15:47:02.841961"), Ok(56_822_841_961));
        assert_eq!(time_us("15:47:02:841961"), Ok(56_822_841_961));
        assert_eq!(time_us("1634567890.1"), Ok(1_634_567_890_100_000));
        assert!(time_us("").is_err() && time_us("1:2").is_err() && time_us("1:2:3.x").is_err());
        assert!(time_us("99999999999999999999:1:1").is_err());
        assert_eq!(pointer_of("pointer", "(nil)"), Ok(0));
        assert_eq!(pointer_of("pointer", "0x7f10"), Ok(0x7f10));
    }
}
