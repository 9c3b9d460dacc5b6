// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Collectives, which ranks compare before they move anything; and messages between two ranks.
#include <sched.h>

#include <cstring>
#include <set>

#include "card.h"
#include "nccl.h"

namespace fake_nccl {

std::atomic<long> num_calls{0}, num_bytes{0};

std::string Call::text() const {
  std::string what = kind == SEND ? "send" : kind == RECEIVE ? "receive" : name;
  what += " of " + std::to_string(count) + " " + type_name(type);
  if (reduction >= 0) what += std::string(", ") + reduction_name(reduction);
  std::string peer_rank = peer < 0 ? "" : std::to_string(comm->header->slots[peer].rank.load());
  if (kind == SEND) what += ", to rank " + peer_rank;
  else if (kind == RECEIVE) what += ", from rank " + peer_rank;
  else if (peer >= 0) what += ", root rank " + peer_rank;
  return site.empty() ? what : what + " at " + site;
}

namespace {

// Shows the others what this rank has called, waits for them, and compares.
int agree(const Call &call) {
  Comm *comm = call.comm;
  Slot &own = comm->header->slots[comm->rank];
  strncpy(own.text, call.text().c_str(), TEXT - 1);
  uint64_t sign[6] = {uint64_t(comm->calls), call.count, uint64_t(call.type), uint64_t(call.reduction),
                      uint64_t(call.peer), 0};
  for (const char *letter = call.name; *letter; ++letter) sign[5] = sign[5] * 131 + *letter;
  memcpy(own.sign, sign, sizeof sign);
  if (int error = barrier(comm)) return error;
  bool same = true;
  for (int r = 0; r < comm->size; ++r) same = same && !memcmp(comm->header->slots[r].sign, sign, sizeof sign);
  if (same) return OK;
  std::string why = "ranks differ in " + comm->title() + ", call " + std::to_string(comm->calls) + ":";
  for (int r = 0; r < comm->size; ++r) {
    const Slot &slot = comm->header->slots[r];
    why += "\n  rank " + std::to_string(slot.rank.load()) + ": " + slot.text;
  }
  return fail(comm, INVALID_USAGE, why);
}

// All others give what this rank gives. A sum is of this rank alone.
int without_others(const Call &call, size_t bytes) {
  if (!call.to || !bytes || fake_card::untouched(bytes)) return OK;
  const std::string name = call.name;
  const char *from = static_cast<const char *>(call.from);
  char *to = static_cast<char *>(call.to);
  if (name == "ReduceScatter") memmove(to, from + call.comm->rank * bytes, bytes);
  else if (name == "AlltoAll") memmove(to, from, call.comm->size * bytes);
  else if (name == "AllGather")
    for (int r = call.comm->size - 1; r >= 0; --r) memmove(to + r * bytes, from, bytes);
  else memmove(to, from, bytes);
  return OK;
}

// What this rank receives is what it sends itself.
int without_others(std::vector<Call> &calls) {
  for (const Call &call : calls) {
    if (call.kind != Call::SEND || call.peer != call.comm->rank || fake_card::untouched(call.count * size_of(call.type)))
      continue;
    for (Call &other : calls)
      if (other.kind == Call::RECEIVE && other.comm == call.comm && other.peer == call.peer && !other.over) {
        memmove(other.to, call.from, call.count * size_of(call.type));
        other.over = true;
        break;
      }
  }
  return OK;
}

}  // namespace

int collective(Call &call) {
  Comm *comm = call.comm;
  ++comm->calls;
  ++num_calls;
  note(comm, call.text());
  const size_t width = size_of(call.type), bytes = call.count * width;
  if (comm->size == 1 || is_alone()) return without_others(call, bytes);
  const std::string name = call.name;
  const int size = comm->size, me = comm->rank;
  const char *from = static_cast<const char *>(call.from);
  char *to = static_cast<char *>(call.to);
  const bool by_rank = name == "ReduceScatter" || name == "AlltoAll";  // a part of the input for each rank
  const bool gives = name != "Broadcast" || me == call.peer;
  const size_t piece = (by_rank ? CHUNK / size : CHUNK) / 64 * 64;
  num_bytes += bytes;
  if (int error = agree(call)) return error;
  if (!bytes) return barrier(comm);  // so that no rank calls anew while another compares
  for (size_t offset = 0; offset < bytes; offset += piece) {
    const size_t length = bytes - offset < piece ? bytes - offset : piece;
    if (by_rank)
      for (int r = 0; r < size; ++r) memcpy(comm->chunk(me) + r * piece, from + r * bytes + offset, length);
    else if (gives) memcpy(comm->chunk(me), from + offset, length);
    if (int error = barrier(comm)) return error;
    std::vector<const char *> inputs;
    for (int r = 0; r < size; ++r) inputs.push_back(comm->chunk(r) + (by_rank ? me * piece : 0));
    if (name == "AllReduce" || name == "ReduceScatter" || (name == "Reduce" && me == call.peer))
      reduce(to + offset, inputs, length / width, call.type, call.reduction);
    else if (name == "AllGather" || name == "AlltoAll")
      for (int r = 0; r < size; ++r) memcpy(to + r * bytes + offset, inputs[r], length);
    else if (name == "Broadcast") memcpy(to + offset, inputs[call.peer], length);
    if (int error = barrier(comm)) return error;
  }
  return OK;
}

namespace {

bool send_piece(Call &call) {
  Comm *comm = call.comm;
  Mail &mail = comm->mail(comm->rank, call.peer);
  if (mail.full) return false;
  const size_t all = call.count * size_of(call.type);
  mail.bytes = all - call.done < MAIL_BYTES ? all - call.done : MAIL_BYTES;
  mail.of_all = all, mail.type = call.type;
  strncpy(mail.text, call.text().c_str(), TEXT - 1);
  memcpy(comm->mail_bytes(comm->rank, call.peer), static_cast<const char *>(call.from) + call.done, mail.bytes);
  call.done += mail.bytes;
  num_bytes += mail.bytes;
  call.over = call.done >= all;
  mail.full = 1;
  return true;
}

int receive_piece(Call &call, bool *moved) {
  Comm *comm = call.comm;
  Mail &mail = comm->mail(call.peer, comm->rank);
  if (!mail.full) return OK;
  const size_t all = call.count * size_of(call.type);
  if (mail.of_all != all || mail.type != call.type) {
    auto rank = [comm](int r) { return std::to_string(comm->header->slots[r].rank.load()); };
    return fail(comm, INVALID_USAGE, "ranks differ in " + comm->title() + ":\n  rank " + rank(call.peer) + ": " +
                                         mail.text + "\n  rank " + rank(comm->rank) + ": " + call.text());
  }
  memcpy(static_cast<char *>(call.to) + call.done, comm->mail_bytes(call.peer, comm->rank), mail.bytes);
  call.done += mail.bytes;
  call.over = call.done >= all;
  mail.full = 0;
  *moved = true;
  return OK;
}

std::string open_calls(const std::vector<Call> &calls) {
  std::string text;
  for (const Call &call : calls)
    if (!call.over && text.size() < TEXT / 2) text += (text.empty() ? "" : "; ") + call.text();
  return text;
}

}  // namespace

// Those of one group go on side by side. Of two in the same direction between the same ends, the first comes first.
int messages(std::vector<Call> &calls) {
  if (calls.empty()) return OK;
  if (is_alone()) return without_others(calls);
  Comm *comm = calls[0].comm;
  ++comm->calls;
  num_calls += calls.size();
  note(comm, open_calls(calls));
  Patience patience(comm);
  size_t left = calls.size();
  int idle = 0, error = OK;
  while (left && !error) {
    bool moved = false;
    std::set<std::pair<Comm *, int>> taken;
    for (Call &call : calls) {
      if (call.over || !taken.insert({call.comm, call.peer * 2 + (call.kind == Call::SEND)}).second) continue;
      if (call.comm->header->broken) error = broken(call.comm);
      else if (call.kind == Call::SEND) moved |= send_piece(call);
      else error = receive_piece(call, &moved);
      if (error) break;
      left -= call.over;
    }
    if (moved) {
      idle = 0;
      note_waiting(false);
      note_progress();
    } else if (left && !error) {
      if (++idle < 50) {
        sched_yield();
        continue;
      }
      if (idle == 50) note(comm, open_calls(calls));
      note_waiting(true);
      usleep(idle < 200 ? 100 : 1000);
      error = patience.check();
    }
  }
  note_waiting(false);
  return error;
}

}  // namespace fake_nccl
