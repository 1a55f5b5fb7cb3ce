//! The table of libcuda's functions: filled at run time from the library's file, or by the linker
//! in builds that opt in to that.
//!
//! Symbols are looked up by their exact, versioned names. Those in the first list are in every
//! driver since CUDA 12.0; a driver without one of them is refused with its name. Those in the
//! second serve extras only and may be missing.

use std::sync::OnceLock;

use libloading::Library;

use super::bindings as sys;
use crate::{Error, Result};

#[cfg(windows)]
const NAMES: &[&str] = &["nvcuda.dll"];
/// The bare name comes second: it may be a toolkit's stub, which has every symbol and no driver.
#[cfg(not(windows))]
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];

/// bindgen makes C function types nullable; entries of the table are not.
pub(super) trait Nullable {
    type Function;
}

impl<F> Nullable for Option<F> {
    type Function = F;
}

type Function<T> = <T as Nullable>::Function;

macro_rules! table {
    (required: $($required:ident)+; optional: $($optional:ident)+;) => {
        /// Functions of libcuda, under their own names.
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $(pub(super) $required: Function<sys::$required>,)+
            $(pub(super) $optional: sys::$optional,)+
        }

        impl Table {
            /// Every function of `library`; the error names the first that is missing.
            #[cfg(not(all(feature = "linked", link_libcuda)))]
            fn from_library(library: &Library) -> Result<Self> {
                Ok(Self {
                    $($required: {
                        // SAFETY: the type is generated from the declaration of this very symbol
                        // in cuda.h.
                        unsafe { symbol(library, stringify!($required)) }?
                    },)+
                    $($optional: {
                        // SAFETY: as above.
                        unsafe { symbol(library, stringify!($optional)) }.ok()
                    },)+
                })
            }

            /// The functions that the linker resolved; only the optional ones are looked up.
            #[cfg(all(feature = "linked", link_libcuda))]
            fn from_linker(library: Option<&Library>) -> Self {
                Self {
                    $($required: {
                        let address = linked::$required as unsafe extern "C" fn();
                        // SAFETY: function pointers of one ABI differ in type only, and the
                        // target type is generated from the declaration of this very symbol in
                        // cuda.h. It is called through that type alone.
                        unsafe { std::mem::transmute::<unsafe extern "C" fn(), Function<sys::$required>>(address) }
                    },)+
                    $($optional: {
                        // SAFETY: the type is generated from the declaration of this very symbol
                        // in cuda.h.
                        library.and_then(|library| unsafe { symbol(library, stringify!($optional)) }.ok())
                    },)+
                }
            }
        }

        /// Addresses only; the types are those of the bindings. The crate that brings the link line
        /// is never used for its declarations: its result types are Rust enums of an old CUDA.
        #[cfg(all(feature = "linked", link_libcuda))]
        #[allow(non_snake_case)]
        mod linked {
            use cuda_driver_sys as _;

            unsafe extern "C" {
                $(pub(super) fn $required();)+
            }
        }

        #[cfg(test)]
        const REQUIRED: &[&str] = &[$(stringify!($required)),+];
    };
}

table! {
    required:
        cuInit
        cuDriverGetVersion
        cuDeviceGet
        cuDeviceGetCount
        cuDeviceGetName
        cuDeviceGetAttribute
        cuDeviceTotalMem_v2
        cuDevicePrimaryCtxRetain
        cuDevicePrimaryCtxRelease_v2
        cuCtxGetCurrent
        cuCtxPushCurrent_v2
        cuCtxPopCurrent_v2
        cuThreadExchangeStreamCaptureMode
        cuMemGetInfo_v2
        cuMemGetAllocationGranularity
        cuMemAddressReserve
        cuMemAddressFree
        cuMemCreate
        cuMemRelease
        cuMemMap
        cuMemSetAccess
        cuMemUnmap
        cuStreamCreate
        cuStreamDestroy_v2
        cuStreamGetId
        cuStreamSynchronize
        cuStreamWaitEvent
        cuStreamIsCapturing
        cuEventCreate
        cuEventDestroy_v2
        cuEventRecord
        cuEventQuery
        cuEventSynchronize
        cuMemsetD8Async
        cuMemcpyDtoDAsync_v2
        cuMemcpyHtoDAsync_v2
        cuMemcpyDtoHAsync_v2
        cuMemHostAlloc
        cuModuleLoadData
        cuModuleUnload
        cuModuleGetFunction
        cuLaunchKernel;
    optional:
        cuFuncLoad
        cuMemGetAllocationPropertiesFromHandle
        cuMemExportToShareableHandle
        cuMemImportFromShareableHandle
        cuEventElapsedTime
        cuMemAlloc_v2
        cuMemFree_v2
        cuMemAllocAsync
        cuMemFreeAsync
        cuStreamBeginCapture_v2
        cuStreamEndCapture
        cuGraphInstantiateWithFlags
        cuGraphLaunch
        cuGraphDestroy
        cuGraphExecDestroy;
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Table")
    }
}

/// The process's table. The library is opened by the first call and stays open: nothing that
/// libcuda started, such as its threads, survives an unload.
pub(super) fn table() -> Result<&'static Table> {
    static TABLE: OnceLock<Result<Table>> = OnceLock::new();
    TABLE
        .get_or_init(|| load(NAMES))
        .as_ref()
        .map_err(Clone::clone)
}

#[cfg(not(all(feature = "linked", link_libcuda)))]
fn load(names: &[&str]) -> Result<Table> {
    let library = open(names)?;
    let table = Table::from_library(&library)?;
    std::mem::forget(library);
    Ok(table)
}

#[cfg(all(feature = "linked", link_libcuda))]
fn load(names: &[&str]) -> Result<Table> {
    let library = open(names).ok();
    let table = Table::from_linker(library.as_ref());
    std::mem::forget(library);
    Ok(table)
}

/// The first of `names` that the loader can open.
fn open(names: &[&str]) -> Result<Library> {
    let mut reason = String::new();
    for &name in names {
        // SAFETY: opening runs the library's initialisers. Those of libcuda need nothing of us; any
        // other library of that name is as trusted as the loader's search path.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(e) if reason.is_empty() => reason = e.to_string(),
            // The first name is the one that should have worked.
            Err(_) => {}
        }
    }
    Err(Error::LibraryMissing {
        tried: names.join(", "),
        reason,
    })
}

/// The address of `name` in `library`, as a function pointer of type `F`.
///
/// # Safety
///
/// `F` is the type of the function pointer that `name` stands for.
unsafe fn symbol<F: Copy>(library: &Library, name: &'static str) -> Result<F> {
    // SAFETY: the caller vouches for the type.
    match unsafe { library.get::<F>(name) } {
        Ok(found) => Ok(*found),
        Err(_) => Err(Error::SymbolMissing { symbol: name }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named() {
        let error = open(&["libgranule-absent.so.1", "libgranule-absent.so"]).unwrap_err();
        let Error::LibraryMissing { tried, reason } = error else {
            panic!("{error:?}");
        };
        assert_eq!(tried, "libgranule-absent.so.1, libgranule-absent.so");
        assert!(!reason.is_empty());
    }

    #[test]
    #[cfg(all(target_os = "linux", not(all(feature = "linked", link_libcuda))))]
    fn a_library_without_the_symbols_is_refused_by_name() {
        // Any library that is there and is not CUDA.
        let error = load(&["libc.so.6"]).unwrap_err();
        assert_eq!(error, Error::SymbolMissing { symbol: "cuInit" });
    }

    #[test]
    fn every_entry_of_the_wrapper_is_in_the_table() {
        // The other direction is checked by the compiler.
        let wrapper = include_str!("wrapper.h");
        let names = wrapper
            .lines()
            .filter_map(|line| line.strip_prefix("GRANULE_FN(")?.strip_suffix(");"));
        let optional = include_str!("load.rs");
        for name in names {
            let listed = REQUIRED.contains(&name)
                || optional.contains(&format!("        {name}\n"))
                || optional.contains(&format!("        {name};\n"));
            assert!(listed, "{name}");
        }
    }
}
