// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Communicators, where each process of the job is, and how long one waits for another.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "nccl.h"

namespace fake_nccl {
namespace {

// Where a process is.
struct Place {
  std::atomic<pid_t> process;
  std::atomic<int> waits;
  std::atomic<long> progress;
  int rank;
  char at[2 * TEXT];
};
struct Job {
  Place places[MOST_PROCESSES];
};

thread_local std::string error_text;

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// Zeroed pages; of a file that ranks share, or of this process alone.
void *pages(const std::string &path, size_t bytes) {
  void *found;
  if (path.empty()) {
    found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  } else {
    int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, bytes)) return nullptr;
    found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
  }
  return found == MAP_FAILED ? nullptr : found;
}

std::string folder() {
  const char *text = getenv("FAKE_CARD_FOLDER");
  return text ? text : "";
}

Job *job() {
  static Job *made = static_cast<Job *>(pages(folder().empty() ? "" : folder() + "/job", sizeof(Job)));
  return made;
}

Place &place() {
  static Place *own = [] {
    Place *places = job()->places;
    for (int index = 0; index < MOST_PROCESSES - 1; ++index) {
      pid_t nobody = 0;
      if (!places[index].process.compare_exchange_strong(nobody, getpid())) continue;
      places[index].rank = number("RANK", 0);
      return &places[index];
    }
    return &places[MOST_PROCESSES - 1];
  }();
  return *own;
}

// A zombie has ended too.
bool has_ended(pid_t process) {
  char path[64], line[512];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE *file = fopen(path, "r");
  if (!file) return true;
  const char *state = fgets(line, sizeof line, file) ? strrchr(line, ')') : nullptr;
  fclose(file);
  return !state || state[2] == 'Z' || state[2] == 'X';
}

std::string all_places() {
  std::string text;
  for (Place &each : job()->places) {
    if (!each.process) continue;
    const char *how = has_ended(each.process) ? "has ended; last " : each.waits ? "waits in " : "is outside; last ";
    text += "\n  rank " + std::to_string(each.rank) + ": " + how + each.at;
  }
  return text;
}

void wait_for_change(std::atomic<uint32_t> *word, uint32_t value) {
  timespec tenth{0, 100000000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &tenth, nullptr, 0);
}
void wake_all(std::atomic<uint32_t> *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

size_t mails_bytes(int size) { return size_t(size) * size * sizeof(Mail); }

}  // namespace

int number(const char *variable, int otherwise) {
  const char *text = getenv(variable);
  return text ? atoi(text) : otherwise;
}
bool is_alone() {
  static const bool alone = getenv("FAKE_CARD_ALONE");
  return alone;
}
double seconds(const char *variable, double otherwise) {
  const char *text = getenv(variable);
  return text ? atof(text) : otherwise;
}

std::string Comm::ranks() const {
  std::string text;
  for (int r = 0; r < size; ++r) text += (r ? ", " : "") + std::to_string(header->slots[r].rank.load());
  return "[" + text + "]";
}
std::string Comm::title() const {
  return "the communicator of ranks " + ranks() + (name.empty() ? "" : " (" + name + ")");
}
Mail &Comm::mail(int from, int to) const { return reinterpret_cast<Mail *>(behind)[from * size + to]; }
char *Comm::chunk(int of_rank) const { return behind + mails_bytes(size) + of_rank * CHUNK; }
char *Comm::mail_bytes(int from, int to) const {
  return behind + mails_bytes(size) + size * CHUNK + (size_t(from) * size + to) * MAIL_BYTES;
}

void note(const Comm *comm, const std::string &what) {
  snprintf(place().at, sizeof place().at, "%s (call %ld) in %s", what.c_str(), comm->calls, comm->title().c_str());
}
void note_waiting(bool waits) { place().waits = waits; }
void note_progress() { ++place().progress; }

const std::string &last_error() { return error_text; }
void set_last_error(const std::string &why) { error_text = why; }

int fail(Comm *comm, int code, const std::string &why) {
  uint32_t whole = 0;
  if (comm->header->broken.compare_exchange_strong(whole, 1)) {  // 1: being written
    strncpy(comm->header->why, why.c_str(), sizeof comm->header->why - 1);
    comm->header->broken = 2;
    ++comm->header->generation;
    wake_all(&comm->header->generation);
  }
  comm->error = code;
  set_last_error(why);
  return code;
}
int broken(Comm *comm) {
  while (comm->header->broken == 1) usleep(100);
  comm->error = REMOTE_ERROR;
  set_last_error(comm->header->why);
  return REMOTE_ERROR;
}

Patience::Patience(Comm *comm) : comm_(comm), began_(now()), still_since_(began_), next_(began_ + 0.5), seen_(-1) {}

int Patience::check() {
  if (comm_->header->broken) return broken(comm_);
  double time = now();
  if (time < next_) return OK;
  next_ = time + 0.25;
  long progress = 0;
  int here = 0;
  bool all_wait = true;
  for (Place &each : job()->places) {
    if (!each.process) continue;
    ++here;
    progress += each.progress;
    all_wait = all_wait && (each.waits || has_ended(each.process));
  }
  if (here < number("WORLD_SIZE", 1)) all_wait = false;
  if (progress != seen_ || !all_wait) seen_ = progress, still_since_ = time;
  for (int r = 0; r < comm_->size; ++r) {
    const Slot &slot = comm_->header->slots[r];
    if (slot.process && has_ended(slot.process))
      return fail(comm_, REMOTE_ERROR, "rank " + std::to_string(slot.rank.load()) + " has ended, and is waited for in " +
                                           comm_->title() + ":" + all_places());
  }
  if (all_wait && time - still_since_ > seconds("FAKE_CARD_STALL_S", 10))
    return fail(comm_, REMOTE_ERROR, "NCCL would wait for ever in " + comm_->title() + ":" + all_places());
  double limit = seconds("FAKE_CARD_TIMEOUT_S", 120);
  if (time - began_ > limit)
    return fail(comm_, REMOTE_ERROR, "nothing came for " + std::to_string(int(limit)) + " seconds in " +
                                         comm_->title() + ":" + all_places());
  return OK;
}

int barrier(Comm *comm) {
  if (comm->size == 1 || is_alone()) return OK;
  Header *header = comm->header;
  uint32_t generation = header->generation;
  if (header->broken) return broken(comm);
  if (header->arrived.fetch_add(1) == uint32_t(comm->size - 1)) {
    header->arrived = 0;
    ++header->generation;
    wake_all(&header->generation);
    note_progress();
    return OK;
  }
  note_waiting(true);
  Patience patience(comm);
  int error = OK;
  while (header->generation == generation && !error) {
    wait_for_change(&header->generation, generation);
    if (header->generation == generation) error = patience.check();
  }
  note_waiting(false);
  note_progress();
  if (error) return error;
  return header->broken ? broken(comm) : OK;
}

int make(Comm **made, int size, const std::string &id, int rank, const char *name) {
  Comm *comm = new Comm{size, rank, id, name ? name : "", nullptr, nullptr, 0, 0, 0, OK};
  *made = comm;
  if (size > MOST_RANKS) {
    set_last_error("the fake card has communicators of at most " + std::to_string(MOST_RANKS) + " ranks");
    return INVALID_USAGE;
  }
  const bool shared = size > 1 && !is_alone();
  if (shared && folder().empty()) {
    set_last_error("FAKE_CARD_FOLDER is not set, where ranks share memory");
    return SYSTEM_ERROR;
  }
  std::string path = shared ? folder() + "/communicator_" + id : "";
  comm->bytes = sizeof(Header) + mails_bytes(size) + size * CHUNK + size_t(size) * size * MAIL_BYTES;
  comm->header = static_cast<Header *>(pages(path, comm->bytes));
  if (!comm->header) {
    set_last_error("cannot make " + path);
    return SYSTEM_ERROR;
  }
  comm->behind = reinterpret_cast<char *>(comm->header + 1);
  comm->header->slots[rank].rank = number("RANK", rank);
  comm->header->slots[rank].process = getpid();
  note(comm, "making a communicator of " + std::to_string(size));
  int error = barrier(comm);
  if (rank == 0 && !path.empty()) unlink(path.c_str());  // all have it
  return error;
}

void forget(Comm *comm) {
  if (comm->header) munmap(comm->header, comm->bytes);
  delete comm;
}

}  // namespace fake_nccl
