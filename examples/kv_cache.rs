//! K and V of several layers for many sequences that come and go under one memory budget.
//!
//! Every sequence has two tensors a layer, one row a token. All of them grow in one transaction: all
//! or none. When the budget is spent, the youngest sequence is evicted and queued again, as serving
//! engines do. The data of every live sequence is checked on the device in every round.
//!
//! ```text
//! cargo run --release --example kv_cache [-- --requests 32]
//! ```

mod support;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use granule::driver::record::RecordDriver;
use granule::driver::{Call, DriverKind};
use granule::units::{Bytes, GIB, MIB};
use granule::{Arena, Device, Error, Pool, PoolConfig, Stream, Tensor};
use support::{Checker, Outcome, affordable, exit_with, open, option, progress, say, show};

const LAYERS: usize = 6;
/// Heads and elements of a head: 2 KiB a token in 16-bit elements.
const ROW: [u64; 2] = [8, 128];
/// Tokens a sequence may have at most. Only addresses are reserved for them.
const MAX_TOKENS: u64 = 32 * 1024;
/// Tokens a live sequence gets in one round.
const TOKENS_PER_ROUND: u64 = 700;
const MAX_LIVE: usize = 12;

/// What somebody asked for.
#[derive(Clone, Copy)]
struct Request {
    id: u64,
    tokens: u64,
}

/// A request that is being served.
struct Sequence {
    request: Request,
    /// K and V of layer 0, K and V of layer 1, and so on.
    caches: Vec<Tensor<u16>>,
    /// Rows after each round, from 0 on: each round's rows hold a pattern of their own.
    rounds: Vec<u64>,
    stream: Stream,
    checker: Checker,
}

impl Sequence {
    fn new(pool: &Pool, request: Request) -> Outcome<Self> {
        let stream = pool.device().create_stream()?;
        let caches = (0..2 * LAYERS)
            .map(|_| Tensor::new(pool, &ROW, MAX_TOKENS))
            .collect::<Result<_, Error>>()?;
        Ok(Self {
            request,
            caches,
            rounds: vec![0],
            checker: Checker::new(&stream)?,
            stream,
        })
    }

    fn tokens(&self) -> u64 {
        self.rounds.last().copied().unwrap_or(0)
    }

    fn is_done(&self) -> bool {
        self.tokens() >= self.request.tokens
    }

    /// Makes room for the next tokens in every cache, or in none.
    fn grow(&self) -> Result<u64, Error> {
        let to = (self.tokens() + TOKENS_PER_ROUND).min(self.request.tokens);
        let wishes: Vec<(&Arena, u64)> = self
            .caches
            .iter()
            .map(|cache| (cache.arena(), to * cache.row_bytes()))
            .collect();
        Arena::grow_all_on(&wishes, &self.stream)?;
        Ok(to)
    }

    /// Writes the K and V of the tokens up to `to`: here a pattern, in an engine a kernel's output.
    fn write(&mut self, to: u64) -> Outcome {
        let from = self.tokens();
        let round = self.rounds.len();
        for (i, cache) in self.caches.iter().enumerate() {
            let rows = cache.rows_view(from..to)?.range();
            self.checker.write(rows, self.seed(i, round))?;
        }
        self.rounds.push(to);
        Ok(())
    }

    /// Queues a check of every row written so far.
    fn check(&self) -> Outcome {
        for (i, cache) in self.caches.iter().enumerate() {
            for (round, ends) in (1..).zip(self.rounds.windows(2)) {
                let rows = cache.rows_view(ends[0]..ends[1])?.range();
                self.checker.check(rows, self.seed(i, round))?;
            }
        }
        Ok(())
    }

    fn seed(&self, cache: usize, round: usize) -> u64 {
        self.request.id << 32 | (cache as u64) << 16 | round as u64
    }

    fn live_bytes(&self) -> u64 {
        self.caches.iter().map(|cache| cache.arena().len()).sum()
    }

    fn close(self) -> Outcome {
        for cache in self.caches {
            cache.close().map_err(|(_, error)| error)?;
        }
        Ok(())
    }
}

/// What happened in all.
#[derive(Default)]
struct Tally {
    rounds: u64,
    evictions: u64,
    growths: u64,
    growing: Duration,
    checked: u64,
    most_live: usize,
    /// Live bytes when most was mapped.
    live_at_peak: u64,
    mapped_at_peak: u64,
}

fn main() -> ExitCode {
    exit_with(run)
}

fn run() -> Outcome {
    let bare = open()?;
    let counted = Arc::new(RecordDriver::new(bare.driver().clone()));
    let device = Device::from_driver(counted.clone());
    let budget = affordable(&device, 2 * GIB, 384 * MIB, 2, 2 * MIB)?;
    ensure!(
        budget >= 256 * MIB,
        "a budget of {} is too small to show anything",
        Bytes(budget)
    );
    let default_requests = if device.kind() == DriverKind::Cuda {
        64
    } else {
        16
    };
    let requests = match option("--requests")? {
        Some(text) => text.parse()?,
        None => default_requests,
    };
    let pool = Pool::new(
        &device,
        PoolConfig {
            // What one sequence gives back stays here for the next.
            watermark: Some(u64::MAX),
            ..PoolConfig::with_budget(budget).granule(32 * MIB)
        },
    )?;
    // No request alone is larger than a half of the budget; most are far smaller.
    let bytes_per_token = 2 * LAYERS as u64 * ROW[0] * ROW[1] * 2;
    let bytes_per_round = bytes_per_token * TOKENS_PER_ROUND;
    let longest = (budget / 2 / bytes_per_token).min(MAX_TOKENS);
    let mut queue: VecDeque<Request> = (0..requests)
        .map(|id| Request {
            id,
            tokens: longest / 8 + (id * 2_654_435_761 % 1009) * (longest * 7 / 8) / 1009,
        })
        .collect();
    println!(
        "{requests} requests of {} to {longest} tokens, {LAYERS} layers, {} a token, budget {}\n",
        longest / 8,
        Bytes(bytes_per_token),
        Bytes(budget)
    );

    let mut live: Vec<Sequence> = Vec::new();
    let mut tally = Tally::default();
    let bar = progress("serving", requests);
    let mut crowded = false;
    let started = Instant::now();
    while !queue.is_empty() || !live.is_empty() {
        tally.rounds += 1;
        // Nobody is admitted into the last quarter of the budget, which the live ones will want, or
        // after an eviction until somebody is done.
        let mut room = budget - pool.stats().mapped;
        while !crowded
            && live.len() < MAX_LIVE
            && room >= bytes_per_round + budget / 4
            && let Some(request) = queue.pop_front()
        {
            live.push(Sequence::new(&pool, request)?);
            room -= bytes_per_round;
        }
        let evicted = tally.evictions;
        grow_everybody(&mut live, &mut queue, &mut tally, &bar)?;
        crowded |= tally.evictions > evicted;
        check_everybody(&live, &mut tally)?;
        note_peak(&pool, &live, &mut tally);

        let (done, rest): (Vec<_>, Vec<_>) = live.into_iter().partition(Sequence::is_done);
        live = rest;
        crowded &= done.is_empty() && !live.is_empty();
        for sequence in done {
            say(
                &bar,
                &format!(
                    "round {:>3}: sequence {:>2} done with {:>5} tokens; {} live, {} mapped",
                    tally.rounds,
                    sequence.request.id,
                    sequence.tokens(),
                    live.len(),
                    Bytes(pool.stats().mapped)
                ),
            );
            sequence.close()?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let served = started.elapsed();
    ensure!(
        requests < default_requests || tally.evictions > 0,
        "memory never ran out, so nothing was shown"
    );
    report(&pool, &counted, &tally, budget, served)?;

    pool.trim(0)?;
    let end = pool.audit()?;
    ensure!(
        end.created == 0,
        "{} were not given back",
        Bytes(end.created)
    );
    println!("All checks passed.");
    Ok(())
}

/// One round's growth of every live sequence, oldest first. Evicts the youngest when out of memory.
fn grow_everybody(
    live: &mut Vec<Sequence>,
    queue: &mut VecDeque<Request>,
    tally: &mut Tally,
    bar: &indicatif::ProgressBar,
) -> Outcome {
    let mut next = 0;
    while next < live.len() {
        let started = Instant::now();
        let grown = live[next].grow();
        tally.growing += started.elapsed();
        match grown {
            Ok(to) => {
                tally.growths += 1;
                live[next].write(to)?;
                next += 1;
            }
            Err(Error::OutOfMemory(why)) => {
                ensure!(live.len() > 1, "one sequence alone does not fit: {why}");
                let Some(youngest) = live.pop() else { break };
                tally.evictions += 1;
                say(
                    bar,
                    &format!(
                        "round {:>3}: out of memory, {} missing of {}: sequence {} evicted",
                        tally.rounds,
                        Bytes(why.missing),
                        Bytes(why.requested),
                        youngest.request.id
                    ),
                );
                queue.push_front(youngest.request);
                // Nothing of the refused growth happened; the retry finds what this gives back.
                youngest.close()?;
            }
            Err(other) => return Err(other.into()),
        }
    }
    Ok(())
}

fn check_everybody(live: &[Sequence], tally: &mut Tally) -> Outcome {
    for sequence in live {
        sequence.check()?;
        tally.checked += sequence.live_bytes();
    }
    for sequence in live {
        let wrong = sequence.checker.mismatches()?;
        ensure!(
            wrong == 0,
            "sequence {}: {wrong} words differ",
            sequence.request.id
        );
    }
    Ok(())
}

fn note_peak(pool: &Pool, live: &[Sequence], tally: &mut Tally) {
    let mapped = pool.stats().mapped;
    tally.most_live = tally.most_live.max(live.len());
    if mapped > tally.mapped_at_peak {
        tally.mapped_at_peak = mapped;
        tally.live_at_peak = live.iter().map(Sequence::live_bytes).sum();
    }
}

fn report(
    pool: &Pool,
    counted: &RecordDriver,
    tally: &Tally,
    budget: u64,
    served: Duration,
) -> Outcome {
    let stats = pool.stats();
    let counts = counted.snapshot();
    let copies = counts.of(Call::Copy).calls;
    let waste = 1.0 - tally.live_at_peak as f64 / tally.mapped_at_peak.max(1) as f64;
    println!("\n| served in                 | {:>12} |", show(served));
    println!("|---------------------------|--------------|");
    println!("| rounds                    | {:>12} |", tally.rounds);
    println!("| most sequences at once    | {:>12} |", tally.most_live);
    println!("| evictions                 | {:>12} |", tally.evictions);
    println!(
        "| growths, {:>3} caches each  | {:>12} |",
        2 * LAYERS,
        tally.growths
    );
    println!(
        "| mean time of a growth     | {:>12} |",
        show(tally.growing / u32::try_from(tally.growths.max(1))?)
    );
    println!(
        "| checked on the device     | {:>12} |",
        Bytes(tally.checked).to_string()
    );
    println!(
        "| budget                    | {:>12} |",
        Bytes(budget).to_string()
    );
    println!(
        "| peak memory               | {:>12} |",
        Bytes(stats.peak_created).to_string()
    );
    println!("| waste when most is mapped | {:>10.1} % |", waste * 100.0);
    println!("| granules created          | {:>12} |", stats.creates);
    println!("| granules recycled         | {:>12} |", stats.recycled);
    println!("| copies on the device      | {copies:>12} |");
    ensure!(copies == 0, "{copies} copies on the device");
    ensure!(stats.peak_created <= budget, "the budget was passed");
    ensure!(
        tally.evictions == 0 || stats.peak_created >= budget / 8 * 7,
        "out of memory with {} of {} created",
        Bytes(stats.peak_created),
        Bytes(budget)
    );
    ensure!(stats.is_consistent(), "the books do not add up: {stats:?}");
    Ok(())
}
