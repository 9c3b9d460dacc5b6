// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "card.h"

namespace fake_card {
namespace {

constexpr int MOST_PROCESSES = 64;

struct Share {
  pid_t process;  // 0: nobody's
  long bytes[MOST_CARDS];
};

// A process that its parent has not waited for yet holds nothing any more.
bool lives(pid_t process) {
  char path[32], text[512] = "";
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE *file = fopen(path, "r");
  if (!file) return false;
  size_t size = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  const char *behind_name = size ? strrchr(text, ')') : nullptr;
  return behind_name && !strchr("ZX", behind_name[2]);
}

// Without a folder, of this process alone.
struct Ledger {
  pid_t process = 0;
  int file = -1;
  Share *shares = nullptr;

  // A forked process opens it anew, as a lock of its parent would be its own.
  void open_once() {
    if (process == getpid()) return;
    process = getpid();
    const char *folder = getenv("FAKE_CARD_FOLDER");
    int how = MAP_SHARED;
    if (folder) {
      char path[512];
      snprintf(path, sizeof path, "%s/ledger", folder);
      file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
      if (file < 0 || ftruncate(file, sizeof(Share) * MOST_PROCESSES)) abort();
    } else {
      how = MAP_PRIVATE | MAP_ANONYMOUS;
    }
    void *pages = mmap(nullptr, sizeof(Share) * MOST_PROCESSES, PROT_READ | PROT_WRITE, how, file, 0);
    if (pages == MAP_FAILED) abort();
    shares = static_cast<Share *>(pages);
  }

  Share *mine() {
    for (int n = 0; n < MOST_PROCESSES; ++n)
      if (shares[n].process == process) return shares + n;
    for (int n = 0; n < MOST_PROCESSES; ++n) {
      Share *share = shares + n;
      if (share->process && lives(share->process)) continue;
      memset(share, 0, sizeof *share);
      share->process = process;
      return share;
    }
    abort();
  }

  long sum(int device) {
    long bytes = 0;
    for (int n = 0; n < MOST_PROCESSES; ++n) {
      Share &share = shares[n];
      if (share.process && share.process != process && !lives(share.process)) memset(&share, 0, sizeof share);
      if (share.process) bytes += share.bytes[device];
    }
    return bytes;
  }
} ledger;

std::mutex mutex;

struct Held {
  std::lock_guard<std::mutex> in_process{mutex};
  Held() {
    ledger.open_once();
    if (ledger.file >= 0) flock(ledger.file, LOCK_EX);
  }
  ~Held() {
    if (ledger.file >= 0) flock(ledger.file, LOCK_UN);
  }
};

}  // namespace

bool charge(int device, long bytes) {
  Held held;
  device = on_machine(device);
  if (bytes > 0 && ledger.sum(device) + bytes > long(capacity())) return false;
  ledger.mine()->bytes[device] += bytes;
  return true;
}

size_t used(int device) {
  Held held;
  return size_t(ledger.sum(on_machine(device)));
}

}  // namespace fake_card
