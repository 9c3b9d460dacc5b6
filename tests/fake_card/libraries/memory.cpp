// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>

#include "card.h"
#include "ledger.h"

namespace fake_card {
namespace {

std::mutex lock;
std::map<uintptr_t, Block> blocks;  // by their first address

constexpr size_t GRAIN = 512;

void *map_pages(size_t size, int file) {
  int how = (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | MAP_NORESERVE;
  void *pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, how, file, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

// Pages that another process can map by /proc/PID/fd; -1 where no more files can be open.
int shareable(size_t size) {
  int file = memfd_create("fake_card", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, size)) {
    close(file);
    return -1;
  }
  return file;
}

}  // namespace

void *take(size_t size, Kind kind, int device) {
  std::lock_guard<std::mutex> held(lock);
  size = (size + GRAIN - 1) / GRAIN * GRAIN;
  if (kind == Kind::DEVICE && !charge(device, long(size))) return nullptr;
  int file = kind == Kind::DEVICE ? shareable(size) : -1;
  void *pages = map_pages(size, file);
  if (!pages) {
    if (file >= 0) close(file);
    if (kind == Kind::DEVICE) charge(device, -long(size));
    return nullptr;
  }
  blocks[reinterpret_cast<uintptr_t>(pages)] = {size, file, kind, device};
  return pages;
}

bool give_back(void *pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks.end() || found->second.kind == Kind::VIRTUAL) return false;
  const Block &block = found->second;
  munmap(pointer, block.size);
  if (block.file >= 0) close(block.file);
  if (block.kind == Kind::DEVICE) charge(block.device, -long(block.size));
  blocks.erase(found);
  return true;
}

bool find(const void *pointer, Block *block, uintptr_t *begin) {
  std::lock_guard<std::mutex> held(lock);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return false;
  auto found = std::prev(next);
  if (address >= found->first + found->second.size) return false;
  if (block) *block = found->second;
  if (begin) *begin = found->first;
  return true;
}

void *map_of_others(int process, int file, size_t size, int device) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) return nullptr;
  void *pages = map_pages(size, opened);
  if (!pages) {
    close(opened);
    return nullptr;
  }
  std::lock_guard<std::mutex> held(lock);
  blocks[reinterpret_cast<uintptr_t>(pages)] = {size, opened, Kind::OF_OTHERS, device};
  return pages;
}

void note_virtual(void *pages, size_t size, int device) {
  std::lock_guard<std::mutex> held(lock);
  auto begin = reinterpret_cast<uintptr_t>(pages);
  if (size) blocks[begin] = {size, -1, Kind::VIRTUAL, device};
  else blocks.erase(begin);
}

}  // namespace fake_card
