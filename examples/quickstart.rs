//! A tensor grows in place to several GiB and shrinks again, its data checked on the device after
//! every step; then another tensor takes over the memory.
//!
//! ```text
//! cargo run --release --example quickstart
//! GRANULE_DRIVER=cuda cargo run --release --example quickstart
//! ```

mod support;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use granule::driver::DriverKind;
use granule::units::{Bytes, GIB, KIB, MIB, VaRange};
use granule::{Pool, PoolConfig, Tensor};
use support::{Checker, Outcome, affordable, exit_with, open, progress, say, show};

/// Elements of one row: 64 KiB of `f32`.
const ROW: [u64; 2] = [128, 128];
const ROW_BYTES: u64 = 64 * KIB;

fn main() -> ExitCode {
    exit_with(run)
}

fn run() -> Outcome {
    let device = open()?;
    // Checking all of it after every step is quadratic, so host memory takes fewer steps.
    let steps = if device.kind() == DriverKind::Cuda {
        8
    } else {
        4
    };
    let most = affordable(&device, 8 * GIB, 2 * GIB, 2, steps * 2 * MIB)?;
    // A power of two, so that each step is one granule, which the next owner can use as it is.
    let step = 1 << (most / steps).ilog2();
    let goal = steps * step;
    let before = device.memory_info()?.free;

    let stream = device.create_stream()?;
    let checker = Checker::new(&stream)?;
    // Everything given back is kept for the next taker; by default only an eighth of the budget is.
    let pool = Pool::new(
        &device,
        PoolConfig {
            watermark: Some(u64::MAX),
            ..PoolConfig::with_budget(goal)
        },
    )?;
    let mut tensor = Tensor::<f32>::new(&pool, &ROW, goal / ROW_BYTES)?;
    let address = tensor.ptr();

    println!("\n| step               | call time | mapped   | checked on the device |");
    println!("|--------------------|-----------|----------|-----------------------|");
    let bar = progress("growing", steps);
    for i in 1..=steps {
        let started = Instant::now();
        tensor.grow_on(i * step / ROW_BYTES, &stream)?;
        let time = started.elapsed();
        // Each step's rows get a pattern of their own; then everything grown so far is compared.
        checker.write(rows(&tensor, step, i - 1)?, i)?;
        check(&tensor, &checker, step, i)?;
        ensure!(tensor.ptr() == address, "the tensor moved");
        row(&bar, &format!("grow to {}", Bytes(i * step)), time, &tensor);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let stats = pool.stats();
    ensure!(stats.mapped == goal, "mapped {} for {goal}", stats.mapped);

    // Shrinking waits for the work on the tail only and hands whole granules to the pool.
    let keep = steps / 4;
    let started = Instant::now();
    tensor.shrink(keep * step / ROW_BYTES)?;
    let time = started.elapsed();
    check(&tensor, &checker, step, keep)?;
    row(
        &bar,
        &format!("shrink to {}", Bytes(keep * step)),
        time,
        &tensor,
    );

    // What the first tensor gave back becomes another's, without a driver create.
    let creates = pool.stats().creates;
    let idle = pool.stats().idle;
    let heir = Tensor::<u64>::new(&pool, &[], goal / 8)?;
    let started = Instant::now();
    heir.grow_on(idle / 8, &stream)?;
    let time = started.elapsed();
    checker.write(heir.view().range(), 99)?;
    checker.check(heir.view().range(), 99)?;
    check(&tensor, &checker, step, keep)?;
    row(&bar, &format!("heir gets {}", Bytes(idle)), time, &heir);
    let after = pool.stats();
    ensure!(after.creates == creates, "the heir needed driver creates");
    ensure!(after.created <= goal, "more memory than the budget");

    let started = Instant::now();
    let address_of_heir = heir.ptr();
    heir.close().map_err(|(_, error)| error)?;
    tensor.close().map_err(|(_, error)| error)?;
    pool.trim(0)?;
    let time = started.elapsed();
    let end = pool.audit()?;
    ensure!(
        end.created == 0,
        "{} were not given back",
        Bytes(end.created)
    );
    ensure!(device.quarantined() == 0, "the driver refused something");

    println!("everything given back in {}", show(time));
    println!(
        "\nThe tensor stayed at {address} while it grew from 0 to {}, without a copy.",
        Bytes(goal)
    );
    println!(
        "Its heir at {address_of_heir} got {} of recycled memory: {} creates before, {} after.",
        Bytes(idle),
        creates,
        after.creates
    );
    println!(
        "Peak {}; granules created {}, recycled {}, released {}; free on the device {} before, {} now.",
        Bytes(end.peak_created),
        end.creates,
        end.recycled,
        end.releases,
        Bytes(before),
        Bytes(device.memory_info()?.free)
    );
    println!("All checks passed.");
    Ok(())
}

/// The addresses of the rows added by step `i`.
fn rows(tensor: &Tensor<f32>, step: u64, i: u64) -> Outcome<VaRange> {
    let first = i * step / ROW_BYTES;
    Ok(tensor.rows_view(first..first + step / ROW_BYTES)?.range())
}

/// Compares the rows of the first `steps` steps with what was written to them.
fn check(tensor: &Tensor<f32>, checker: &Checker, step: u64, steps: u64) -> Outcome {
    for i in 0..steps {
        checker.check(rows(tensor, step, i)?, i + 1)?;
    }
    let wrong = checker.mismatches()?;
    ensure!(wrong == 0, "{wrong} words differ after {steps} steps");
    Ok(())
}

fn row<T: bytemuck::Pod>(
    bar: &indicatif::ProgressBar,
    what: &str,
    time: Duration,
    tensor: &Tensor<T>,
) {
    let mapped = Bytes(tensor.arena().mapped()).to_string();
    let checked = Bytes(tensor.arena().len()).to_string();
    let time = show(time);
    say(
        bar,
        &format!("| {what:<18} | {time:>9} | {mapped:>8} | {checked:>18} ok |"),
    );
}
