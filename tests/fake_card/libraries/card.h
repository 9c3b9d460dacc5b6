// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// What the libraries of the fake card share: its sizes, and the memory that is charged to it.
//
// The environment sets a card up:
//   CUDA_VISIBLE_DEVICES  which cards a process sees, as for CUDA; empty: none
//   FAKE_CARD_COUNT       cards of the machine (1)
//   FAKE_CARD_GB          memory of each, in 10^9 bytes (85, as an H100 has)
//   FAKE_CARD_LOG         1: functions that only answer 0 say their name, once each
//   FAKE_CARD_UNTOUCHED   1: of blocks above 1 MiB only the size counts. Nothing is read or written there, so that a
//                         model of any size fits into a small host
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_card {

constexpr char NAME[] = "NVIDIA H100 80GB HBM3";
constexpr int RELEASE_OF_CUDA = 13000, MAJOR = 9, MINOR = 0, MULTIPROCESSORS = 132;
constexpr int WARP = 32, THREADS_OF_BLOCK = 1024, THREADS_OF_MULTIPROCESSOR = 2048, REGISTERS = 65536;
constexpr int SHARED_OF_BLOCK = 49152, SHARED_OF_BLOCK_AT_MOST = 232448, SHARED_OF_MULTIPROCESSOR = 233472;
constexpr int L2_BYTES = 50 << 20, BUS_BITS = 5120, MOST_CARDS = 16;

inline int cards_of_machine() {
  const char *text = getenv("FAKE_CARD_COUNT");
  return text ? atoi(text) : 1;
}

// Number of cards that this process sees.
inline int cards() {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return cards_of_machine();
  int count = *visible != 0;
  for (; *visible; ++visible) count += *visible == ',';
  return count;
}

// The number on the machine of a card that this process sees.
inline int on_machine(int device) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  for (int n = 0; visible && n < device; ++n) visible = strchr(visible, ',') ? strchr(visible, ',') + 1 : nullptr;
  return visible && *visible >= '0' && *visible <= '9' ? atoi(visible) : device;
}

inline size_t capacity() {
  const char *text = getenv("FAKE_CARD_GB");
  return size_t((text ? atof(text) : 85.0) * 1e9);
}

// Whether so many bytes of the card are left alone.
inline bool untouched(size_t bytes) {
  static const bool is_on = getenv("FAKE_CARD_UNTOUCHED");
  return is_on && bytes > 1 << 20;
}

}  // namespace fake_card
