// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime without a GPU: memory is the host's, copies are done at once, kernels do nothing.
//
// Streams and events are in the order of the program, as everything has happened when a call returns. So a missing
// wait between two streams is not seen.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

#include "card.h"
#include "ledger.h"
#include "memory.h"

#undef cudaGetDeviceProperties
using namespace fake_card;

namespace {

thread_local int current = 0;
std::atomic<uintptr_t> last_handle{0x10000};
std::atomic<long> launches{0};

// A stream or an event: nothing is kept of it.
template <class T>
T handle() {
  return reinterpret_cast<T>(last_handle += 16);
}

cudaError_t allocate(void **pointer, size_t size, Kind kind) {
  *pointer = size ? take(size, kind, current) : nullptr;
  return *pointer || !size ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t release(void *pointer) { return !pointer || give_back(pointer) ? cudaSuccess : cudaErrorInvalidValue; }

bool on_card(const void *pointer) {
  Block block;
  return find(pointer, &block, nullptr) && block.kind != Kind::PINNED;
}

cudaError_t copy(void *to, const void *from, size_t size) {
  if (!size || (untouched(size) && (on_card(to) || on_card(from)))) return cudaSuccess;
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t launch() {
  ++launches;
  return cudaSuccess;
}

int answer_zero() { return 0; }

cudaError_t function_of_driver(const char *name, void **function, cudaDriverEntryPointQueryResult *result) {
  static void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function) *function = reinterpret_cast<void *>(answer_zero);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // namespace

// Kernels that torch has launched: the self-test's proof that this library is the one in use.
EXPORT long fake_card_launches() { return launches; }

// For the driver's library.
EXPORT int fake_card_charge(int device, long bytes) { return charge(device, bytes); }
EXPORT void fake_card_note_virtual(void *pages, size_t size, int device) { note_virtual(pages, size, device); }

// Devices

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  *count = cards();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
EXPORT cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= cards()) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  if (device < 0 || device >= cards()) return cudaErrorInvalidDevice;
  memset(p, 0, sizeof *p);
  strcpy(p->name, NAME);
  memset(p->uuid.bytes, 0x40 + on_machine(device), sizeof p->uuid.bytes);
  p->major = MAJOR, p->minor = MINOR;
  p->totalGlobalMem = capacity();
  p->sharedMemPerBlock = SHARED_OF_BLOCK, p->sharedMemPerBlockOptin = SHARED_OF_BLOCK_AT_MOST;
  p->sharedMemPerMultiprocessor = SHARED_OF_MULTIPROCESSOR;
  p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
  p->warpSize = WARP, p->multiProcessorCount = MULTIPROCESSORS;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = THREADS_OF_BLOCK, p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = THREADS_OF_MULTIPROCESSOR, p->maxBlocksPerMultiProcessor = 32;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536, p->textureAlignment = 512, p->l2CacheSize = L2_BYTES, p->memoryBusWidth = BUS_BITS;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
  p->cooperativeLaunch = p->ECCEnabled = 1, p->asyncEngineCount = 3, p->pciBusID = on_machine(device);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = THREADS_OF_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_OF_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_OF_BLOCK_AT_MOST; break;
    case cudaDevAttrWarpSize: *value = WARP; break;
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = MAJOR; break;
    case cudaDevAttrComputeCapabilityMinor: *value = MINOR; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS_OF_MULTIPROCESSOR; break;
    case cudaDevAttrL2CacheSize: *value = L2_BYTES; break;
    default: *value = 1;  // most others ask whether the card can do something
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *yes, int, int) {
  *yes = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", on_machine(device));
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  *version = RELEASE_OF_CUDA;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

// Memory

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, Kind::DEVICE); }
EXPORT cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t) { return allocate(p, size, Kind::DEVICE); }
EXPORT cudaError_t cudaHostAlloc(void **p, size_t size, unsigned) { return allocate(p, size, Kind::PINNED); }
EXPORT cudaError_t cudaMallocHost(void **pointer, size_t size) { return allocate(pointer, size, Kind::PINNED); }
EXPORT cudaError_t cudaFree(void *pointer) { return release(pointer); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return release(pointer); }
EXPORT cudaError_t cudaFreeHost(void *pointer) { return release(pointer); }
EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
  *device = host;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *total = capacity();
  *free = *total - used(current);
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  Block block;
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  if (!find(pointer, &block, nullptr)) return cudaSuccess;
  bool pinned = block.kind == Kind::PINNED;
  attributes->device = block.device;
  attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->devicePointer = const_cast<void *>(pointer);
  attributes->hostPointer = pinned ? const_cast<void *>(pointer) : nullptr;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) { return copy(to, from, n); }
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, n);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n, cudaStream_t) {
  return copy(to, from, n);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch, width);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *pointer, int value, size_t size) {
  if (!untouched(size)) memset(pointer, value, size);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t) {
  return cudaMemset(pointer, value, size);
}

// Memory of other processes

namespace {
struct Shared {
  long process, file, size;
};
}  // namespace
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
  Block block;
  uintptr_t begin;
  if (!find(pointer, &block, &begin) || block.file < 0) return cudaErrorInvalidValue;
  Shared shared{getpid(), block.file, long(block.size)};
  memset(handle, 0, sizeof *handle);
  memcpy(handle->reserved, &shared, sizeof shared);
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned) {
  Shared shared;
  memcpy(&shared, handle.reserved, sizeof shared);
  // CUDA does not open what the process itself has given.
  if (shared.process == getpid()) return cudaErrorInvalidResourceHandle;
  *pointer = map_of_others(shared.process, shared.file, shared.size, current);
  return *pointer ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
EXPORT cudaError_t cudaIpcCloseMemHandle(void *pointer) { return release(pointer); }
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t) {
  memset(handle, 0, sizeof *handle);
  return cudaSuccess;
}
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t) {
  *event = handle<cudaEvent_t>();
  return cudaSuccess;
}

// Streams and events

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  *stream = handle<cudaStream_t>();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = handle<cudaEvent_t>();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.01f;
  return cudaSuccess;
}

// Kernels

EXPORT cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return launch(); }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return launch(); }
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
  return launch();
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = THREADS_OF_BLOCK;
  attributes->binaryVersion = attributes->ptxVersion = 10 * MAJOR + MINOR;
  attributes->numRegs = 32, attributes->maxDynamicSharedSizeBytes = SHARED_OF_BLOCK_AT_MOST;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int, size_t) {
  *count = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int, size_t,
                                                                          unsigned) {
  *count = 2;
  return cudaSuccess;
}
EXPORT void **__cudaRegisterFatBinary(void *) {
  static void *binary[4];
  return binary;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *) { return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<void **>(stream) = nullptr;
  return cudaSuccess;
}

// Others

EXPORT const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "error of the fake card";
}
EXPORT const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "fakeCardError";
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                           cudaDriverEntryPointQueryResult *result) {
  return function_of_driver(name, function, result);
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result) {
  return function_of_driver(name, function, result);
}
