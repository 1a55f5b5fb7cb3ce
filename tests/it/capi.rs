//! C programs against the header and the library, on the host driver.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// One that loads PyTorch, on a busy machine.
const TORCH_PATIENCE: Duration = Duration::from_secs(240);

/// Where `libgranule.so` is: beside this program, where cargo put it for this build.
fn library_dir() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let deps = program.parent().unwrap();
    let dirs = [deps, deps.parent().unwrap()];
    let found = dirs.iter().find(|dir| dir.join("libgranule.so").is_file());
    found
        .unwrap_or_else(|| panic!("no libgranule.so in {dirs:?}"))
        .to_path_buf()
}

/// The repository: cargo runs tests there, and a test carried to another machine has to be run there too.
fn root() -> PathBuf {
    std::env::current_dir().unwrap()
}

/// Compiles a program and runs it. What it prints last must be `passed`.
fn run(source: &str, device: &str) {
    let root = root();
    let source = root.join("tests/c").join(source);
    let stem = source.file_stem().unwrap().to_str().unwrap();
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let place = match place.is_dir() {
        true => place.to_path_buf(),
        false => std::env::temp_dir(),
    };
    let program = place.join(format!("{stem}-{device}"));
    let libraries = library_dir();
    let is_c = source.extension().is_some_and(|e| e == "c");
    let (compiler, standard) = if is_c {
        ("cc", "-std=c11")
    } else {
        ("c++", "-std=c++17")
    };
    let compiled = Command::new(compiler)
        .args([
            standard, "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread",
        ])
        .arg("-D_GNU_SOURCE")
        .arg("-I")
        .arg(root.join("src/capi"))
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .arg(libraries.join("libgranule.so"))
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{said}");

    let mut program = Command::new(&program);
    program.env("GRANULE_TEST_DEVICE", device);
    wait(program, stem, PATIENCE);
}

/// Runs a program for a while at most.
fn wait(mut program: Command, stem: &str, patience: Duration) {
    let mut child = program
        .env_remove("GRANULE_DRIVER")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > patience {
            let _ = child.kill();
            panic!("{stem} takes longer than {patience:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success() && out.ends_with("passed\n"),
        "{}\n{out}{err}",
        output.status
    );
}

#[test]
fn arenas_and_heaps_work_from_c() {
    run("memory.c", "host");
}

#[test]
fn misuse_from_c_is_answered() {
    run("misuse.c", "host");
}

#[test]
fn tensors_cross_by_dlpack() {
    run("dlpack.c", "host");
}

#[test]
fn what_pytorch_calls_works_from_c() {
    run("torch.c", "host");
}

#[test]
fn a_failed_allocation_throws_through_the_library() {
    run("raise.cpp", "host");
}

/// Runs a program of `tests/python`, with the interpreter that `GRANULE_PYTHON` names.
fn run_python(source: &str, patience: Duration) {
    let python = std::env::var_os("GRANULE_PYTHON").unwrap_or("python3".into());
    let mut python = Command::new(python);
    python
        .arg(root().join("tests/python").join(source))
        .env("GRANULE_LIBRARY", library_dir().join("libgranule.so"));
    wait(python, source, patience);
}

#[test]
fn the_python_module_knows_the_structures() {
    run_python("module.py", PATIENCE);
}

#[test]
#[ignore = "needs PyTorch and transformers: name their interpreter in GRANULE_PYTHON and run with --ignored"]
fn caches_in_arenas_hold_what_caches_by_cat_do() {
    run_python("caches.py", TORCH_PATIENCE);
}

#[test]
#[ignore = "needs a CUDA device and a C compiler; run with --include-ignored"]
fn arenas_and_heaps_work_from_c_on_cuda() {
    run("memory.c", "cuda");
}
