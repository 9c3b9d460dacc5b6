// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Streams whose work never ends, as a kernel of NCCL that waits for a process that has died.
//
// All other work of the fake card is done when a call returns. A stream hangs from `fake_card_hang` on, and so do the
// events that are recorded on it and the streams that wait for these, until `fake_card_let_go`.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "card.h"

namespace {

std::mutex lock;
std::set<cudaStream_t> streams;
std::set<cudaEvent_t> events;

template <class T>
bool hangs(const std::set<T> &which, T one) {
  std::lock_guard<std::mutex> held(lock);
  return which.count(one);
}

template <class T>
cudaError_t wait(const std::set<T> &which, T one) {
  while (hangs(which, one)) usleep(1000);
  return cudaSuccess;
}

}  // namespace

// Of this library alone, for the fake NCCL.
EXPORT void fake_card_hang(cudaStream_t stream) {
  std::lock_guard<std::mutex> held(lock);
  streams.insert(stream);
}
EXPORT void fake_card_let_go() {
  std::lock_guard<std::mutex> held(lock);
  streams.clear();
  events.clear();
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard<std::mutex> held(lock);
  if (streams.count(stream)) events.insert(event);
  else events.erase(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::lock_guard<std::mutex> held(lock);
  events.erase(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return hangs(events, event) ? cudaErrorNotReady : cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait(events, event); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::mutex> held(lock);
  if (events.count(event)) streams.insert(stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return hangs(streams, stream) ? cudaErrorNotReady : cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait(streams, stream); }
EXPORT cudaError_t cudaDeviceSynchronize() {
  for (;;) {
    {
      std::lock_guard<std::mutex> held(lock);
      if (streams.empty()) return cudaSuccess;
    }
    usleep(1000);
  }
}
