//! What can be wrong with a recorded trace.

use std::fmt;
use std::io;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The input ended with an error, such as a truncated archive.
    #[error("reading failed after {at} bytes: {source}")]
    Io {
        /// Bytes read before, of the contents.
        at: u64,
        /// The error.
        source: io::Error,
    },
    /// There is nothing in it.
    #[error("the file is empty")]
    Empty,
    /// It is a gzip archive.
    #[error("the file is compressed with gzip: unpack it first")]
    Compressed,
    /// A line is not what the format says.
    #[error("line {line}: {fault}")]
    Line {
        /// Its number, from 1.
        line: u64,
        /// What is wrong.
        fault: LineFault,
    },
    /// A pickle is not one of plain dicts, lists, tuples, strings and numbers.
    #[error("byte {at} of the pickle: {fault}")]
    Pickle {
        /// Where the opcode stands.
        at: u64,
        /// What is wrong.
        fault: PickleFault,
    },
    /// A pickle is well-formed and no snapshot.
    #[error("not a memory snapshot: {what} of {part} {nth} is {why}")]
    Snapshot {
        /// The field.
        what: &'static str,
        /// What it is a field of.
        part: &'static str,
        /// Which one, from 0.
        nth: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// More than the settings allow.
    #[error("more than {limit} {what}, at {place}")]
    TooMuch {
        /// Of what.
        what: &'static str,
        /// The setting.
        limit: u64,
        /// Where the limit was passed.
        place: Place,
    },
    /// It is well-formed, and no block is ever allocated.
    #[error("the trace has no allocation in it")]
    NoEvents,
}

/// A place in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// A line, from 1.
    Line(u64),
    /// A byte, from 0.
    Byte(u64),
    /// An event of a snapshot, from 0.
    Event(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(n) => write!(f, "line {n}"),
            Self::Byte(n) => write!(f, "byte {n}"),
            Self::Event(n) => write!(f, "event {n}"),
        }
    }
}

/// What is wrong with a line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineFault {
    /// It does not begin with what the format knows.
    #[error("it begins with none of a, f, m, u, o and #")]
    Kind,
    /// Too few or too many fields.
    #[error("it has {found} fields instead of {expected}")]
    Fields {
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// A field is no number of 64 bits.
    #[error("{field} is no number below 2^64")]
    Number {
        /// Which.
        field: &'static str,
    },
    /// A field is below zero.
    #[error("{field} is {value}, below zero")]
    Negative {
        /// Which.
        field: &'static str,
        /// Its value.
        value: i64,
    },
    /// A block is freed that is not live.
    #[error("block {id} is freed and not live")]
    UnknownId {
        /// The block.
        id: u64,
    },
    /// A block is allocated that is live.
    #[error("block {id} is allocated and still live")]
    LiveId {
        /// The block.
        id: u64,
    },
    /// An action that RMM does not have.
    #[error("its action is none of allocate, allocate failure and free")]
    Action,
    /// It is longer than the settings allow.
    #[error("it is longer than {limit} bytes")]
    TooLong {
        /// The setting.
        limit: usize,
    },
    /// It is not text.
    #[error("it is not text")]
    NotText,
    /// Live bytes do not fit in 64 bits.
    #[error("live bytes pass 2^64")]
    Overflow,
}

/// What is wrong with a pickle.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PickleFault {
    /// An opcode that names a class, calls a function or builds an object. Never done.
    #[error("opcode {name} (0x{code:02x}) would import or run code, and is refused")]
    Foreign {
        /// Python's name of it.
        name: &'static str,
        /// The opcode.
        code: u8,
    },
    /// An opcode that snapshots do not use.
    #[error("opcode 0x{code:02x} is not one that snapshots use")]
    Unknown {
        /// The opcode.
        code: u8,
    },
    /// A protocol that this reader does not know.
    #[error("protocol {version} is none of 2 to 5")]
    Protocol {
        /// The protocol.
        version: u8,
    },
    /// The file ends too early.
    #[error("the file ends here")]
    Truncated,
    /// An opcode takes more from the stack than there is.
    #[error("the stack has too few values")]
    Stack,
    /// A list or dict operation on something else.
    #[error("the value on the stack is of the wrong kind")]
    Kind,
    /// A reference to a value that was never stored.
    #[error("value {index} was never stored")]
    Memo {
        /// Its number.
        index: u64,
    },
    /// An integer above 64 bits.
    #[error("an integer takes {bytes} bytes, above 64 bits")]
    Integer {
        /// How long it is.
        bytes: u64,
    },
}
