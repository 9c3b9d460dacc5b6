// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// CUDA's driver as far as torch asks for it beside the runtime. All else answers 0.
#include <cstdint>
#include <cstdio>

#include "card.h"

using namespace fake_card;

namespace {
int context;  // the only one; its address is the handle
}

EXPORT int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
  *flags = 0, *active = 1;
  return 0;
}
EXPORT int cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return 0;
}
EXPORT int cuDeviceGetCount(int *count) {
  *count = cards();
  return 0;
}
EXPORT int cuDeviceGet(int *device, int number) {
  *device = number;
  return 0;
}
EXPORT int cuGetErrorString(int, const char **text) {
  *text = "error of the fake card's driver";
  return 0;
}
EXPORT int cuCtxGetCurrent(void **current) {
  *current = &context;
  return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **retained, int) {
  *retained = &context;
  return 0;
}
EXPORT int cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer) {
  constexpr int MEMORY_TYPE = 2, DEVICE_POINTER = 3, OF_DEVICE = 2;
  if (attribute == DEVICE_POINTER) *static_cast<uintptr_t *>(value) = pointer;
  else *static_cast<int *>(value) = attribute == MEMORY_TYPE ? OF_DEVICE : 0;
  return 0;
}
