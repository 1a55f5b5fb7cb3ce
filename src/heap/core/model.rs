//! Random programs against a naive model: blocks must not overlap, must be aligned, must lie over granules that a
//! pretend device holds, and the books must pass their audit after every step.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::lane::Stats;
use super::{Block, Lane, PAGE_BYTES, Plan, Policy, Stale, UNIT};

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc { size: u64, align: u64 },
    Abandon { size: u64, align: u64 },
    Free(usize),
    Wrong(u64),
    Trim { bytes: u64, keep: bool },
    Unmap,
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        1..2_000u64,
        1..100_000u64,
        60_000..3_000_000u64,
        1_000_000..100_000_000u64
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let align = prop_oneof![3 => Just(256u64), 1 => (0..23u32).prop_map(|b| 1 << b)];
    prop_oneof![
        6 => (size(), align.clone()).prop_map(|(size, align)| Op::Alloc { size, align }),
        1 => (size(), align).prop_map(|(size, align)| Op::Abandon { size, align }),
        5 => any::<usize>().prop_map(Op::Free),
        1 => any::<u64>().prop_map(Op::Wrong),
        1 => (0..200_000_000u64, any::<bool>()).prop_map(|(bytes, keep)| Op::Trim { bytes, keep }),
        1 => Just(Op::Unmap),
    ]
}

/// Settings under which every rule has a say in heaps of some 100 MiB.
fn policy() -> impl Strategy<Value = Policy> {
    let limit = prop_oneof![Just(1u32), 4..64u32];
    let rest = (1..64u64, 1..8u64, 0..20u64, 0..40u32, 0..2_000u32, 2..64u32);
    (limit, 1..64u32, rest).prop_map(|(granules_of_limit, granules_of_peak, rest)| Policy {
        granule_max: 16 << 20,
        granule_min: 4 << 20,
        granules_of_limit,
        granules_of_peak,
        peak_unit: rest.0 << 21,
        granule_floor: rest.1 << 20,
        short_run: rest.2 << 20,
        crumbs: rest.3,
        spared: rest.4,
        granules_of_block: rest.5,
        ..Policy::default()
    })
}

/// What a device would know: which granule is mapped where, at which length.
struct World {
    lane: Lane,
    policy: Policy,
    limit: u64,
    live: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, (u64, u64)>,
    stale: Vec<Stale>,
    names: u64,
    /// The live peak since memory last left.
    peak: u64,
}

const BASE: u64 = 6 << 20;

impl World {
    fn new(limit: u64, policy: Policy) -> Self {
        let lane = Lane::new(policy, BASE, 1 << 30, 4 << 30).expect("a sound policy");
        Self {
            lane,
            policy,
            limit,
            live: BTreeMap::new(),
            mapped: BTreeMap::new(),
            stale: Vec::new(),
            names: 0,
            peak: 0,
        }
    }

    fn clear(&self, addr: u64, len: u64) -> bool {
        let before = self.mapped.range(..addr + len).next_back();
        before.is_none_or(|(&a, &(_, n))| a + n <= addr)
    }

    fn drive(&mut self, plan: &Plan) -> Vec<u64> {
        let mut new = Vec::new();
        for r in &plan.releases {
            assert_eq!(self.mapped.remove(&r.addr), Some((r.id, r.len)));
        }
        for f in &plan.fills {
            assert!(self.clear(f.addr, f.len), "mapped over a mapping");
            assert!(f.addr.is_multiple_of(PAGE_BYTES) && f.len.is_multiple_of(PAGE_BYTES));
            let id = if let Some((id, addr, _)) = f.old {
                assert_eq!(self.mapped.get(&addr), Some(&(id, f.len)));
                id
            } else {
                self.names += 1;
                new.push(self.names);
                self.names
            };
            self.mapped.insert(f.addr, (id, f.len));
        }
        new
    }

    fn alloc(&mut self, size: u64, align: u64, settle: bool) {
        let block = if let Some(b) = self.lane.alloc(size, align) {
            b
        } else {
            let before = self.lane.stats();
            let runs = self.runs();
            let Ok(plan) = self.lane.plan(
                size,
                align,
                self.limit,
                &mut (),
                &mut |id, _| id % 7 != 3,
                &[],
            ) else {
                assert_eq!(self.lane.stats(), before);
                return;
            };
            assert!(
                before.held + plan.created() - plan.releases.iter().map(|r| r.len).sum::<u64>()
                    <= self.limit
            );
            self.lane.audit().expect("audit of a plan under way");
            self.sized(size, &plan, &before);
            if !settle {
                self.lane.abandon(plan, 0, &mut ());
                assert_eq!(self.lane.stats(), before);
                return;
            }
            let mut ids = self.drive(&plan).into_iter();
            let created = plan.created();
            let moved: Vec<u64> = plan
                .fills
                .iter()
                .filter_map(|f| f.old.map(|o| o.1))
                .collect();
            let block = self.lane.commit(
                plan,
                &mut || ids.next().expect("a name"),
                &mut (),
                &mut self.stale,
            );
            self.spared(block, created, &moved, &runs, &before);
            block
        };
        assert!(block.len >= size && block.len < size + UNIT && block.addr.is_multiple_of(align));
        let before = self.live.range(..block.addr + block.len).next_back();
        assert!(before.is_none_or(|(&a, &n)| a + n <= block.addr), "overlap");
        self.live.insert(block.addr, block.len);
        assert_eq!(self.lane.block(block.addr), Some(block));
        self.peak = self.peak.max(self.lane.stats().live);
    }

    /// Free runs: address, bytes, and the bytes of granules wholly inside.
    fn runs(&self) -> Vec<(u64, u64, u64)> {
        let free = self.lane.pieces().into_iter().filter(|p| p.mark.is_none());
        let old = |a: u64| self.stale.iter().any(|s| s.addr == a);
        let run = free.map(|p| {
            let inside = self.mapped.range(p.addr..p.addr + p.len);
            let inside = inside.filter(|(a, m)| **a + m.1 <= p.addr + p.len && !old(**a));
            (p.addr, p.len, inside.map(|(_, m)| m.1).sum())
        });
        run.collect()
    }

    /// Granules are as short as the peak or the block, and the limit, ask.
    fn sized(&self, size: u64, plan: &Plan, before: &Stats) {
        let p = &self.policy;
        let peak = (before.live + size.next_multiple_of(UNIT)).max(self.peak);
        let share = u128::from(peak.next_multiple_of(PAGE_BYTES)).pow(2)
            / u128::from(p.peak_unit)
            / u128::from(p.granules_of_peak);
        let of_block = size.next_multiple_of(UNIT) / u64::from(p.granules_of_block);
        let share = share.max(u128::from(p.granule_floor.max(of_block).max(PAGE_BYTES)));
        let part = (self.limit / u64::from(p.granules_of_limit)).max(PAGE_BYTES);
        for f in plan.fills.iter().filter(|f| f.is_new()) {
            assert!(f.len <= p.granule_max && f.len <= part && u128::from(f.len) <= share);
        }
    }

    /// Short runs are broken only where the footprint would have passed its bound otherwise.
    fn spared(
        &self,
        block: Block,
        created: u64,
        moved: &[u64],
        runs: &[(u64, u64, u64)],
        before: &Stats,
    ) {
        let p = &self.policy;
        let mut broken = 0;
        for addr in moved {
            let run = runs.iter().find(|r| (r.0..r.0 + r.1).contains(addr));
            let &(at, len, whole) = run.expect("a granule comes from a free run");
            if at < block.addr + block.len && block.addr < at + len {
                // what the block left of the run is a run of its own
                return;
            }
            if len < p.short_run && (len - whole) * 100 > len * u64::from(p.crumbs) {
                broken += self.granule_len(*addr);
            }
        }
        let peak = (before.live + block.len).max(self.peak);
        let peak = peak.next_multiple_of(PAGE_BYTES);
        let pages = peak / PAGE_BYTES;
        let most = (pages + pages * u64::from(p.spared) / 10_000) * PAGE_BYTES;
        let room = most.min(self.limit).saturating_sub(before.held);
        assert!(broken == 0 || created + broken > room / PAGE_BYTES * PAGE_BYTES);
    }

    fn granule_len(&self, addr: u64) -> u64 {
        self.mapped.get(&addr).map_or(0, |m| m.1)
    }

    /// Every block lies over mappings, stale ones aside.
    fn covered(&self) {
        let old = |a: u64| self.stale.iter().any(|s| s.addr == a);
        for (&addr, &len) in &self.live {
            let mut at = addr;
            while at < addr + len {
                let (&a, &(_, n)) = self.mapped.range(..=at).next_back().expect("a mapping");
                assert!(at < a + n && !old(a), "a block over nothing");
                at = a + n;
            }
        }
    }

    fn trim(&mut self, bytes: u64, keep: bool) {
        for idle in self.lane.trim(bytes, &mut |_, _| true) {
            if keep {
                self.lane.kept(idle, &mut ());
            } else {
                assert_eq!(self.mapped.remove(&idle.addr), Some((idle.id, idle.len)));
                self.lane.dropped(idle);
                self.peak = self.lane.stats().live;
            }
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Alloc { size, align } => self.alloc(size, align, true),
            Op::Abandon { size, align } => self.alloc(size, align, false),
            Op::Free(i) if !self.live.is_empty() => {
                let (&addr, &len) = self.live.iter().nth(i % self.live.len()).expect("in range");
                // half of the hints are wrong
                let hint = if i % 2 == 0 {
                    self.lane.block(addr).map_or(0, |b| b.hint)
                } else {
                    i as u32
                };
                assert_eq!(
                    self.lane.free_hinted(addr, hint, &mut ()).map(|b| b.len),
                    Some(len)
                );
                assert_eq!(self.lane.free_hinted(addr, hint, &mut ()), None);
                assert_eq!(self.lane.free(addr, &mut ()), None);
                self.live.remove(&addr);
            }
            Op::Free(_) => {}
            Op::Wrong(x) => {
                let addr = if x % 2 == 0 { x } else { BASE + x % (5 << 30) };
                assert_eq!(
                    self.lane.block(addr).is_some(),
                    self.live.contains_key(&addr)
                );
                if let Some((&a, &n)) = self.live.range(..=addr).next_back()
                    && n > UNIT
                {
                    assert_eq!(self.lane.block(a + UNIT), None);
                    assert_eq!(self.lane.block(a + 1), None);
                }
            }
            Op::Trim { bytes, keep } => self.trim(bytes, keep),
            Op::Unmap => {
                for s in self.stale.drain(..) {
                    assert_eq!(self.mapped.remove(&s.addr), Some((s.id, s.len)));
                    self.lane.unmapped(s);
                }
            }
        }
        self.lane.audit().expect("audit");
        self.covered();
        let stats = self.lane.stats();
        assert_eq!(
            (stats.live, stats.blocks),
            (self.live.values().sum(), self.live.len() as u64)
        );
        let old: u64 = self.stale.iter().map(|s| s.len).sum();
        assert_eq!(
            stats.held + old,
            self.mapped.values().map(|m| m.1).sum::<u64>()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_keep_the_books_right(
        ops in prop::collection::vec(op(), 1..160),
        limit in prop_oneof![Just(u64::MAX), (8..300u64).prop_map(|m| m << 20)],
        policy in policy(),
    ) {
        let mut world = World::new(limit, policy);
        for op in ops {
            world.step(op);
        }
        for addr in std::mem::take(&mut world.live).into_keys() {
            prop_assert!(world.lane.free(addr, &mut ()).is_some());
        }
        world.step(Op::Unmap);
        world.trim(u64::MAX, false);
        prop_assert_eq!(world.lane.held(), 0);
        prop_assert!(world.lane.audit().is_ok());
    }
}

/// A lane of blocks with short holes between, each over granules of 4 MiB.
fn holed(policy: Policy) -> World {
    let mut world = World::new(u64::MAX, policy);
    // each hole of 5 MiB has one granule of 4 MiB in it, at most
    let block = |world: &mut World, mib: u64| {
        let known: Vec<u64> = world.live.keys().copied().collect();
        world.alloc(mib << 20, 256, true);
        let new = world.live.keys().find(|a| !known.contains(a));
        *new.expect("a block")
    };
    let mut holes = Vec::new();
    for _ in 0..20 {
        holes.push(block(&mut world, 5));
        block(&mut world, 9);
    }
    for addr in holes {
        world.lane.free(addr, &mut ());
        world.live.remove(&addr);
    }
    world
}

fn grained(spared: u32) -> Policy {
    Policy {
        granule_max: 4 << 20,
        granule_min: 4 << 20,
        spared,
        ..Policy::default()
    }
}

#[test]
fn short_holes_stay_whole_while_memory_may_be_created() {
    let big = 30 << 20;
    for (spared, stays) in [(10_000, true), (0, false)] {
        let mut world = holed(grained(spared));
        let before = world.lane.stats();
        assert!(before.idle >= big, "{before:?}");
        world.alloc(big, 256, true);
        let made = world.lane.stats().held - before.held;
        assert_eq!(made >= big, stays, "{made} created");
        assert_eq!(world.stale.is_empty(), stays);
    }
}

#[test]
fn a_small_block_pins_no_long_granule() {
    let mut world = World::new(u64::MAX, Policy::default());
    world.alloc(100 << 20, 256, true);
    let (&addr, _) = world.live.iter().next().expect("a block");
    world.lane.free(addr, &mut ());
    world.live.clear();
    world.alloc(1000, 256, true);
    let small = world.mapped.values().map(|m| m.1).min();
    assert_eq!(small, Some(PAGE_BYTES));
    assert_eq!(world.lane.stats().idle, world.lane.held() - PAGE_BYTES);
}

#[test]
fn what_was_needed_before_memory_left_is_no_measure() {
    let policy = Policy {
        peak_unit: 1 << 30,
        granule_floor: 4 << 20,
        ..Policy::default()
    };
    let job = |world: &mut World, count: usize| {
        for _ in 0..count {
            world.alloc(50 << 20, 256, true);
        }
        let mut lens: Vec<u64> = world.mapped.values().map(|m| m.1).collect();
        lens.sort_unstable();
        lens
    };
    let mut fresh = World::new(u64::MAX, policy);
    let small = job(&mut fresh, 10);
    for leaves in [true, false] {
        let mut used = World::new(u64::MAX, policy);
        assert!(job(&mut used, 70).last() > small.last());
        let all: Vec<u64> = used.live.keys().copied().collect();
        for addr in all {
            used.lane.free(addr, &mut ());
        }
        used.live.clear();
        if leaves {
            used.trim(u64::MAX, false);
        }
        assert_eq!(job(&mut used, 10) == small, leaves);
        assert_eq!(used.lane.stats().live_peak, 70 * (50 << 20));
    }
}
