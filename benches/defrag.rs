//! What it takes to make free memory contiguous: planning alone, and each strategy on a fragmented heap
//! whose every byte is checked afterwards.
//!
//! ```text
//! GRANULE_DRIVER=cuda cargo bench --bench defrag            # figures; about a minute on an H200
//! cargo bench --bench defrag -- --test                      # each case once, checked
//! ```
//!
//! The whole comparison, with other occupancies, traces, rivals and kernels beside it, is the example
//! `showdown`.

#[allow(dead_code)]
mod support;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode};
use granule::defrag::{Lazy, Piece, Slot, State, Strategy, plan};
use granule::driver::MeasureConfig;
use granule::driver::cost::CostTable;
use granule::units::{Bytes, GIB, MIB};

use support::scene::{self, Checker, Layout, Scene};
use support::{Rig, must};

fn main() {
    let mut criterion = Criterion::default()
        .without_plots()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(500))
        .configure_from_args();
    planning(&mut criterion);
    let rig = must(Rig::open());
    plan_rows(&rig);
    asking(&mut criterion, &rig);
    criterion.final_summary();
    rig.print();
    assert_eq!(rig.device.quarantined(), 0);
}

/// Every other piece of `2 n` is free, with as many holes behind.
fn checkerboard(piece: u64, granule: u64, n: u64) -> State {
    let mapped = usize::try_from(2 * n * piece / granule).unwrap_or(0);
    State {
        granule,
        slots: [vec![Slot::Mapped; mapped], vec![Slot::Hole; 2 * mapped]].concat(),
        pieces: (0..n)
            .map(|i| Piece {
                id: i,
                offset: 2 * i * piece,
                len: piece,
                movable: true,
                young: false,
            })
            .collect(),
        align: 256,
        idle: 0,
        creatable: 0,
        peers: 0,
        since_last: Duration::ZERO,
    }
}

/// The planner, which is on the way of every request that it serves.
fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    let table = CostTable::default();
    for (piece, granule, n) in [
        (GIB, GIB, 16),
        (2 * MIB, 2 * MIB, 256),
        (2 * MIB, 32 * MIB, 2048),
    ] {
        let state = checkerboard(piece, granule, n);
        let want = n * piece / 2;
        for strategy in [
            Strategy::Remap,
            Strategy::Compact,
            Strategy::Evacuate,
            Strategy::Hybrid,
        ] {
            let of = format!(
                "{strategy}, {n} live of {} in {}",
                Bytes(piece),
                Bytes(granule)
            );
            group.bench_function(of, |bencher| {
                bencher.iter(|| {
                    let lazy = Lazy::default();
                    black_box(plan(black_box(&state), strategy, want, &table, &lazy)).is_ok()
                });
            });
        }
    }
    group.finish();
}

/// The same as rows of the table, for as many small pieces as the showdown has, and eight times as many.
fn plan_rows(rig: &Rig) {
    let table = CostTable::default();
    let lazy = Lazy::default();
    for pieces in [512, 4096] {
        let state = checkerboard(2 * MIB, 2 * MIB, pieces / 2);
        for strategy in Strategy::ALL {
            let want = pieces / 2 * 2 * MIB;
            let mut samples = Vec::new();
            let mut steps = 0;
            for _ in 0..50 {
                let start = Instant::now();
                let made = plan(black_box(&state), strategy, want, &table, &lazy);
                samples.push(start.elapsed());
                steps = made.map_or(0, |plan| plan.steps.len());
            }
            let case = format!("planning alone, {pieces} pieces of 2 MiB, every other one live");
            rig.row(&case, strategy.name(), samples, format!("{steps} steps"));
        }
    }
}

/// From the request until the block can be used and the device has got there.
fn asking(criterion: &mut Criterion, rig: &Rig) {
    let (sizes, pieces): (&[u64], u64) = match rig.is_cuda() {
        true => (&[2 * MIB, 32 * MIB, 256 * MIB, GIB], 32),
        false => (&[scene::SMALL], 8),
    };
    let driver = &**rig.device.driver();
    let config = MeasureConfig::of(driver);
    let table = must(granule::driver::measure(driver, config).map_err(Into::into));
    let mut checker = must(Checker::new(&rig.stream));
    for piece in sizes {
        let layout = Layout::halved(*piece, pieces);
        let budget = layout.bytes() + layout.want();
        let pool = must(scene::pool(&rig.device, budget, layout.granule));
        let mut group =
            criterion.benchmark_group(format!("half free, pieces of {}", Bytes(*piece)));
        group.sampling_mode(SamplingMode::Flat);
        for strategy in Strategy::ALL {
            let mut samples = Vec::new();
            let mut copied = 0;
            group.bench_function(strategy.name(), |bencher| {
                bencher.iter_custom(|n| {
                    let mut sum = Duration::ZERO;
                    for _ in 0..n {
                        let scene =
                            must(Scene::build(&pool, &rig.stream, &layout, &table, &checker));
                        let sample = must(scene.ask(strategy, &mut checker, &|| 1));
                        sum += sample.usable;
                        copied = sample.report.bytes_copied;
                        samples.push(sample.usable);
                    }
                    sum
                });
            });
            let case = format!(
                "{} contiguous of pieces of {}",
                Bytes(layout.want()),
                Bytes(*piece)
            );
            rig.row(
                &case,
                strategy.name(),
                samples,
                format!("{} copied", Bytes(copied)),
            );
        }
        group.finish();
    }
}
