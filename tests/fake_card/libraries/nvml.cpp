// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// NVML as far as torch asks for it: the cards of the machine and their names.
#include <cstdint>
#include <cstdio>

#include "card.h"

using namespace fake_card;

namespace {
constexpr int INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3;
}

EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlInitWithFlags(unsigned) { return 0; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT const char *nvmlErrorString(int) { return "error of the fake card's NVML"; }
EXPORT int nvmlDeviceGetCount_v2(int *count) {
  *count = cards_of_machine();
  return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index >= unsigned(cards_of_machine())) return INVALID_ARGUMENT;
  *handle = reinterpret_cast<void *>(uintptr_t(index) + 1);
  return 0;
}
// As "0000:03:00.0", of which the second number is the card's.
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
  const char *number = strchr(text, ':');
  *handle = reinterpret_cast<void *>(uintptr_t(number ? strtol(number + 1, nullptr, 16) : 0) + 1);
  return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = RELEASE_OF_CUDA;
  return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) {
  *count = 0;
  return 0;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, int *) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  snprintf(text, size, "GPU-00000000-0000-0000-0000-%012d", int(reinterpret_cast<uintptr_t>(handle)) - 1);
  return 0;
}
EXPORT int nvmlDeviceGetName(void *, char *text, unsigned size) {
  snprintf(text, size, "%s", NAME);
  return 0;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void *, int *major, int *minor) {
  *major = MAJOR, *minor = MINOR;
  return 0;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *text, void **handle) {
  const char *number = strrchr(text, '-');
  *handle = reinterpret_cast<void *>(uintptr_t(number ? atol(number + 1) : 0) + 1);
  return 0;
}
EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  *index = unsigned(reinterpret_cast<uintptr_t>(handle)) - 1;
  return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *, unsigned long long *total_free_used) {
  total_free_used[0] = total_free_used[1] = capacity(), total_free_used[2] = 0;
  return 0;
}
EXPORT int nvmlDeviceGetP2PStatus(void *, void *, int, int *status) {
  *status = 0;
  return 0;
}
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "580.95.05");
  return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
