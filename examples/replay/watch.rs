//! Runs that are looked at: with a history, for other tools.

use std::fs::File;
use std::io::BufWriter;

use granule::trace::{Event, TorchSnapshot, Trace};
use granule::{Heap, HeapSnapshot, History, HistoryConfig, HistoryEvents, Pool};

use crate::args::{Args, Budget};
use crate::core::{Outcome, Rig, Watch, run};

/// Records a run, and what there is at the trace's end.
struct Recorder {
    history: History,
    last: u64,
    end: Option<(HeapSnapshot, HistoryEvents)>,
}

impl Watch for Recorder {
    fn begin(&mut self, heap: &Heap) -> Outcome {
        heap.set_history(Some(&self.history));
        Ok(())
    }

    fn after(&mut self, nth: u64, _: &Event, _: u64, heap: &Heap, _: &Pool) -> Outcome {
        if nth + 1 == self.last {
            self.end = Some((heap.snapshot(), self.history.events()));
        }
        Ok(())
    }
}

/// Runs a trace once more with a history, and writes that as a log, a pickle or both.
pub fn export(args: &Args, rig: &Rig, trace: &Trace) -> Outcome {
    let mut recorder = Recorder {
        history: History::new(HistoryConfig {
            events: args.history,
            ..HistoryConfig::default()
        }),
        last: trace.events.len() as u64,
        end: None,
    };
    let budget = match args.budget {
        Budget::None => None,
        Budget::Bytes(bytes) => Some(bytes),
        Budget::Ratio(ratio) => Some((trace.peak as f64 * ratio) as u64),
    };
    run(rig, trace, &args.setup, budget, &mut recorder)?;
    if let Some(path) = &args.log {
        // What came behind the end is the run's own clearing up.
        recorder
            .history
            .write_log(BufWriter::new(File::create(path)?))?;
        eprintln!("wrote {}", path.display());
    }
    if let (Some(path), Some((heap, events))) = (&args.export, &recorder.end) {
        let mut snapshot = TorchSnapshot::new(rig.device.info().ordinal);
        snapshot.heap(heap);
        snapshot.history(events);
        snapshot.write(File::create(path)?)?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}
