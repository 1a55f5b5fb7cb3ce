//! A snapshot as JSON. Small enough to be written by hand.

use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

use super::torch_site::Timing;
use crate::{BlockState, HeapSnapshot, HeapStats, Span, StreamSnapshot};

/// The whole snapshot on one line.
pub(super) fn snapshot(snapshot: &HeapSnapshot) -> String {
    let mut out = String::from("{\"stats\":");
    stats(&mut out, &snapshot.stats);
    out.push_str(",\"streams\":");
    list(&mut out, &snapshot.streams, stream);
    out.push('}');
    out
}

/// What serving PyTorch costs.
pub(super) fn costs(timing: &Timing) -> String {
    let mut out = String::from("{");
    for (name, cost) in [("allocs", &timing.allocs), ("frees", &timing.frees)] {
        let (calls, nanos) = (cost.calls.load(Relaxed), cost.nanos.load(Relaxed));
        put(
            &mut out,
            format_args!("\"{name}\":{{\"calls\":{calls},\"nanos\":{nanos}}},"),
        );
    }
    out.push_str("\"driver\":{");
    for (i, (call, count)) in timing.record.snapshot().iter().enumerate() {
        let before = if i == 0 { "" } else { "," };
        let (name, calls, failures, nanos) =
            (call.name(), count.calls, count.failures, count.nanos);
        put(
            &mut out,
            format_args!(
                "{before}\"{name}\":{{\"calls\":{calls},\"failures\":{failures},\"nanos\":{nanos}}}"
            ),
        );
    }
    out.push_str("}}");
    out
}

fn stream(out: &mut String, stream: &StreamSnapshot) {
    put(
        out,
        format_args!("{{\"stream\":{},\"range\":", stream.stream.0),
    );
    span(out, &stream.range);
    out.push_str(",\"stats\":");
    stats(out, &stream.stats);
    out.push_str(",\"granules\":");
    list(out, &stream.granules, |out, granule| {
        let (addr, len) = (granule.span.addr.get(), granule.span.len);
        put(
            out,
            format_args!("{{\"addr\":{addr},\"len\":{len},\"phys\":"),
        );
        match granule.phys {
            Some(phys) => put(out, format_args!("{}}}", phys.0)),
            None => out.push_str("null}"),
        }
    });
    out.push_str(",\"blocks\":");
    list(out, &stream.blocks, |out, block| {
        let (addr, len) = (block.span.addr.get(), block.span.len);
        let state = match block.state {
            BlockState::Live => "live",
            BlockState::Limbo => "limbo",
        };
        put(
            out,
            format_args!("{{\"addr\":{addr},\"len\":{len},\"state\":\"{state}\""),
        );
        if let Some(requested) = block.requested {
            put(out, format_args!(",\"requested\":{requested}"));
        }
        if let Some(name) = &block.name {
            out.push_str(",\"name\":");
            string(out, name);
        }
        out.push('}');
    });
    out.push_str(",\"free\":");
    list(out, &stream.free, span);
    out.push_str(",\"aliases\":");
    list(out, &stream.aliases, span);
    put(out, format_args!(",\"claimed\":{}}}", stream.claimed));
}

fn span(out: &mut String, span: &Span) {
    let (addr, len) = (span.addr.get(), span.len);
    put(out, format_args!("{{\"addr\":{addr},\"len\":{len}}}"));
}

fn stats(out: &mut String, stats: &HeapStats) {
    let figures = [
        ("live", stats.live),
        ("live_peak", stats.live_peak),
        ("blocks", stats.blocks),
        ("held", stats.held),
        ("held_peak", stats.held_peak),
        ("granules", stats.granules),
        ("free", stats.free),
        ("largest_free", stats.largest_free),
        ("idle", stats.idle),
        ("limbo", stats.limbo),
        ("aliases", stats.aliases),
        ("allocs", stats.allocs),
        ("hits", stats.hits),
        ("misses", stats.misses),
        ("remaps", stats.remaps),
        ("creates", stats.creates),
        ("host_waits", stats.host_waits),
        ("device_waits", stats.device_waits),
        ("failures", stats.failures),
        ("broken", stats.broken),
        ("scoped", stats.scoped),
    ];
    for (i, (name, value)) in figures.iter().enumerate() {
        let before = if i == 0 { '{' } else { ',' };
        put(out, format_args!("{before}\"{name}\":{value}"));
    }
    out.push('}');
}

fn list<T>(out: &mut String, items: &[T], mut one: impl FnMut(&mut String, &T)) {
    out.push('[');
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        one(out, item);
    }
    out.push(']');
}

fn string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c < ' ' => put(out, format_args!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

fn put(out: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a `String` does not fail.
    let _ = out.write_fmt(what);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted() {
        let mut out = String::new();
        string(&mut out, "a\"b\\c\n\u{1}é");
        assert_eq!(out, "\"a\\\"b\\\\c\\u000a\\u0001é\"");
    }
}
