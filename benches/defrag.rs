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
    plan_by_size(&rig);
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

/// What an H200 measured of itself, so that planning can be timed on any machine.
const H200: &str = "\
create 2097152 8000\ncreate 8388608 8200\ncreate 33554432 8300\n\
create 268435456 10000\ncreate 1073741824 15900\ncreate 4294967296 35300\n\
map 2097152 1280\nmap 8388608 980\nmap 33554432 1140\n\
map 268435456 1330\nmap 1073741824 1550\nmap 4294967296 2640\n\
set_access 2097152 23900\nset_access 8388608 20600\nset_access 33554432 35900\n\
set_access 268435456 41300\nset_access 1073741824 67400\nset_access 4294967296 160200\n\
unmap 2097152 16000\nunmap 8388608 15000\nunmap 33554432 22100\n\
unmap 268435456 26600\nunmap 1073741824 32300\nunmap 4294967296 95600\n\
copy 2097152 12000\ncopy 8388608 12800\ncopy 33554432 26500\n\
copy 268435456 153200\ncopy 1073741824 570200\ncopy 4294967296 2258800\n\
batch 2097152 13600\nbatch 8388608 14500\nbatch 33554432 29000\n\
batch 268435456 169600\nbatch 1073741824 632500\nbatch 4294967296 2479700\n\
launch 5584\nkernel 2000";

/// A heap that the showdown asks a block of, as the planner sees it: half of the pieces free, every
/// other one, the upper half young, three times as many addresses behind, and as much in the pool.
fn half_free(piece: u64) -> (State, u64) {
    let pieces = (4 * GIB / piece).clamp(32, 512);
    let n = usize::try_from(pieces).unwrap_or(0);
    let mut state = checkerboard(piece, piece, pieces / 2);
    state.slots.resize(4 * n, Slot::Hole);
    let young = state.pieces.iter_mut().skip(n / 4);
    young.for_each(|piece| piece.young = true);
    state.idle = pieces / 2;
    (state, pieces / 2 * piece)
}

/// Planning alone, for heaps of the showdown: what each strategy adds to its driver calls and copies.
fn plan_by_size(rig: &Rig) {
    let table: CostTable = must(H200.parse().map_err(Into::into));
    let lazy = Lazy {
        interval: Duration::ZERO,
        ..Lazy::default()
    };
    for size in [2, 4, 8, 64, 256] {
        let (state, want) = half_free(size * MIB);
        for strategy in Strategy::ALL {
            let mut samples = Vec::new();
            let mut last = None;
            for _ in 0..500 {
                let start = Instant::now();
                let made = plan(black_box(&state), strategy, want, &table, &lazy);
                samples.push(start.elapsed());
                last = made.ok();
            }
            let fastest = samples.iter().min().copied().unwrap_or_default();
            let predicted = last.map_or(Duration::ZERO, |p| p.predicted.until_usable.into());
            let live = state.pieces.len();
            let case = format!(
                "planning alone, {live} live of {}, half free",
                Bytes(size * MIB)
            );
            let note = format!(
                "fastest {}, predicted {}",
                support::show(fastest),
                support::show(predicted)
            );
            rig.row(&case, strategy.name(), samples, note);
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
