// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// The answers of cuDNN that torch looks at.
#include "card.h"

EXPORT size_t cudnnGetVersion() { return 92000; }
EXPORT int cudnnCreate(void **handle) {
  static int the_only_one;
  *handle = &the_only_one;
  return 0;
}
EXPORT const char *cudnnGetErrorString(int) { return "error of the fake card's cuDNN"; }
