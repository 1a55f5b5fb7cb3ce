//! Matrices in growable tensors and heap blocks, multiplied by cuBLAS through cudarc.
//!
//! The left matrix gets more rows from round to round, in place; every product is checked on the host.
//!
//! ```sh
//! cargo run --release --example cublas --features cudarc,cudarc/cublas
//! ```
//!
//! Needs libcublas where the loader finds it. With PyTorch's packages, for example:
//!
//! ```sh
//! export LD_LIBRARY_PATH=$(python3 -c 'import nvidia, glob; print(":".join(glob.glob(list(nvidia.__path__)[0] + "/*/lib")))')
//! ```

#[allow(unused_macros)]
mod support;

use std::process::ExitCode;
use std::time::Instant;

use cudarc::cublas::{CudaBlas, Gemm, GemmConfig, sys::cublasOperation_t};
use cudarc::driver::CudaContext;
use granule::cudarc::{CudaView, alloc, device};
use granule::units::{Bytes, GIB};
use granule::{Heap, HeapConfig, Pool, PoolConfig, Tensor};
use support::{Outcome, exit_with, show};

/// Columns of the left matrix and of the right one.
const INNER: usize = 1024;
const COLUMNS: usize = 512;
const ROUNDS: usize = 5;

fn main() -> ExitCode {
    exit_with(run)
}

/// A small whole number for an element, so that sums are exact.
fn element(row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3) % 5) as f32 - 2.0
}

#[allow(unsafe_code)]
fn run() -> Outcome {
    // SAFETY: only looks whether the library can be opened.
    let is_there = unsafe { cudarc::driver::sys::is_culib_present() };
    ensure!(is_there, "there is no CUDA driver here");
    // SAFETY: as above.
    let is_there = unsafe { cudarc::cublas::sys::is_culib_present() };
    ensure!(
        is_there,
        "libcublas is not found; see the head of examples/cublas.rs"
    );

    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let second = context.new_stream()?;
    let device = device(&context)?;
    println!("driver: {}, device: {}", device.kind(), device.info());
    let pool = Pool::new(&device, PoolConfig::with_budget(GIB))?;
    let heap = Heap::new(&pool, HeapConfig::default())?;
    let blas = CudaBlas::new(stream.clone())?;

    let left = Tensor::<f32>::new(&pool, &[INNER as u64], 1_000_000)?;
    let right: Vec<f32> = (0..INNER * COLUMNS)
        .map(|i| element(i / COLUMNS, i % COLUMNS))
        .collect();
    let mut b = alloc::<f32>(&heap, INNER * COLUMNS, &stream)?;
    stream.memcpy_htod(&right, &mut b)?;

    let address = left.ptr();
    let mut rows = 0;
    for round in 0..ROUNDS {
        let grown = 256 << round;
        left.grow(grown as u64)?;
        ensure!(left.ptr() == address, "the matrix moved");
        // New rows come from the other stream; the product waits for them.
        let fresh: Vec<f32> = (rows * INNER..grown * INNER)
            .map(|i| element(i / INNER, i % INNER))
            .collect();
        let mut new_rows = CudaView::new(left.rows_view(rows as u64..grown as u64)?, &second)?;
        second.memcpy_htod(&fresh, &mut new_rows)?;
        drop(new_rows);
        stream.join(&second)?;
        rows = grown;

        let a = CudaView::new(left.view(), &stream)?;
        let mut c = alloc::<f32>(&heap, rows * COLUMNS, &stream)?;
        // cuBLAS counts columns first, so what is row-major here is transposed there: C^T = B^T A^T.
        let config = GemmConfig {
            transa: cublasOperation_t::CUBLAS_OP_N,
            transb: cublasOperation_t::CUBLAS_OP_N,
            m: i32::try_from(COLUMNS)?,
            n: i32::try_from(rows)?,
            k: i32::try_from(INNER)?,
            alpha: 1.0,
            lda: i32::try_from(COLUMNS)?,
            ldb: i32::try_from(INNER)?,
            beta: 0.0,
            ldc: i32::try_from(COLUMNS)?,
        };
        let start = Instant::now();
        // SAFETY: the matrices are as large as the configuration says.
        unsafe { blas.gemm(config, &b, &a, &mut c) }?;
        let product: Vec<f32> = stream.clone_dtoh(&c)?;
        stream.synchronize()?;
        let took = start.elapsed();
        let mut wrong = 0;
        for (row, column) in (0..rows)
            .step_by(37)
            .flat_map(|r| (0..COLUMNS).step_by(41).map(move |c| (r, c)))
        {
            let exact: f32 = (0..INNER)
                .map(|k| element(row, k) * element(k, column))
                .sum();
            wrong += usize::from(product[row * COLUMNS + column] != exact);
        }
        ensure!(wrong == 0, "{wrong} elements of the product are wrong");
        println!(
            "{rows:>5} x {INNER} times {INNER} x {COLUMNS}: correct, {}; the left matrix is {} at {address}",
            show(took),
            Bytes(left.arena().len()),
        );
    }
    println!("heap: {:?}", heap.stats());
    Ok(())
}
