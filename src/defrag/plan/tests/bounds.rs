//! What spares the planner work never costs a better plan.

use super::*;
use crate::defrag::plan::window::Known;
use crate::driver::cost::Curve;

/// States of which some have pieces that are copied by a call each, and lengths wanted.
fn scenes() -> impl Shape<Value = (State, u64)> {
    let scale = prop_oneof![Just(1), Just(MIB / 4), Just(MIB), Just(16 * MIB)];
    (states(), 1u64..900, scale).prop_map(|(mut state, want, scale)| {
        state.granule *= scale;
        state.align *= scale;
        for piece in &mut state.pieces {
            piece.offset *= scale;
            piece.len *= scale;
        }
        (state, want * scale)
    })
}

/// Tables with what a call costs, and copies that take a time and a rate each.
fn tables() -> impl Shape<Value = CostTable> {
    let call = 0u64..60_000;
    let copy = (0u64..30_000, 1u64..400);
    let calls = (
        call.clone(),
        call.clone(),
        call.clone(),
        0u64..8_000,
        0u64..3_000,
    );
    (calls, copy.clone(), copy).prop_map(|((open, close, create, launch, kernel), copy, batch)| {
        let line = |(start, permille): (u64, u64)| {
            let points = [0, GIB].map(|len| (len, Nanos(start + len / MIB * permille * 10)));
            Curve::new(points).unwrap()
        };
        CostTable {
            set_access: Curve::flat(Nanos(open)),
            unmap: Curve::flat(Nanos(close)),
            create: Curve::flat(Nanos(create)),
            copy: line(copy),
            batch: line(batch),
            launch: Nanos(launch),
            kernel: Nanos(kernel),
            ..CostTable::default()
        }
    })
}

/// As measured by somebody who was disturbed all the time: more bytes may take less.
fn wild_tables() -> impl Shape<Value = CostTable> {
    let times = || prop::collection::vec(0u64..2_000_000, 6);
    (tables(), times(), times(), 0u64..12).prop_map(|(table, copy, batch, shift)| {
        let curve = |times: Vec<u64>| {
            let lens = [8, 64, 160, 400, 900, 2500].map(|len| len << (2 * shift));
            let points = lens.into_iter().zip(times.into_iter().map(Nanos));
            Curve::new(points.collect::<Vec<_>>()).unwrap()
        };
        CostTable {
            copy: curve(copy),
            batch: curve(batch),
            ..table
        }
    })
}

/// What hybrid chooses from when nothing that it knows already spares it anything.
fn by_trying_everything(planner: &Planner<'_>, want: u64) -> Option<Found> {
    let mut best = None;
    for mode in [Mode::EVACUATE, Mode::REMAP, Mode::SHIFT] {
        let mut one = None;
        planner.windows(want, mode, &mut one, None);
        keep(&mut best, one);
    }
    for interval in planner.intervals(want) {
        keep(&mut best, planner.slide_within(&interval, want));
    }
    let most = best
        .as_ref()
        .map(|b| Nanos(b.time().0 * MIX_PERMILLE / 1000));
    let mut mixed = None;
    planner.windows(want, Mode::MIXED, &mut mixed, most);
    best = mixed.or(best);
    for mode in [Mode::GROW, Mode::ALL] {
        if best.is_none() {
            planner.windows(want, mode, &mut best, None);
        }
    }
    best
}

const MODES: [Mode; 8] = [
    Mode::EVACUATE,
    Mode::REMAP,
    Mode::SHIFT,
    Mode::MIXED,
    Mode::MINOR,
    Mode::GROW,
    Mode::FRESH,
    Mode::ALL,
];

#[test]
fn hybrid_prices_few_windows_where_small_pieces_are_copied() {
    let (table, lazy) = (CostTable::default(), Lazy::default());
    let priced = |state: &State, strategy, want| {
        let planner = Planner::new(state, &table);
        let found = planner.by(strategy, want, &lazy).unwrap();
        (planner.priced.get(), found.time())
    };
    for piece in [2 * MIB, 4 * MIB] {
        for n in [256, 2048] {
            let state = checkerboard(piece, piece, n);
            let alone = priced(&state, Strategy::Evacuate, n * piece);
            let hybrid = priced(&state, Strategy::Hybrid, n * piece);
            assert_eq!(hybrid.1, alone.1);
            assert!(
                hybrid.0 <= alone.0 + n as usize / 16,
                "{hybrid:?} {alone:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn hybrid_finds_what_trying_everything_finds(
        scene in scenes(),
        table in prop_oneof![tables(), wild_tables()],
    ) {
        let (state, want) = scene;
        let lazy = Lazy::default();
        let all = by_trying_everything(&Planner::new(&state, &table), want.next_multiple_of(state.align))
            .filter(|_| want <= state.len());
        let hybrid = plan(&state, Strategy::Hybrid, want, &table, &lazy).ok();
        prop_assert_eq!(hybrid.is_some(), all.is_some());
        if let (Some(hybrid), Some(all)) = (hybrid, all) {
            prop_assert_eq!(check(&state, &hybrid), Ok(()), "{:?}", hybrid);
            prop_assert!(
                hybrid.predicted.until_usable <= all.time(),
                "{:?}\n{:?}", hybrid, all
            );
        }
    }

    #[test]
    fn no_bound_is_above_what_it_bounds(
        scene in scenes(),
        table in prop_oneof![tables().prop_map(|t| (t, false)), wild_tables().prop_map(|t| (t, true))],
    ) {
        let ((state, want), (table, wild)) = (scene, table);
        let want = want.next_multiple_of(state.align);
        let planner = Planner::new(&state, &table);
        for span in planner.spans(want) {
            let inside: u64 = span.pieces().map(|i| state.pieces[i].len).sum();
            for mode in MODES {
                let none = planner.limit(Nanos(u64::MAX));
                let priced = planner.candidate(span, want, mode, &none, &mut Known::default());
                let Some(priced) = priced else { continue };
                let Some(found) = planner.window(&priced, want, mode) else { continue };
                // What is copied out of other granules too is guessed by a rule that wants order.
                if !wild || found.predicted.bytes_copied == inside {
                    prop_assert!(priced.least <= found.time(), "{:?}: {:?}", mode, found);
                    let limit = planner.limit(found.time());
                    let again = planner.candidate(span, want, mode, &limit, &mut Known::default());
                    prop_assert!(again.is_some(), "{:?}: {:?}", mode, found);
                }
            }
        }
        for interval in planner.intervals(want) {
            let least = planner.least_between(want);
            prop_assert!(least.is_some_and(|least| least <= interval.load.bytes()));
            let Some(found) = planner.slide_within(&interval, want) else { continue };
            prop_assert!(planner.least_slide(&interval.load) <= found.time(), "{:?}", found);
            let bound = planner.least_slide_of(least.unwrap());
            prop_assert!(bound <= found.time(), "{:?}: {:?}", bound, found);
        }
    }
}
