//! Reads the pickles that memory snapshots are: dicts, lists, tuples, strings, numbers.
//!
//! A stack machine over the opcodes of protocols 2 to 5 that such data takes, and none that names or
//! calls anything. Strings are compared with the words that snapshots use and not kept; of a dict, only
//! the fields with such names are. What is kept is counted against [`ReadOptions::memory`].

use std::io::{self, BufRead};

use super::{PickleFault, Place, ReadOptions, TraceError};

/// Bytes that a value takes in a list.
const VALUE: u64 = size_of::<Value>() as u64;
/// Bytes that a field takes in a dict.
const FIELD: u64 = size_of::<(Word, Value)>() as u64;

macro_rules! words {
    ($($variant:ident => $text:literal),+ $(,)?) => {
        /// The strings that mean something in a snapshot.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Word {
            /// Any other.
            Other,
            $($variant),+
        }

        impl Word {
            fn of(text: &[u8]) -> Self {
                $(if text == $text.as_bytes() { return Self::$variant; })+
                Self::Other
            }
        }
    };
}

words! {
    Action => "action",
    Addr => "addr",
    Size => "size",
    Stream => "stream",
    TimeUs => "time_us",
    Alloc => "alloc",
    FreeRequested => "free_requested",
    FreeCompleted => "free_completed",
    Free => "free",
    SegmentAlloc => "segment_alloc",
    SegmentFree => "segment_free",
    SegmentMap => "segment_map",
    SegmentUnmap => "segment_unmap",
    Oom => "oom",
    SnapshotTaken => "snapshot",
    DeviceFree => "device_free",
    Segments => "segments",
    DeviceTraces => "device_traces",
    Device => "device",
    Address => "address",
    TotalSize => "total_size",
    Blocks => "blocks",
    RequestedSize => "requested_size",
    State => "state",
    ActiveAllocated => "active_allocated",
    ActivePendingFree => "active_pending_free",
    ActiveAwaitingFree => "active_awaiting_free",
    Inactive => "inactive",
    History => "history",
    RealSize => "real_size",
}

/// Longest word.
const LONGEST: usize = 24;

/// A value; containers by number.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Value {
    None,
    Bool,
    Int(i64),
    /// An integer above the range of the other.
    Large(u64),
    Float(f64),
    Text(Word),
    List(u32),
    Tuple(u32),
    Dict(u32),
}

/// A pickle's contents.
pub(super) struct Contents {
    lists: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Word, Value)>>,
    pub(super) root: Value,
}

impl Contents {
    /// The items of a list or tuple.
    pub(super) fn items(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::List(n) | Value::Tuple(n) => self.lists.get(n as usize).map(Vec::as_slice),
            _ => None,
        }
    }

    /// A field of a dict; `None` too if the value is no dict.
    pub(super) fn field(&self, value: Value, word: Word) -> Option<Value> {
        let Value::Dict(n) = value else { return None };
        let fields = self.dicts.get(n as usize)?;
        // The last of several is the one that counts.
        fields.iter().rev().find(|f| f.0 == word).map(|f| f.1)
    }

    pub(super) fn is_dict(&self, value: Value) -> bool {
        matches!(value, Value::Dict(_))
    }
}

/// The bytes, and how many were read.
pub(super) struct Source<R> {
    input: R,
    at: u64,
}

impl<R: BufRead> Source<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, at: 0 }
    }

    fn fail(&self, error: io::Error, start: u64) -> TraceError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof if self.input_ended(&error) => {
                let fault = PickleFault::Truncated;
                TraceError::Pickle { at: start, fault }
            }
            _ => TraceError::Io {
                at: self.at,
                source: error,
            },
        }
    }

    /// Whether it was this reader that wanted more, and not a layer below.
    fn input_ended(&self, error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Ended>())
    }

    fn buffer(&mut self) -> io::Result<&[u8]> {
        loop {
            match self.input.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok([]) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, Ended)),
                Ok(_) => return self.input.fill_buf(),
            }
        }
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut done = 0;
        while done < N {
            let buffer = self.buffer()?;
            let part = buffer.len().min(N - done);
            bytes[done..done + part].copy_from_slice(&buffer[..part]);
            self.input.consume(part);
            self.at += part as u64;
            done += part;
        }
        Ok(bytes)
    }

    fn byte(&mut self) -> io::Result<u8> {
        Ok(self.bytes::<1>()?[0])
    }

    fn skip(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let there = self.buffer()?.len();
            let part = usize::try_from(count).map_or(there, |count| count.min(there));
            self.input.consume(part);
            self.at += part as u64;
            count -= part as u64;
        }
        Ok(())
    }

    /// Which word so many bytes are.
    fn word(&mut self, len: u64) -> io::Result<Word> {
        let mut bytes = [0; LONGEST];
        match usize::try_from(len) {
            Ok(len) if len <= LONGEST => {
                for place in &mut bytes[..len] {
                    *place = self.byte()?;
                }
                Ok(Word::of(&bytes[..len]))
            }
            _ => self.skip(len).map(|()| Word::Other),
        }
    }
}

#[derive(Debug)]
struct Ended;

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the file ends here")
    }
}

impl std::error::Error for Ended {}

/// Reads a pickle up to its end.
pub(super) fn load<R: BufRead>(
    source: &mut Source<R>,
    options: &ReadOptions,
) -> Result<Contents, TraceError> {
    let mut machine = Machine {
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        lists: Vec::new(),
        dicts: Vec::new(),
        used: 0,
        most: options.memory,
    };
    loop {
        let at = source.at;
        let code = source.byte().map_err(|error| source.fail(error, at))?;
        let fault = match machine.step(source, code) {
            Ok(Some(root)) => {
                return Ok(Contents {
                    lists: machine.lists,
                    dicts: machine.dicts,
                    root,
                });
            }
            Ok(None) if machine.used <= machine.most => continue,
            Ok(None) => {
                return Err(TraceError::TooMuch {
                    what: "bytes of memory for a pickle's contents",
                    limit: options.memory,
                    place: Place::Byte(at),
                });
            }
            Err(Stop::Fault(fault)) => fault,
            Err(Stop::Read(error)) => return Err(source.fail(error, at)),
        };
        return Err(TraceError::Pickle { at, fault });
    }
}

/// Why a step was not made.
enum Stop {
    Fault(PickleFault),
    Read(io::Error),
}

impl From<PickleFault> for Stop {
    fn from(fault: PickleFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

struct Machine {
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    lists: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Word, Value)>>,
    /// Bytes of memory taken, about.
    used: u64,
    most: u64,
}

impl Machine {
    /// One opcode; the root if it was the last.
    fn step<R: BufRead>(
        &mut self,
        source: &mut Source<R>,
        code: u8,
    ) -> Result<Option<Value>, Stop> {
        match code {
            0x80 => match source.byte()? {
                2..=5 => {}
                version => return Err(PickleFault::Protocol { version }.into()),
            },
            // The length of what follows, which is of no use to a stream.
            0x95 => source.skip(8)?,
            b'.' => return Ok(Some(self.pop()?)),
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Bool),
            b'K' => {
                let value = source.byte()?;
                self.push(Value::Int(value.into()));
            }
            b'M' => {
                let value = u16::from_le_bytes(source.bytes()?);
                self.push(Value::Int(value.into()));
            }
            b'J' => {
                let value = i32::from_le_bytes(source.bytes()?);
                self.push(Value::Int(value.into()));
            }
            0x8a => {
                let len = source.byte()?;
                self.long(source, len.into())?;
            }
            0x8b => {
                let len = u32::from_le_bytes(source.bytes()?);
                self.long(source, len.into())?;
            }
            b'G' => {
                let value = f64::from_be_bytes(source.bytes()?);
                self.push(Value::Float(value));
            }
            0x8c | b'U' | b'C' => {
                let len = source.byte()?;
                self.text(source, len.into())?;
            }
            b'X' | b'T' | b'B' => {
                let len = u32::from_le_bytes(source.bytes()?);
                self.text(source, len.into())?;
            }
            0x8d | 0x8e => {
                let len = u64::from_le_bytes(source.bytes()?);
                self.text(source, len)?;
            }
            b']' => self.new_list(0, Value::List)?,
            b')' => self.new_list(0, Value::Tuple)?,
            0x85 => self.new_list(1, Value::Tuple)?,
            0x86 => self.new_list(2, Value::Tuple)?,
            0x87 => self.new_list(3, Value::Tuple)?,
            b't' | b'l' => {
                let count = self.above_mark()?;
                let kind = if code == b't' {
                    Value::Tuple
                } else {
                    Value::List
                };
                self.new_list(count, kind)?;
            }
            b'}' => self.new_dict(0)?,
            b'd' => {
                let count = self.above_mark()?;
                self.new_dict(count)?;
            }
            b'a' => self.append(1)?,
            b'e' => {
                let count = self.above_mark()?;
                self.append(count)?;
            }
            b's' => self.set_items(2)?,
            b'u' => {
                let count = self.above_mark()?;
                self.set_items(count)?;
            }
            b'(' => {
                self.used += 8;
                self.marks.push(self.stack.len());
            }
            b'0' => {
                self.pop()?;
            }
            b'1' => {
                let count = self.above_mark()?;
                self.stack.truncate(self.stack.len() - count);
            }
            b'2' => {
                let top = self.top()?;
                self.push(top);
            }
            _ => return self.memo_step(source, code).map(|()| None),
        }
        Ok(None)
    }

    fn memo_step<R: BufRead>(&mut self, source: &mut Source<R>, code: u8) -> Result<(), Stop> {
        match code {
            0x94 => self.put(self.memo.len() as u64),
            b'q' => {
                let index = source.byte()?;
                self.put(index.into())
            }
            b'r' => {
                let index = u32::from_le_bytes(source.bytes()?);
                self.put(index.into())
            }
            b'h' => {
                let index = source.byte()?;
                self.get(index.into())
            }
            b'j' => {
                let index = u32::from_le_bytes(source.bytes()?);
                self.get(index.into())
            }
            _ => Err(refused(code)),
        }
    }

    fn push(&mut self, value: Value) {
        self.used += VALUE;
        self.stack.push(value);
    }

    /// The least stack height that values may be taken down to.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value, Stop> {
        if self.stack.len() <= self.floor() {
            return Err(PickleFault::Stack.into());
        }
        self.stack.pop().ok_or(PickleFault::Stack.into())
    }

    fn top(&self) -> Result<Value, Stop> {
        self.stack.last().copied().ok_or(PickleFault::Stack.into())
    }

    /// Values above the latest mark, which goes.
    fn above_mark(&mut self) -> Result<usize, Stop> {
        let mark = self.marks.pop().ok_or(PickleFault::Stack)?;
        self.stack
            .len()
            .checked_sub(mark)
            .ok_or(PickleFault::Stack.into())
    }

    /// Where the last `count` values begin.
    fn split(&self, count: usize) -> Result<usize, Stop> {
        let start = self.stack.len().checked_sub(count);
        let start = start.filter(|start| *start >= self.floor());
        start.ok_or(PickleFault::Stack.into())
    }

    fn new_list(&mut self, count: usize, kind: fn(u32) -> Value) -> Result<(), Stop> {
        let start = self.split(count)?;
        let number = u32::try_from(self.lists.len()).map_err(|_| PickleFault::Stack)?;
        let items: Vec<Value> = self.stack.drain(start..).collect();
        self.used += VALUE * (count as u64 + 2);
        self.lists.push(items);
        self.push(kind(number));
        Ok(())
    }

    fn new_dict(&mut self, count: usize) -> Result<(), Stop> {
        let start = self.split(count)?;
        let number = u32::try_from(self.dicts.len()).map_err(|_| PickleFault::Stack)?;
        self.used += FIELD;
        self.dicts.push(Vec::new());
        self.stack.insert(start, Value::Dict(number));
        self.set_items(count)
    }

    fn append(&mut self, count: usize) -> Result<(), Stop> {
        let start = self.split(count + 1)?;
        let Value::List(number) = self.stack[start] else {
            return Err(PickleFault::Kind.into());
        };
        let list = self
            .lists
            .get_mut(number as usize)
            .ok_or(PickleFault::Kind)?;
        let before = list.capacity();
        list.extend(self.stack.drain(start + 1..));
        self.used += VALUE * (list.capacity() - before) as u64;
        Ok(())
    }

    fn set_items(&mut self, count: usize) -> Result<(), Stop> {
        let start = self.split(count + 1)?;
        let Value::Dict(number) = self.stack[start] else {
            return Err(PickleFault::Kind.into());
        };
        if !count.is_multiple_of(2) {
            return Err(PickleFault::Stack.into());
        }
        let dict = self
            .dicts
            .get_mut(number as usize)
            .ok_or(PickleFault::Kind)?;
        let before = dict.capacity();
        for pair in self.stack[start + 1..].chunks_exact(2) {
            if let Value::Text(word) = pair[0]
                && word != Word::Other
            {
                dict.push((word, pair[1]));
            }
        }
        self.used += FIELD * (dict.capacity() - before) as u64;
        self.stack.truncate(start + 1);
        Ok(())
    }

    fn text<R: BufRead>(&mut self, source: &mut Source<R>, len: u64) -> Result<(), Stop> {
        let word = source.word(len)?;
        self.push(Value::Text(word));
        Ok(())
    }

    /// An integer in two's complement, of any length that fits 64 bits.
    fn long<R: BufRead>(&mut self, source: &mut Source<R>, len: u64) -> Result<(), Stop> {
        let mut bytes = [0; 9];
        let Some(places) = usize::try_from(len)
            .ok()
            .and_then(|len| bytes.get_mut(..len))
        else {
            return Err(PickleFault::Integer { bytes: len }.into());
        };
        for place in places.iter_mut() {
            *place = source.byte()?;
        }
        let is_negative = places.last().is_some_and(|last| *last >= 0x80);
        let fill = if is_negative { 0xff } else { 0 };
        let len = places.len();
        bytes[len..].fill(fill);
        let low = u64::from_le_bytes([
            bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
        ]);
        let value = match (bytes[8], low.cast_signed()) {
            (0, signed) if signed >= 0 => Value::Int(signed),
            (0, _) => Value::Large(low),
            (0xff, signed) if signed < 0 => Value::Int(signed),
            _ => return Err(PickleFault::Integer { bytes: 9 }.into()),
        };
        self.push(value);
        Ok(())
    }

    fn put(&mut self, index: u64) -> Result<(), Stop> {
        let top = self.top()?;
        // Numbers ascend in every known writer: one far beyond would only be there to take memory.
        let most = self.memo.len() as u64 + (1 << 16);
        let place = usize::try_from(index).ok().filter(|_| index <= most);
        let place = place.ok_or(PickleFault::Memo { index })?;
        if place >= self.memo.len() {
            self.used += VALUE * (place + 1 - self.memo.len()) as u64;
            self.memo.resize(place + 1, None);
        }
        self.memo[place] = Some(top);
        Ok(())
    }

    fn get(&mut self, index: u64) -> Result<(), Stop> {
        let place = usize::try_from(index).ok();
        let value = place.and_then(|place| self.memo.get(place).copied().flatten());
        let value = value.ok_or(PickleFault::Memo { index })?;
        self.push(value);
        Ok(())
    }
}

/// Why an opcode is not followed.
fn refused(code: u8) -> Stop {
    let name = match code {
        b'c' => "GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        0x93 => "STACK_GLOBAL",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        _ => return PickleFault::Unknown { code }.into(),
    };
    PickleFault::Foreign { name, code }.into()
}
