// What the bindings are generated from: one function type for each entry of the table in load.rs,
// by the exact symbol name. A name missing here does not compile there.
#include <cuda.h>

#define GRANULE_FN(name) typedef __typeof__(name) granule_##name

// Library and device.
GRANULE_FN(cuInit);
GRANULE_FN(cuDriverGetVersion);
GRANULE_FN(cuDeviceGet);
GRANULE_FN(cuDeviceGetCount);
GRANULE_FN(cuDeviceGetName);
GRANULE_FN(cuDeviceGetAttribute);
GRANULE_FN(cuDeviceTotalMem_v2);

// Contexts.
GRANULE_FN(cuDevicePrimaryCtxRetain);
GRANULE_FN(cuDevicePrimaryCtxRelease_v2);
GRANULE_FN(cuCtxGetCurrent);
GRANULE_FN(cuCtxPushCurrent_v2);
GRANULE_FN(cuCtxPopCurrent_v2);
GRANULE_FN(cuThreadExchangeStreamCaptureMode);

// Virtual memory management.
GRANULE_FN(cuMemGetInfo_v2);
GRANULE_FN(cuMemGetAllocationGranularity);
GRANULE_FN(cuMemGetAllocationPropertiesFromHandle);
GRANULE_FN(cuMemAddressReserve);
GRANULE_FN(cuMemAddressFree);
GRANULE_FN(cuMemCreate);
GRANULE_FN(cuMemRelease);
GRANULE_FN(cuMemMap);
GRANULE_FN(cuMemSetAccess);
GRANULE_FN(cuMemUnmap);
GRANULE_FN(cuMemExportToShareableHandle);
GRANULE_FN(cuMemImportFromShareableHandle);

// Streams and events.
GRANULE_FN(cuStreamCreate);
GRANULE_FN(cuStreamDestroy_v2);
GRANULE_FN(cuStreamGetId);
GRANULE_FN(cuStreamSynchronize);
GRANULE_FN(cuStreamWaitEvent);
GRANULE_FN(cuStreamIsCapturing);
GRANULE_FN(cuEventCreate);
GRANULE_FN(cuEventDestroy_v2);
GRANULE_FN(cuEventRecord);
GRANULE_FN(cuEventQuery);
GRANULE_FN(cuEventSynchronize);
GRANULE_FN(cuEventElapsedTime);

// Fills, copies and kernels.
GRANULE_FN(cuMemsetD8Async);
GRANULE_FN(cuMemcpyDtoDAsync_v2);
GRANULE_FN(cuMemcpyHtoDAsync_v2);
GRANULE_FN(cuMemcpyDtoHAsync_v2);
GRANULE_FN(cuMemHostAlloc);
GRANULE_FN(cuModuleLoadData);
GRANULE_FN(cuModuleUnload);
GRANULE_FN(cuModuleGetFunction);
GRANULE_FN(cuFuncLoad);
GRANULE_FN(cuLaunchKernel);

// For comparisons: plain and stream-ordered allocation, graphs.
GRANULE_FN(cuMemAlloc_v2);
GRANULE_FN(cuMemFree_v2);
GRANULE_FN(cuMemAllocAsync);
GRANULE_FN(cuMemFreeAsync);
GRANULE_FN(cuStreamBeginCapture_v2);
GRANULE_FN(cuStreamEndCapture);
GRANULE_FN(cuGraphInstantiateWithFlags);
GRANULE_FN(cuGraphLaunch);
GRANULE_FN(cuGraphDestroy);
GRANULE_FN(cuGraphExecDestroy);
