//! Regenerates the CUDA bindings, and only under the `bindgen` feature. Without it nothing is
//! searched for and the checked-in `src/driver/cuda/bindings.rs` is used. The same for the C header
//! `src/capi/granule.h` under the feature `cbindgen`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "bindgen")]
    if let Err(why) = generate::run() {
        println!("cargo::error=feature `bindgen`: {why}");
        std::process::exit(1);
    }
    #[cfg(feature = "cbindgen")]
    if let Err(why) = header::run() {
        println!("cargo::error=feature `cbindgen`: {why}");
        std::process::exit(1);
    }
}

#[cfg(feature = "cbindgen")]
mod header {
    use std::env;
    use std::path::Path;

    /// Files with exported functions, in the order of the header.
    const FILES: [&str; 6] = ["error", "device", "arena", "heap", "dlpack", "torch"];

    const OPENING: &str = "\
/* The C ABI of granule. Generated from the documentation of the functions; do not edit.
 *
 * Functions answer GRANULE_OK or another status, and granule_last_error() then says what went wrong on this thread.
 * Handles are numbers; a closed one is GRANULE_STALE and never something else's. Addresses are those of the device.
 * Sizes are bytes. All functions may be called from any thread.
 */";

    pub fn run() -> Result<(), String> {
        let mut config = cbindgen::Config {
            language: cbindgen::Language::C,
            header: Some(OPENING.to_owned()),
            include_guard: Some("GRANULE_H".to_owned()),
            cpp_compat: true,
            usize_is_size_t: true,
            documentation_style: cbindgen::DocumentationStyle::C99,
            line_length: 110,
            ..cbindgen::Config::default()
        };
        config.function.sort_by = Some(cbindgen::SortKey::None);
        config.constant.sort_by = Some(cbindgen::SortKey::None);
        let mut builder = cbindgen::Builder::new().with_config(config);
        for file in FILES {
            let file = format!("src/capi/{file}.rs");
            println!("cargo::rerun-if-changed={file}");
            builder = builder.with_src(file);
        }
        let bindings = builder.generate().map_err(|e| e.to_string())?;
        let out = env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?;
        bindings.write_to_file(Path::new(&out).join("granule.h"));
        Ok(())
    }
}

#[cfg(feature = "bindgen")]
mod generate {
    use std::env;
    use std::path::{Path, PathBuf};

    use bindgen::callbacks::{ItemInfo, ItemKind, ParseCallbacks};

    const WRAPPER: &str = "src/driver/cuda/wrapper.h";

    /// The function types of the wrapper carry a prefix because C has one namespace for types and
    /// functions. Rust has two, so the prefix goes.
    #[derive(Debug)]
    struct StripPrefix;

    impl ParseCallbacks for StripPrefix {
        fn item_name(&self, item: ItemInfo<'_>) -> Option<String> {
            match item.kind {
                ItemKind::Type => item.name.strip_prefix("granule_").map(str::to_owned),
                _ => None,
            }
        }
    }

    pub fn run() -> Result<(), String> {
        println!("cargo::rerun-if-changed={WRAPPER}");
        for variable in [
            "GRANULE_CUDA_INCLUDE",
            "CUDA_HOME",
            "CUDA_PATH",
            "LIBCLANG_PATH",
        ] {
            println!("cargo::rerun-if-env-changed={variable}");
        }
        let include = include_dir()?;
        println!(
            "cargo::rerun-if-changed={}",
            include.join("cuda.h").display()
        );
        let out = env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?;

        let builder = bindgen::Builder::default()
            .header(WRAPPER)
            .clang_arg(format!("-I{}", include.display()))
            .allowlist_type("granule_cu.*")
            .allowlist_type("CU(stream|event)_flags")
            .allowlist_var("CUDA_VERSION")
            .allowlist_var("CU_MEMHOSTALLOC_(PORTABLE|DEVICEMAP)")
            .default_enum_style(bindgen::EnumVariation::NewType {
                is_bitfield: false,
                is_global: false,
            })
            .rust_edition(bindgen::RustEdition::Edition2024)
            .use_core()
            .generate_comments(false)
            .layout_tests(true)
            .derive_default(false)
            .disable_header_comment()
            .parse_callbacks(Box::new(StripPrefix));

        // bindgen panics when it cannot load libclang.
        let bindings = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| builder.generate()))
            .map_err(|_| {
                "libclang could not be loaded; set LIBCLANG_PATH to the folder that holds it"
                    .to_owned()
            })?
            .map_err(|e| {
                format!(
                    "cuda.h of {} could not be read ({e}); set GRANULE_CUDA_INCLUDE to a folder with cuda.h, \
                     and BINDGEN_EXTRA_CLANG_ARGS to -I and the folder of stddef.h if that is what is missing",
                    include.display()
                )
            })?;
        let target = Path::new(&out).join("bindings.rs");
        bindings
            .write_to_file(&target)
            .map_err(|e| format!("{} could not be written: {e}", target.display()))
    }

    /// The first of the usual folders that holds a cuda.h.
    fn include_dir() -> Result<PathBuf, String> {
        let has_header = |dir: &PathBuf| dir.join("cuda.h").is_file();
        if let Some(dir) = env::var_os("GRANULE_CUDA_INCLUDE").map(PathBuf::from) {
            // An explicit choice is not silently replaced by another.
            return if has_header(&dir) {
                Ok(dir)
            } else {
                Err(format!(
                    "GRANULE_CUDA_INCLUDE is {}, and there is no cuda.h in it",
                    dir.display()
                ))
            };
        }
        let roots = ["CUDA_HOME", "CUDA_PATH"]
            .into_iter()
            .filter_map(env::var_os);
        roots
            .map(PathBuf::from)
            .chain(["/usr/local/cuda".into(), "/opt/cuda".into()])
            .map(|root| root.join("include"))
            .chain(["/usr/include".into()])
            .find(has_header)
            .ok_or_else(|| {
                "no cuda.h in $CUDA_HOME/include, $CUDA_PATH/include, /usr/local/cuda/include, \
                 /opt/cuda/include or /usr/include; set GRANULE_CUDA_INCLUDE to the folder that holds it"
                    .to_owned()
            })
    }
}
