//! JSON, written.

use std::fmt::Write as _;

/// A string with its quotes.
pub fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            // For pages that hold the text in a script.
            '<' => out.push_str("\\u003c"),
            c if (c as u32) < 0x20 || c == '\u{2028}' || c == '\u{2029}' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// An object under way.
pub struct Object(String);

impl Object {
    pub fn new() -> Self {
        Self(String::from("{"))
    }

    /// A field whose value is JSON already.
    pub fn raw(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        let _ = write!(self.0, "{}:{value}", quote(name));
        self
    }

    pub fn text(self, name: &str, value: &str) -> Self {
        let value = quote(value);
        self.raw(name, value)
    }

    /// A number with so many decimals; `null` for what is none.
    pub fn float(self, name: &str, value: f64, decimals: usize) -> Self {
        match value.is_finite() {
            true => self.raw(name, format_args!("{value:.decimals$}")),
            false => self.raw(name, "null"),
        }
    }

    pub fn maybe(self, name: &str, value: Option<impl std::fmt::Display>) -> Self {
        match value {
            Some(value) => self.raw(name, value),
            None => self.raw(name, "null"),
        }
    }

    pub fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// A list of values that are JSON already.
pub fn list<T: std::fmt::Display>(values: impl IntoIterator<Item = T>) -> String {
    let mut out = String::from("[");
    for value in values {
        if out.len() > 1 {
            out.push(',');
        }
        let _ = write!(out, "{value}");
    }
    out.push(']');
    out
}
