//! Settings that fit a trace, or a model's sizes, each with the figures that it follows from.

use std::collections::HashMap;

use granule::driver::DriverKind;
use granule::driver::sim::CostTable;
use granule::trace::{EventKind, Trace};
use granule::units::{Bytes, GIB, MIB, round_up};
use granule::{HeapConfig, Policy, PoolConfig, Rounding};

use crate::args::{Args, Model};
use crate::core::{self, Outcome, Rig, Run, Setup, Unwatched};
use crate::json::{Object, list};
use crate::report::emit;

/// Everything is a multiple of this.
const UNIT: u64 = 256;
/// Pieces of physical memory are multiples of this.
const PAGE: u64 = 2 * MIB;

/// A rule for sizes, and what it does to a trace.
struct Rule {
    rounding: Rounding,
    /// Part of the allocations for whose rounded size a freed block of that very size was there.
    same_size: f64,
    /// Bytes asked for and lost to rounding, over all allocations.
    waste: f64,
    /// The same at the moment when most is live.
    waste_at_peak: f64,
    run: Run,
}

fn rounding_name(rounding: Rounding) -> String {
    match rounding {
        Rounding::Exact => "exact".to_owned(),
        Rounding::PowerOfTwo => "power2".to_owned(),
        Rounding::Divisions(n) => format!("divisions:{n}"),
    }
}

fn rounded(rounding: Rounding, bytes: u64) -> u64 {
    let rounded = rounding.round(bytes).unwrap_or(bytes);
    round_up(rounded, UNIT).unwrap_or(rounded)
}

impl Rule {
    fn of(args: &Args, trace: &Trace, rounding: Rounding) -> Outcome<Self> {
        let (mut asked, mut taken, mut hits, mut allocs) = (0u128, 0u128, 0u64, 0u64);
        let (mut live, mut live_taken, mut peak, mut waste_at_peak) = (0u64, 0u64, 0u64, 0.0);
        let mut sizes = vec![(0, 0); trace.slots as usize];
        let mut free: HashMap<u64, u64> = HashMap::new();
        for event in &trace.events {
            match event.kind {
                EventKind::Alloc { slot, bytes, .. } => {
                    let size = rounded(rounding, bytes);
                    sizes[slot as usize] = (bytes, size);
                    allocs += 1;
                    asked += u128::from(bytes);
                    taken += u128::from(size);
                    if let Some(count) = free.get_mut(&size).filter(|count| **count > 0) {
                        *count -= 1;
                        hits += 1;
                    }
                    live += bytes;
                    live_taken += size;
                    if live > peak {
                        peak = live;
                        waste_at_peak = live_taken as f64 / live as f64 - 1.0;
                    }
                }
                EventKind::Free { slot, .. } => {
                    let (bytes, size) = sizes[slot as usize];
                    live -= bytes;
                    live_taken -= size;
                    *free.entry(size).or_insert(0) += 1;
                }
                _ => {}
            }
        }
        let setup = Setup {
            heap: HeapConfig {
                rounding,
                ..args.setup.heap.clone()
            },
            ..args.setup.clone()
        };
        Ok(Self {
            rounding,
            same_size: hits as f64 / allocs.max(1) as f64,
            waste: taken as f64 / (asked as f64).max(1.0) - 1.0,
            waste_at_peak,
            run: on_sim(args, trace, &setup, None)?,
        })
    }

    fn avoided(&self) -> f64 {
        self.run.stats.hits as f64 / self.run.stats.allocs.max(1) as f64
    }
}

/// A run on a simulated device with room for whatever a setting wastes.
fn on_sim(args: &Args, trace: &Trace, setup: &Setup, budget: Option<u64>) -> Outcome<Run> {
    let room = trace.peak.saturating_mul(3).max(4 * GIB);
    let rig = Rig::open(DriverKind::Sim, Some(args.memory.unwrap_or(room).max(room)))?;
    core::run(&rig, trace, setup, budget, &mut Unwatched)
}

/// What is tried for the elastic part.
struct Granule {
    most: u64,
    run: Run,
}

/// What is tried for the static part.
struct Base {
    bytes: u64,
    run: Run,
}

fn ratio(trace: &Trace, bytes: u64) -> f64 {
    bytes as f64 / trace.peak.max(1) as f64
}

fn millis(run: &Run) -> f64 {
    run.driver.as_secs_f64() * 1e3
}

/// Of runs with the footprint that is least, within a hundredth of the peak, the one that costs least.
fn cheapest<'a, T>(trace: &Trace, all: &'a [T], run: fn(&T) -> &Run) -> Option<&'a T> {
    let least = all.iter().map(|one| run(one).reserved).min()?;
    let close = least.saturating_add(trace.peak / 100);
    let near = all.iter().filter(|one| run(one).reserved <= close);
    near.min_by_key(|one| run(one).driver)
}

/// What was tried for a trace, and what of it fits best.
struct Advice<'a> {
    trace: &'a Trace,
    rules: Vec<Rule>,
    rounding: Rounding,
    granules: Vec<Granule>,
    /// The largest granule.
    granule: u64,
    least: u64,
    budget: u64,
    usual: u64,
    /// Without a static base, and with the one tried.
    bases: [Base; 2],
    base: u64,
}

/// Settings for a trace.
pub fn for_trace(args: &Args, name: &str, trace: &Trace) -> Outcome {
    let advice = Advice::of(args, trace)?;
    if args.json.is_some() {
        return emit(args, &advice.json(args, name).end());
    }
    advice.print(name);
    Ok(())
}

impl<'a> Advice<'a> {
    fn of(args: &Args, trace: &'a Trace) -> Outcome<Self> {
        let rules = [
            Rounding::Exact,
            Rounding::Divisions(16),
            Rounding::Divisions(8),
            Rounding::Divisions(4),
            Rounding::Divisions(2),
            Rounding::PowerOfTwo,
        ];
        let rules: Vec<Rule> = rules
            .into_iter()
            .map(|rounding| Rule::of(args, trace, rounding))
            .collect::<Outcome<_>>()?;
        let rule = cheapest(trace, &rules, |rule| &rule.run).ok_or("no rule")?;
        let rounding = rule.rounding;

        let with_granule = |most: u64| Setup {
            heap: HeapConfig {
                rounding,
                granule_max: most,
                granule_min: (most / 2).max(PAGE),
                ..args.setup.heap.clone()
            },
            ..args.setup.clone()
        };
        let granules: Vec<Granule> = [16, 32, 64, 128, 256]
            .into_iter()
            .map(|most| {
                let most = most * MIB;
                let run = on_sim(args, trace, &with_granule(most), None)?;
                Ok(Granule { most, run })
            })
            .collect::<Outcome<_>>()?;
        let granule = cheapest(trace, &granules, |one| &one.run).ok_or("no granule")?;
        let granule = granule.most;

        let rig = Rig::open(DriverKind::Sim, args.memory)?;
        let chosen = with_granule(granule);
        let enough = on_sim(args, trace, &chosen, None)?;
        let least = core::least_budget(&rig, trace, &chosen, &enough, |_, _| {})?.0;
        let budget = whole((least as f64 * 1.02) as u64, PAGE);

        // What is live for most of the time is worth having from the start.
        let usual = usual(trace);
        let margin = 1.0 + args.margin / 100.0;
        let candidate = whole((usual as f64 * margin) as u64, granule);
        let candidate = candidate.min(budget / granule * granule);
        let try_base = |bytes: u64| -> Outcome<Base> {
            let setup = Setup {
                pool: PoolConfig {
                    policy: Policy::Hybrid { base: bytes },
                    granule,
                    largest_granule: granule,
                    ..chosen.pool.clone()
                },
                ..chosen.clone()
            };
            let run = on_sim(args, trace, &setup, Some(budget))?;
            Ok(Base { bytes, run })
        };
        let bases = [try_base(0)?, try_base(candidate)?];
        let fit = bases.iter().filter(|base| base.run.oom.is_none());
        let base = fit.min_by_key(|base| base.run.driver);
        let base = base.ok_or("no base fits")?.bytes;
        Ok(Self {
            trace,
            rules,
            rounding,
            granules,
            granule,
            least,
            budget,
            usual,
            bases,
            base,
        })
    }

    /// Half of the largest granule.
    fn granule_min(&self) -> u64 {
        (self.granule / 2).max(PAGE)
    }

    fn json(&self, args: &Args, name: &str) -> Object {
        let trace = self.trace;
        let rules = self.rules.iter().map(|rule| {
            Object::new()
                .text("rounding", &rounding_name(rule.rounding))
                .float("same_size_hit_rate", rule.same_size, 5)
                .float("waste", rule.waste, 5)
                .float("waste_at_peak", rule.waste_at_peak, 5)
                .float("driver_calls_avoided", rule.avoided(), 6)
                .raw("misses", rule.run.stats.misses)
                .float("reserved_ratio", ratio(trace, rule.run.reserved), 5)
                .float("driver_us", millis(&rule.run) * 1e3, 1)
                .end()
        });
        Object::new()
            .text("trace", name)
            .raw("device", trace.device)
            .text("rounding", &rounding_name(self.rounding))
            .raw("granule_max", self.granule)
            .raw("granule_min", self.granule_min())
            .raw("static_base", self.base)
            .raw("static_base_tried", self.bases[1].bytes)
            .float("margin", args.margin, 1)
            .raw("budget", self.budget)
            .raw("least_budget", self.least)
            .raw("peak_requested", trace.peak)
            .raw("usual_live", self.usual)
            .raw("rules", list(rules))
    }

    fn print(&self, name: &str) {
        let trace = self.trace;
        println!("## {name}\n");
        println!(
            "| rounding | freed block of the same size was there | lost to rounding | at the peak | no driver call | reserved / peak | driver ms |"
        );
        println!("|---|---|---|---|---|---|---|");
        for rule in &self.rules {
            println!(
                "| {} | {:.2} % | {:.2} % | {:.2} % | {:.3} % | {:.4} | {:.2} |",
                rounding_name(rule.rounding),
                100.0 * rule.same_size,
                100.0 * rule.waste,
                100.0 * rule.waste_at_peak,
                100.0 * rule.avoided(),
                ratio(trace, rule.run.reserved),
                millis(&rule.run)
            );
        }
        println!("\n| largest granule | reserved / peak | driver ms |\n|---|---|---|");
        for one in &self.granules {
            let reserved = ratio(trace, one.run.reserved);
            println!(
                "| {} | {reserved:.4} | {:.2} |",
                Bytes(one.most),
                millis(&one.run)
            );
        }
        println!("\n| static base | under the budget | driver ms after the start |\n|---|---|---|");
        for one in &self.bases {
            let fits = if one.run.oom.is_none() {
                "completes"
            } else {
                "out of memory"
            };
            println!(
                "| {} | {fits} | {:.2} |",
                Bytes(one.bytes),
                millis(&one.run)
            );
        }
        println!(
            "\nrounding {}, granule_max {}, granule_min {}, static base {}, budget {} (least that completes: {}, {:.4} of the peak)\n",
            rounding_name(self.rounding),
            Bytes(self.granule),
            Bytes(self.granule_min()),
            Bytes(self.base),
            Bytes(self.budget),
            Bytes(self.least),
            ratio(trace, self.least)
        );
    }
}

fn whole(bytes: u64, unit: u64) -> u64 {
    round_up(bytes, unit).unwrap_or(bytes)
}

/// Bytes that are live or more at half of all events.
fn usual(trace: &Trace) -> u64 {
    let mut sizes = vec![0; trace.slots as usize];
    let mut live = 0u64;
    let mut all: Vec<u64> = Vec::with_capacity(trace.events.len());
    for event in &trace.events {
        match event.kind {
            EventKind::Alloc { slot, bytes, .. } => {
                sizes[slot as usize] = bytes;
                live += bytes;
            }
            EventKind::Free { slot, .. } => live -= sizes[slot as usize],
            _ => {}
        }
        all.push(live);
    }
    let middle = all.len() / 2;
    match all.is_empty() {
        true => 0,
        false => *all.select_nth_unstable(middle).1,
    }
}

/// Settings for a model. What is always there is static; the KV cache grows in arenas.
pub fn for_model(args: &Args, model: &Model) -> Outcome {
    if !(0.0..=100.0).contains(&args.margin) {
        return Err(format!("a margin of {} % is not between 0 and 100", args.margin).into());
    }
    let margin = 1.0 + args.margin / 100.0;
    let sum = model.parameters.checked_add(model.activations);
    let sum = sum.ok_or("parameters and activations pass 2^64")?;
    let cache = model.kv.checked_mul(model.tokens);
    let cache = cache.ok_or("kv times tokens passes 2^64")?;
    let sequences = model.sequences.max(1);
    let each = cache / sequences;
    // An arena of a sequence wastes half a granule on average: at most a sixteenth of it so.
    let most = (each / 8).max(PAGE);
    let granule = (1u64 << most.ilog2()).clamp(PAGE, 256 * MIB);
    let base = whole((sum as f64 * margin) as u64, granule);
    // Half a granule more for each sequence than its tokens take.
    let elastic = whole(
        cache.saturating_add(sequences.saturating_mul(granule / 2)),
        granule,
    );
    let budget = base.checked_add(elastic).ok_or("the budget passes 2^64")?;
    let cost = CostTable::default();
    let a_granule = cost.create(granule) + cost.map(granule) + cost.set_access(granule);
    let growths = elastic / granule;
    let tokens = (granule / model.kv.max(1)).max(1);
    let micros = a_granule.0 as f64 / 1e3;
    if args.json.is_some() {
        let line = Object::new()
            .text("what", "model")
            .raw("static_base", base)
            .raw("granule", granule)
            .raw("elastic", elastic)
            .raw("budget", budget)
            .float("margin", args.margin, 1)
            .text("rounding", "exact")
            .raw("granules", growths)
            .raw("tokens_per_granule", tokens)
            .float("growth_us", micros, 1);
        return emit(args, &line.end());
    }
    println!("| setting | value | why |\n|---|---|---|");
    println!(
        "| policy | hybrid, static base {} | parameters and activations, and {} % more |",
        Bytes(base),
        args.margin
    );
    println!(
        "| granule, largest granule | {} | {} of cache a sequence, of which half a granule is wasted on average |",
        Bytes(granule),
        Bytes(each)
    );
    println!(
        "| budget | {} | the base, {} of cache for {} tokens, half a granule a sequence |",
        Bytes(budget),
        Bytes(cache),
        model.tokens
    );
    println!(
        "| rounding | exact | a heap joins what is freed: rounding only wastes; see --advice with a trace |"
    );
    println!(
        "| look-ahead | {} | one growth in {tokens} tokens takes {micros:.0} us (modelled), {growths} in all |",
        Bytes(granule)
    );
    if let Some(memory) = args.memory.filter(|memory| *memory < budget) {
        println!("\nThat is more than the {} of the device.", Bytes(memory));
    }
    Ok(())
}
