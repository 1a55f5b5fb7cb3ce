//! Fragmented heaps taken from recorded traces: allocations and frees are replayed up to a point, and
//! what is live then is what a large block has to be found beside.
//!
//! The format, one event a line: `a,<id>,<bytes>,<stream>,<microseconds>` allocates and
//! `f,<id>,<microseconds>` frees; `#` starts a comment.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;

use flate2::read::GzDecoder;
use granule::defrag::{Age, MovableBlock, MovableConfig, MovableHeap, Strategy};
use granule::units::{MIB, round_up};

use crate::output::{Case, Row};
use crate::scene::{self, Scene};
use crate::support::Outcome;
use crate::{Stage, ask};

enum Event {
    Alloc(u64, u64),
    Free(u64),
}

fn read(path: &str) -> Outcome<Vec<Event>> {
    let mut text = String::new();
    let mut file = File::open(path).map_err(|error| format!("{path}: {error}"))?;
    match path.ends_with(".gz") {
        true => GzDecoder::new(file).read_to_string(&mut text)?,
        false => file.read_to_string(&mut text)?,
    };
    let mut events = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let words: Vec<&str> = line.split(',').map(str::trim).collect();
        let number_at = |i: usize| -> Outcome<u64> {
            let word = words.get(i).copied().unwrap_or_default();
            Ok(word
                .parse()
                .map_err(|_| format!("{path}:{number}: {word:?} is no number"))?)
        };
        match words.first().copied() {
            Some("a") => events.push(Event::Alloc(number_at(1)?, number_at(2)?)),
            Some("f") => events.push(Event::Free(number_at(1)?)),
            _ => {}
        }
    }
    Ok(events)
}

/// The most live bytes, and the event past the peak at which live bytes first fall to two thirds of it.
fn point(events: &[Event]) -> (u64, usize) {
    let mut sizes = HashMap::new();
    let (mut live, mut peak, mut at) = (0u64, 0u64, 0usize);
    let mut history = Vec::with_capacity(events.len());
    for event in events {
        match event {
            Event::Alloc(id, bytes) => {
                sizes.insert(*id, *bytes);
                live += bytes;
            }
            Event::Free(id) => live -= sizes.remove(id).unwrap_or(0),
        }
        if live > peak {
            (peak, at) = (live, history.len());
        }
        history.push(live);
    }
    let after = history[at.min(history.len())..]
        .iter()
        .position(|live| *live <= peak / 3 * 2);
    (peak, after.map_or(history.len(), |n| at + n + 1))
}

pub fn rows(stage: &mut Stage, path: &str) -> Outcome<Vec<Row>> {
    let events = read(path)?;
    let (peak, end) = point(&events);
    let granule = if stage.is_cuda() { 32 * MIB } else { 4 * MIB };
    let budget = round_up(peak / 2 * 3, granule).ok_or("a peak beyond all sizes")? + 64 * granule;
    if peak == 0 || budget > stage.most {
        println!("\n{path}: its peak of {peak} bytes does not fit, passed over");
        return Ok(Vec::new());
    }
    let pool = scene::pool(&stage.device, budget, granule)?;
    let mut rows = Vec::new();
    let mut case = None;
    for strategy in Strategy::ALL {
        let (mut samples, mut why) = (Vec::new(), None);
        for _ in 0..stage.reps.div_ceil(3) {
            let scene = replay(stage, &pool, granule, &events[..end])?;
            let stats = scene.heap.stats();
            let name = std::path::Path::new(path).file_name();
            case.get_or_insert_with(|| Case {
                group: "trace",
                name: format!(
                    "{}, {} blocks, {} % of {} MiB live",
                    name.unwrap_or_default().to_string_lossy(),
                    stats.blocks,
                    100 - stats.waste_permille() / 10,
                    stats.mapped / MIB
                ),
                piece: 0,
                granule,
                permille: 1000 - stats.waste_permille(),
                bytes: stats.mapped,
                want: scene.want,
            });
            match ask(stage, &scene, strategy)? {
                Ok(sample) => samples.push(sample),
                Err(error) => {
                    why = Some(error);
                    break;
                }
            }
        }
        if let Some(case) = &case {
            rows.push(Row::of(case, strategy.name(), &samples, why));
        }
    }
    Ok(rows)
}

/// The heap as it is after these events; asked for are three quarters of what is free.
fn replay(stage: &Stage, pool: &granule::Pool, granule: u64, events: &[Event]) -> Outcome<Scene> {
    let config = MovableConfig {
        granule,
        on_failure: false,
        lazy: granule::defrag::Lazy {
            interval: std::time::Duration::ZERO,
            waste_permille: 0,
        },
        ..MovableConfig::known(stage.table.clone())
    };
    let heap = MovableHeap::new(pool, config)?;
    let mut live: HashMap<u64, MovableBlock> = HashMap::new();
    let mut born: Vec<u64> = Vec::new();
    for event in events {
        match event {
            Event::Alloc(id, bytes) => {
                match heap.alloc_aged(*bytes, Age::Unknown, &stage.stream) {
                    Ok(block) => {
                        live.insert(*id, block);
                        born.push(*id);
                    }
                    // What is there is fragmented enough.
                    Err(error) if error.is_out_of_memory() => break,
                    Err(error) => return Err(error.into()),
                }
            }
            Event::Free(id) => drop(live.remove(id)),
        }
    }
    let blocks = born.into_iter().filter_map(|id| live.remove(&id)).collect();
    let stats = heap.stats();
    let want = (stats.free / 4 * 3).max(stats.largest_free + granule) / granule * granule;
    Scene::of(heap, blocks, want, &stage.stream, &stage.checker)
}
