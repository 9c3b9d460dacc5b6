// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Device memory: blocks of host memory, of which a process may have as many bytes on a card as the card has.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fake_card {

// OF_OTHERS: opened by a handle that another process gave. VIRTUAL: mapped by the driver's functions.
enum class Kind { DEVICE, PINNED, OF_OTHERS, VIRTUAL };

struct Block {
  size_t size;
  int file;  // whose pages other processes can map; -1: none
  Kind kind;
  int device;
};

// A new block; nullptr if the card is too small for it.
void *take(size_t size, Kind kind, int device);
// False if no block begins there.
bool give_back(void *pointer);
// The block that an address lies in, and its beginning.
bool find(const void *pointer, Block *block, uintptr_t *begin);
// Maps the pages of a block of another process.
void *map_of_others(int process, int file, size_t size, int device);
// Pages that the driver has mapped, or, of size 0, unmapped there.
void note_virtual(void *pages, size_t size, int device);

}  // namespace fake_card
