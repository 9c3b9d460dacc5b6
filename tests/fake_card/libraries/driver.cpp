// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// CUDA's driver as far as torch, Triton and vLLM ask for it beside the runtime. All else answers 0.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "card.h"

using namespace fake_card;

namespace {

int context;  // the only one, and the only module and kernel; its address is the handle

template <class T>
CUresult give(T *place) {
  *place = reinterpret_cast<T>(&context);
  return CUDA_SUCCESS;
}

template <class T>
T of_runtime(const char *name) {
  static void *runtime = dlopen("libcudart.so.13", RTLD_LAZY);
  return reinterpret_cast<T>(dlsym(runtime, name));
}

}  // namespace

// Devices

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = RELEASE_OF_CUDA;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int *count) {
  *count = cards();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char *text, int size, CUdevice) {
  snprintf(text, size, "%s", NAME);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memset(uuid->bytes, 0x40 + on_machine(device), sizeof uuid->bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice) {
  *bytes = capacity();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  return CUresult(of_runtime<int (*)(size_t *, size_t *)>("cudaMemGetInfo")(free, total));
}
// The numbers of attributes are the runtime's.
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return CUresult(of_runtime<int (*)(int *, int, int)>("cudaDeviceGetAttribute")(value, attribute, device));
}
EXPORT CUresult cuGetErrorString(CUresult, const char **text) {
  *text = "error of the fake card's driver";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult, const char **text) {
  *text = "fakeCardError";
  return CUDA_SUCCESS;
}

// Contexts

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice) { return give(retained); }
EXPORT CUresult cuCtxGetCurrent(CUcontext *current) { return give(current); }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  return CUresult(of_runtime<int (*)(int *)>("cudaGetDevice")(device));
}
EXPORT CUresult cuStreamGetCtx(CUstream, CUcontext *current) { return give(current); }
EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr *>(value) = pointer;
  else *static_cast<int *>(value) = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? CU_MEMORYTYPE_DEVICE : 0;
  return CUDA_SUCCESS;
}

// Kernels

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *) { return give(module); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *, unsigned, CUjit_option *, void **) {
  return give(module);
}
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *) { return give(function); }
EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *, CUjit_option *, void **, unsigned, CUlibraryOption *,
                                  void **, unsigned) {
  return give(library);
}
EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary, const char *) { return give(kernel); }
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? THREADS_OF_BLOCK
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction, const CUlaunchConfig *) {
  *count = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction, int, size_t) {
  *count = 2;
  return CUDA_SUCCESS;
}

// A function by its name without a number, of which the driver has the newest.
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult *status) {
  static void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  char with_number[256];
  *function = nullptr;
  for (const char *number : {"_v3", "_v2", ""}) {
    snprintf(with_number, sizeof with_number, "%s%s", name, number);
    if (!*function) *function = dlsym(driver, with_number);
  }
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
