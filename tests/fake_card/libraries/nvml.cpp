// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// NVML as far as torch asks for it: the cards of the machine and their names.
#include <cstdint>
#include <cstdio>

#include "card.h"

using namespace fake_card;

EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlInitWithFlags(unsigned) { return 0; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT const char *nvmlErrorString(int) { return "error of the fake card's NVML"; }
EXPORT int nvmlDeviceGetCount_v2(int *count) {
  *count = cards_of_machine();
  return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  constexpr int INVALID_ARGUMENT = 2;
  if (index >= unsigned(cards_of_machine())) return INVALID_ARGUMENT;
  *handle = reinterpret_cast<void *>(uintptr_t(index) + 1);
  return 0;
}
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
