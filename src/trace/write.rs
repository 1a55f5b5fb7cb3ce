//! Writes pickles of protocol 4 with the opcodes that PyTorch's pages and tools read.

use std::collections::HashMap;
use std::io::{self, Write};

/// Items between a mark and the opcode that takes them: what Python's own writer does, and what a
/// browser can spread over one call.
pub(super) const BATCH: usize = 1000;

/// A pickle under way.
pub(super) struct Writer<W> {
    out: W,
    /// Strings that were written, by number.
    memo: HashMap<String, u32>,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&[0x80, 4])?;
        Ok(Self {
            out,
            memo: HashMap::new(),
        })
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.out.write_all(b".")?;
        self.out.flush()
    }

    pub(super) fn bool(&mut self, value: bool) -> io::Result<()> {
        self.out.write_all(&[if value { 0x88 } else { 0x89 }])
    }

    pub(super) fn int(&mut self, value: u64) -> io::Result<()> {
        if let Ok(value) = u8::try_from(value) {
            return self.out.write_all(&[b'K', value]);
        }
        if let Ok(value) = i32::try_from(value) {
            self.out.write_all(b"J")?;
            return self.out.write_all(&value.to_le_bytes());
        }
        let is_signed = i64::try_from(value).is_ok();
        self.out.write_all(&[0x8a, if is_signed { 8 } else { 9 }])?;
        self.out.write_all(&value.to_le_bytes())?;
        match is_signed {
            true => Ok(()),
            // The sign.
            false => self.out.write_all(&[0]),
        }
    }

    /// A string; the same again costs five bytes at most.
    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(number) = self.memo.get(text) {
            return match u8::try_from(*number) {
                Ok(number) => self.out.write_all(&[b'h', number]),
                Err(_) => {
                    self.out.write_all(b"j")?;
                    self.out.write_all(&number.to_le_bytes())
                }
            };
        }
        // Names are short; one beyond four gigabytes would be cut off.
        let bytes = text.as_bytes();
        let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        self.out.write_all(b"X")?;
        self.out.write_all(&len.to_le_bytes())?;
        self.out.write_all(bytes)?;
        let number = u32::try_from(self.memo.len()).map_err(io::Error::other)?;
        self.out.write_all(b"r")?;
        self.out.write_all(&number.to_le_bytes())?;
        self.memo.insert(text.to_owned(), number);
        Ok(())
    }

    /// A list of what `item` writes for each.
    pub(super) fn list<T>(
        &mut self,
        items: &[T],
        mut item: impl FnMut(&mut Self, &T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.out.write_all(b"]")?;
        for batch in items.chunks(BATCH) {
            self.out.write_all(b"(")?;
            for one in batch {
                item(self, one)?;
            }
            self.out.write_all(b"e")?;
        }
        Ok(())
    }

    /// A dict; `fields` writes names and values in turn.
    pub(super) fn dict(
        &mut self,
        fields: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        self.out.write_all(b"}(")?;
        fields(self)?;
        self.out.write_all(b"u")
    }

    pub(super) fn int_field(&mut self, name: &str, value: u64) -> io::Result<()> {
        self.text(name)?;
        self.int(value)
    }

    pub(super) fn text_field(&mut self, name: &str, value: &str) -> io::Result<()> {
        self.text(name)?;
        self.text(value)
    }

    /// Two numbers as a tuple.
    pub(super) fn pair(&mut self, a: u64, b: u64) -> io::Result<()> {
        self.int(a)?;
        self.int(b)?;
        self.out.write_all(&[0x86])
    }
}
