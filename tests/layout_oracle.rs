//! Our bindings agree with those of `cuda-driver-sys`, which were made from another header by other
//! hands: sizes, offsets and values of what crosses the border.
//!
//! Built with `--cfg link_libcuda` only; `.ci/layout-oracle` runs it on a machine without CUDA. No
//! function of libcuda is named here, so nothing needs to be linked.

#![cfg(link_libcuda)]

use std::mem::{align_of, offset_of, size_of};

use cuda_driver_sys as theirs;

#[allow(warnings, clippy::all, clippy::pedantic, clippy::restriction)]
mod ours {
    include!("../src/driver/cuda/bindings.rs");
}

macro_rules! same_layout {
    ($name:ident { $($field:ident),* }) => {
        assert_eq!(size_of::<ours::$name>(), size_of::<theirs::$name>(), stringify!($name));
        assert_eq!(align_of::<ours::$name>(), align_of::<theirs::$name>(), stringify!($name));
        $(assert_eq!(
            offset_of!(ours::$name, $field),
            offset_of!(theirs::$name, $field),
            concat!(stringify!($name), ".", stringify!($field))
        );)*
    };
}

macro_rules! same_values {
    ($kind:ident { $($value:ident),* }) => {
        $(assert_eq!(ours::$kind::$value.0, theirs::$kind::$value as u32, stringify!($value));)*
    };
}

#[test]
fn structs_have_one_layout() {
    same_layout!(CUmemLocation { type_ });
    same_layout!(CUmemAccessDesc { location, flags });
    same_layout!(CUmemAllocationProp {
        type_,
        requestedHandleTypes,
        location,
        win32HandleMetaData
    });
    // Moved into a union, or given names, since.
    assert_eq!(
        offset_of!(ours::CUmemLocation, __bindgen_anon_1),
        offset_of!(theirs::CUmemLocation, id)
    );
    assert_eq!(
        offset_of!(ours::CUmemAllocationProp, allocFlags),
        offset_of!(theirs::CUmemAllocationProp, reserved)
    );
    same_layout!(CUdeviceptr {});
    same_layout!(CUmemGenericAllocationHandle {});
    same_layout!(CUdevice {});
}

#[test]
fn constants_have_one_value() {
    same_values!(CUmemAllocationType {
        CU_MEM_ALLOCATION_TYPE_PINNED
    });
    same_values!(CUmemLocationType {
        CU_MEM_LOCATION_TYPE_DEVICE
    });
    same_values!(CUmemAccess_flags {
        CU_MEM_ACCESS_FLAGS_PROT_READ,
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    });
    same_values!(CUmemAllocationHandleType {
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    });
    same_values!(CUmemAllocationGranularity_flags {
        CU_MEM_ALLOC_GRANULARITY_MINIMUM
    });
    same_values!(CUstreamCaptureMode {
        CU_STREAM_CAPTURE_MODE_GLOBAL,
        CU_STREAM_CAPTURE_MODE_RELAXED
    });
    same_values!(CUstreamCaptureStatus {
        CU_STREAM_CAPTURE_STATUS_NONE
    });
    same_values!(CUdevice_attribute {
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    });
    same_values!(CUstream_flags {
        CU_STREAM_NON_BLOCKING
    });
    same_values!(CUevent_flags {
        CU_EVENT_DEFAULT,
        CU_EVENT_DISABLE_TIMING
    });
    same_values!(CUresult {
        CUDA_SUCCESS,
        CUDA_ERROR_INVALID_VALUE,
        CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_NOT_READY,
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_NOT_SUPPORTED
    });
    assert_eq!(
        ours::CU_MEMHOSTALLOC_PORTABLE,
        theirs::CU_MEMHOSTALLOC_PORTABLE
    );
    assert_eq!(
        ours::CU_MEMHOSTALLOC_DEVICEMAP,
        theirs::CU_MEMHOSTALLOC_DEVICEMAP
    );
}
