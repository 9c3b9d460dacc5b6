// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// The driver's virtual memory: addresses that are reserved apart from the bytes of the card, which come and go there.
//
// By it vLLM's engines sleep: they give the bytes back and keep the addresses.
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "card.h"

namespace {

struct Bytes {
  size_t size;
  int device, file, mapped = 0;
  bool is_released = false;
};
using Handle = CUmemGenericAllocationHandle;
struct Mapping {
  size_t size;
  Handle handle;
};

std::mutex lock;
std::map<Handle, Bytes> handles;
std::map<CUdeviceptr, Mapping> mappings;
Handle last_handle = 0x1000;

template <class T>
T of_runtime(const char *name) {
  static void *runtime = dlopen("libcudart.so.13", RTLD_LAZY);
  return reinterpret_cast<T>(dlsym(runtime, name));
}

bool charge(int device, long bytes) { return of_runtime<int (*)(int, long)>("fake_card_charge")(device, bytes); }

void note(CUdeviceptr begin, size_t size, int device) {
  of_runtime<void (*)(void *, size_t, int)>("fake_card_note_virtual")(reinterpret_cast<void *>(begin), size, device);
}

// Pages at an address, or anywhere; nullptr if there are none.
void *map_pages(CUdeviceptr begin, size_t size, int file, size_t offset) {
  int how = (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | MAP_NORESERVE | (begin ? MAP_FIXED : 0);
  int use = file < 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
  void *pages = mmap(reinterpret_cast<void *>(begin), size, use, how, file, long(offset));
  return pages == MAP_FAILED ? nullptr : pages;
}

void give_back_unused(std::map<Handle, Bytes>::iterator found) {
  if (found == handles.end() || !found->second.is_released || found->second.mapped) return;
  charge(found->second.device, -long(found->second.size));
  close(found->second.file);
  handles.erase(found);
}

}  // namespace

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *,
                                              CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *begin, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *begin = reinterpret_cast<CUdeviceptr>(map_pages(0, size, -1, 0));
  return *begin ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr begin, size_t size) {
  munmap(reinterpret_cast<void *>(begin), size);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(Handle *handle, size_t size, const CUmemAllocationProp *asked, unsigned long long) {
  std::lock_guard<std::mutex> held(lock);
  int device = asked->location.id;
  if (!charge(device, long(size))) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("fake_card", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, long(size))) {
    if (file >= 0) close(file);
    charge(device, -long(size));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = last_handle += 16;
  handles[*handle] = {size, device, file};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr begin, size_t size, size_t offset, Handle handle, unsigned long long) {
  std::lock_guard<std::mutex> held(lock);
  auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (!map_pages(begin, size, found->second.file, offset)) return CUDA_ERROR_OUT_OF_MEMORY;
  ++found->second.mapped;
  mappings[begin] = {size, handle};
  note(begin, size, found->second.device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr begin, size_t size) {
  std::lock_guard<std::mutex> held(lock);
  for (CUdeviceptr end = begin + size; begin < end;) {
    auto mapping = mappings.find(begin);
    if (mapping == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    auto [of_mapping, handle] = mapping->second;
    map_pages(begin, of_mapping, -1, 0);
    note(begin, 0, 0);
    mappings.erase(mapping);
    auto found = handles.find(handle);
    if (found != handles.end()) --found->second.mapped;
    give_back_unused(found);
    begin += of_mapping;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(Handle handle) {
  std::lock_guard<std::mutex> held(lock);
  auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  found->second.is_released = true;
  give_back_unused(found);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRetainAllocationHandle(Handle *handle, void *pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto mapping = mappings.find(reinterpret_cast<CUdeviceptr>(pointer));
  if (mapping == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  *handle = mapping->second.handle;
  return CUDA_SUCCESS;
}
