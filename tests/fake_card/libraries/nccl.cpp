// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// The functions of NCCL that torch calls. A call returns when it is done, so nothing fails later.
//
// With FAKE_CARD_LATE a call that waits for a process that has died returns without an error, as with the real NCCL. Its
// stream hangs until the communicator is aborted. `error`: NCCL notices the death, and ncclCommGetAsyncError says so;
// `silence`: it does not.
#include "nccl.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <random>

#include "card.h"

using namespace fake_nccl;

namespace {

struct Id {
  char bytes[128];
};
// ncclConfig_t from release 2.27 on, as far as the name of the communicator.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cluster_size, fewest_blocks, most_blocks;
  const char *network;
  int share, traffic;
  const char *name;
};
// A sum of inputs that are multiplied first; the factor may lie on the card.
struct Scale {
  double factor;
  const void *on_card;
  int type;
};

constexpr int VERSION = 22907;
thread_local int group_depth = 0;
thread_local std::vector<Call> group;
thread_local std::string site;
thread_local void *last_stream = nullptr;
std::map<int, Scale> scales;

const char *name_in(const void *config) {
  const Config *given = static_cast<const Config *>(config);
  return given && given->size >= sizeof(Config) ? given->name : nullptr;
}

std::string text_of(const Id &id) {
  char text[33];
  for (int k = 0; k < 16; ++k) snprintf(text + 2 * k, 3, "%02x", static_cast<unsigned char>(id.bytes[k]));
  return text;
}

int run(Call &call) {
  auto scale = scales.find(call.reduction);
  if (call.reduction < SCALED_SUMS || scale == scales.end()) return collective(call);
  const Scale &given = scale->second;
  if (fake_card::untouched(call.count * size_of(call.type))) return OK;
  const double factor = given.on_card ? first_value(given.on_card, given.type) : given.factor;
  const bool parts = std::string(call.name) == "ReduceScatter";
  std::vector<char> inputs = scaled(call.from, parts ? call.count * call.comm->size : call.count, call.type, factor);
  Call plain = call;
  plain.from = inputs.data(), plain.reduction = SUM;
  return collective(plain);
}

int run_group() {
  std::vector<Call> calls, mail;
  calls.swap(group);
  for (Call &call : calls) {
    if (call.kind != Call::COLLECTIVE) mail.push_back(call);
    else if (int error = run(call)) return error;
  }
  return messages(mail);
}

template <class... Arguments>
void tell_card(const char *name, Arguments... arguments) {
  if (void *function = dlsym(RTLD_DEFAULT, name)) reinterpret_cast<void (*)(Arguments...)>(function)(arguments...);
}

bool is_late(const char *how) {
  const char *text = getenv("FAKE_CARD_LATE");
  return text && (!how || !strcmp(text, how));
}

int run_group_of_stream() {
  void *stream = last_stream;
  int error = run_group();
  if (error != REMOTE_ERROR || !is_late(nullptr)) return error;
  tell_card("fake_card_hang", stream);
  return OK;
}

int put(Call call) {
  if (call.comm->error) return call.comm->error;
  call.site = site;
  group.push_back(call);
  return group_depth ? OK : run_group_of_stream();
}

int put_collective(const char *name, const void *from, void *to, size_t count, int type, int reduction, int root,
                   Comm *comm) {
  return put({Call::COLLECTIVE, comm, name, from, to, count, type, reduction, root, ""});
}

}  // namespace

// Of this library alone: who calls, for its messages; and what went through it.
EXPORT void fake_card_call_site(const char *text) { site = text; }
EXPORT long fake_card_collectives() { return num_calls; }
EXPORT long fake_card_bytes() { return num_bytes; }

EXPORT int ncclGetVersion(int *version) {
  *version = VERSION;
  return OK;
}
EXPORT int ncclGetUniqueId(Id *id) {
  std::random_device random;
  for (char &byte : id->bytes) byte = random();
  return OK;
}
EXPORT const char *ncclGetErrorString(int error) {
  switch (error) {
    case OK: return "no error";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "system error";
  }
}
EXPORT const char *ncclGetLastError(void *) { return last_error().c_str(); }

EXPORT int ncclCommInitRank(Comm **comm, int size, Id id, int rank) { return make(comm, size, text_of(id), rank, ""); }
EXPORT int ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, void *config) {
  return make(comm, size, text_of(id), rank, name_in(config));
}
EXPORT int ncclCommInitRankScalable(Comm **comm, int size, int rank, int, Id *ids, void *config) {
  return make(comm, size, text_of(*ids), rank, name_in(config));
}
EXPORT int ncclCommSplit(Comm *comm, int color, int key, Comm **part, void *config) {
  *part = nullptr;
  if (is_alone()) return color < 0 ? OK : make(part, comm->size, comm->id, comm->rank, name_in(config));
  ++comm->splits;
  ++comm->calls;
  int own[2] = {color, key};
  memcpy(comm->chunk(comm->rank), own, sizeof own);
  if (int error = barrier(comm)) return error;
  std::map<std::pair<int, int>, int> members;  // by key and rank
  for (int r = 0; r < comm->size; ++r) {
    int given[2];
    memcpy(given, comm->chunk(r), sizeof given);
    if (given[0] == color) members[{given[1], r}] = r;
  }
  if (int error = barrier(comm)) return error;
  if (color < 0) return OK;
  int rank = 0;
  for (const auto &member : members) {
    if (member.second == comm->rank) break;
    ++rank;
  }
  std::string id = comm->id + "_" + std::to_string(comm->splits) + "_" + std::to_string(color);
  return make(part, members.size(), id, rank, name_in(config));
}
EXPORT int ncclCommDestroy(Comm *comm) {
  if (comm) forget(comm);
  return OK;
}
// Its memory stays: another thread may wait in it.
EXPORT int ncclCommAbort(Comm *comm) {
  if (comm && comm->size > 1)
    fail(comm, REMOTE_ERROR, "rank " + std::to_string(number("RANK", 0)) + " has aborted " + comm->title());
  if (is_late(nullptr)) tell_card("fake_card_let_go");
  return OK;
}
EXPORT int ncclCommFinalize(Comm *) { return OK; }
EXPORT int ncclCommCount(Comm *comm, int *size) {
  *size = comm->size;
  return OK;
}
EXPORT int ncclCommUserRank(Comm *comm, int *rank) {
  *rank = comm->rank;
  return OK;
}
EXPORT int ncclCommGetAsyncError(Comm *comm, int *error) {
  *error = comm && !is_late("silence") ? comm->error : OK;
  return OK;
}
EXPORT int ncclMemAlloc(void **pointer, size_t size) {
  static auto allocate = reinterpret_cast<int (*)(void **, size_t)>(dlsym(RTLD_DEFAULT, "cudaMalloc"));
  return allocate(pointer, size);
}
EXPORT int ncclMemFree(void *pointer) {
  static auto release = reinterpret_cast<int (*)(void *)>(dlsym(RTLD_DEFAULT, "cudaFree"));
  return release(pointer);
}
EXPORT int ncclRedOpCreatePreMulSum(int *reduction, void *scalar, int type, int residence, Comm *) {
  constexpr int ON_HOST = 1;
  static int next = SCALED_SUMS;
  *reduction = next++;
  if (residence == ON_HOST) scales[*reduction] = {first_value(scalar, type), nullptr, type};
  else scales[*reduction] = {1, scalar, type};
  return OK;
}
EXPORT int ncclRedOpDestroy(int, Comm *) { return OK; }

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int reduction, Comm *comm, void *stream) {
  last_stream = stream;
  return put_collective("AllReduce", from, to, count, type, reduction, -1, comm);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int reduction, int root, Comm *comm,
                      void *stream) {
  last_stream = stream;
  return put_collective("Reduce", from, to, count, type, reduction, root, comm);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
  last_stream = stream;
  return put_collective("Broadcast", from, to, count, type, NO_REDUCTION, root, comm);
}
EXPORT int ncclBcast(void *buffer, size_t count, int type, int root, Comm *comm, void *stream) {
  last_stream = stream;
  return put_collective("Broadcast", buffer, buffer, count, type, NO_REDUCTION, root, comm);
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int reduction, Comm *comm,
                             void *stream) {
  last_stream = stream;
  return put_collective("ReduceScatter", from, to, count, type, reduction, -1, comm);
}
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  last_stream = stream;
  return put_collective("AllGather", from, to, count, type, NO_REDUCTION, -1, comm);
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
  last_stream = stream;
  return put_collective("AlltoAll", from, to, count, type, NO_REDUCTION, -1, comm);
}
EXPORT int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
  last_stream = stream;
  return put({Call::SEND, comm, "send", from, nullptr, count, type, NO_REDUCTION, peer, ""});
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
  last_stream = stream;
  return put({Call::RECEIVE, comm, "receive", nullptr, to, count, type, NO_REDUCTION, peer, ""});
}
EXPORT int ncclGroupStart() {
  ++group_depth;
  return OK;
}
EXPORT int ncclGroupEnd() { return --group_depth ? OK : run_group_of_stream(); }
